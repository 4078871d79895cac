"""Whatever strikes a thread or a greenlet of a Celery worker, and wherever: its job goes on, and at once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from celery.result import AsyncResult
from celery.worker.request import create_request_cls
from kombu.utils.imports import symbol_by_name

from ojs_bridge.celery import install
from tests.contract.steps import KEEP, Step, raises
from tests.on_celery.by_hand import by_hand
from tests.on_celery.fleet import Fleet
from tests.on_celery.test_pools import held_by
from tests.servers import eventually

#: Of the lines that a thread runs beside its task, every so-manieth is struck.
STRIDE = 13
#: On RabbitMQ a green pool runs ten jobs a second.
WIDE = 39
#: So many lines before and after the acknowledgement are all struck.
LAST = 8
NEVER = 1_000_000
#: A backoff that fails, and so one that is struck, waits for the longest time.
POLICY = {**KEEP, "max_interval": "PT1S"}
#: steps, the state in which they end, and how many runs that takes
JOBS: list[tuple[list[Step], str, int]] = [
    (["ok"], "SUCCESS", 1),
    ([raises(OSError, "down"), "ok"], "SUCCESS", 2),
    ([raises(OSError, "down")], "FAILURE", 3),
]


def shown(fleet: Fleet, job: AsyncResult, runs: int, state: str) -> str:
    """The state of a job now. Celery may store that of a retry when the run after it has ended.

    A strike at Celery's own line that calls the task is a failure for it, until the run has been judged.
    """
    now = str(job.backend.get_state(job.id))
    late = now == "RETRY" and len(fleet.runs(job)) >= runs
    return state if late else now


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize(
    ("broker", "pool", "error", "stride"),
    [
        ("valkey", "threads", "MemoryError", STRIDE),
        ("rabbitmq", "threads", "MemoryError", STRIDE),
        ("valkey", "gevent", "MemoryError", STRIDE),
        ("rabbitmq", "gevent", "GreenletExit", WIDE),
    ],
)
def test_a_job_goes_on_whose_thread_is_struck_beside_its_task(
    separate: Callable[..., Fleet],
    request: pytest.FixtureRequest,
    broker: str,
    pool: str,
    error: str,
    stride: int,
) -> None:
    url = request.getfixturevalue(broker).url
    store = request.getfixturevalue("valkey").url
    fleet = separate(broker=url, store=store, reservation="PT30S", heard=False)
    fleet.start("-P", pool, "-c", "8", "-I", "tests.on_celery.struck").await_ready()
    for steps, state, runs in JOBS:
        whole = fleet.send("act", *steps, ojs_retry=POLICY, headers={"strike": [NEVER, error]})
        assert fleet.end(whole) == state
        eventually(lambda whole=whole: fleet._list("strikes", whole))
        lines = fleet._list("strikes", whole)[0][0]
        assert lines > 10 * stride
        jobs = {
            nth: fleet.send("act", *steps, ojs_retry=POLICY, headers={"strike": [nth, error]})
            for nth in sorted({*range(1, lines, stride), *range(lines - LAST, lines + LAST)})
        }
        wrong: dict[str, str] = {}

        def all_have_ended(jobs: Any = jobs, wrong: Any = wrong, end: Any = (runs, state)) -> bool:
            places = dict(re.findall("struck (\\S+) at (.*)", fleet.worker.log))
            seen = {f"{nth} {places.get(job.id)}": shown(fleet, job, *end) for nth, job in jobs.items()}
            wrong.clear()
            wrong.update({place: state for place, state in seen.items() if state != end[1]})
            return not wrong

        with suppress(TimeoutError):
            eventually(all_have_ended, seconds=60)
        assert wrong == {}
    eventually(lambda: held_by(fleet) == [], seconds=60, what="a worker that holds nothing")
    log = fleet.worker.log
    assert "already acknowledged" not in log and "PRECONDITION" not in log


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_run_that_breaks_off_at_its_acknowledgement_is_acknowledged_once(
    unique: str, is_noted: bool
) -> None:
    """Celery's main thread acknowledges some time later, and a second time would end the worker."""
    hand, owed = by_hand(install, unique), list[Callable[[], None]]()
    hand.send("plain", "ok")
    message, task = hand.take(), hand.app.tasks["plain"]
    acknowledge, reject = message.ack_log_error, message.reject_log_error
    kind = create_request_cls(symbol_by_name(task.Request), task, hand.pool, "here", None)
    request = kind(
        message,
        on_ack=lambda *options: owed.append(partial(acknowledge, *options)),
        on_reject=lambda *options: owed.append(partial(reject, *options)),
        app=hand.app,
        task=task,
    )
    request.on_accepted(1, time.monotonic())
    request.acknowledge()
    request.acknowledged = is_noted
    request.ojs_left(MemoryError("here"))
    assert len(owed) == 2 - is_noted
    for settle in owed:
        settle()
    assert message.acknowledged
