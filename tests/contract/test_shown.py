"""Nothing that only shows a job stands before what the bridge has decided: it may raise anything, or hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ojs_bridge import DeadLetter, Snooze
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.notes import client
from tests.contract.steps import KEEP, raises, sleeps
from tests.instrumentation.shown import ERRORS, HEARD, RESULTS, SHOWN
from tests.servers import Valkey, eventually

KINDS = ("celery-valkey", "dramatiq-valkey", "dramatiq-rabbitmq")
#: A job that is postponed, retried and kept.
STEPS = (raises(Snooze, "PT0.1S"), raises(OSError, "down"), raises(DeadLetter, "bank.down", "down"))


def broken(made: Callable[..., Fleet], kind: str, valkey: Valkey) -> Fleet:
    """Make a fleet whose hooks, receivers and results break where a job asks for it, and start its worker."""
    where = "tests.instrumentation.shown"
    fleet = made(
        kind,
        reservation="PT3S",
        instruments=("shown.receivers",),
        middleware=(f"{where}:Hooked",),
        results=f"{where}:Shown+{valkey.url}",
    )
    fleet.start(8).await_ready()
    return fleet


def assert_once(fleet: Fleet, what: object, good: str, bad: str) -> None:
    """See that a good and a bad job have had their runs and their ends, each once."""
    assert end(fleet, good).type == "job.completed", what
    assert end(fleet, bad).type == "job.discarded", what
    assert (attempts(fleet, good), attempts(fleet, bad)) == ([1], [1, 1, 2]), what
    assert sorted(fleet.types(good)) == ["job.completed", "job.started"], what
    eventually(lambda: "dead_letter.added" in fleet.types(bad))
    ends = ["dead_letter.added", "job.discarded", "job.failed", "job.failed", "job.retrying", "job.snoozed"]
    assert sorted(fleet.types(bad)) == [*ends, *["job.started"] * 3], what
    assert fleet.bridge.dead_letters.get(bad).errors[-1]["type"] == "bank.down", what


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_raised_where_a_job_is_shown_its_decision_is_carried_out_once(
    made: Callable[..., Fleet], kind: str, valkey: Valkey
) -> None:
    fleet = broken(made, kind, valkey)
    places = [(place, error) for place in SHOWN[fleet.framework] for error in ERRORS]
    heard = (*HEARD[fleet.framework], *RESULTS[fleet.framework])
    places += [(place, error) for place in heard for error in ("RuntimeError", "MemoryError")]
    jobs = {}
    for place in places:
        # For want of memory in its main process a Celery worker ends, natively, too.
        if place[0] not in RESULTS["celery"] or place[1] != "MemoryError":
            meta = {"breaks": place, "store_results": True}
            jobs[place] = [fleet.send("act", *steps, policy=KEEP, meta=meta) for steps in (("ok",), STEPS)]
    for place, (good, bad) in jobs.items():
        assert_once(fleet, place, good, bad)
    # On a quick machine the last message is acknowledged after the last event.
    eventually(lambda: fleet.left() == 0, what="an empty queue")


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", KINDS)
def test_while_the_results_hang_what_is_kept_is_kept_and_no_job_runs_again(
    made: Callable[..., Fleet], kind: str, valkey: Valkey
) -> None:
    fleet = broken(made, kind, valkey)
    jobs = {}
    for place in RESULTS[fleet.framework]:
        meta = {"breaks": [place, f"go:{fleet.queue}"], "store_results": True}
        jobs[place] = [fleet.send("act", *steps, policy=KEEP, meta=meta) for steps in (("ok",), STEPS)]
    for _, bad in jobs.values():
        assert end(fleet, bad).type == "job.discarded"
        eventually(lambda bad=bad: "dead_letter.added" in fleet.types(bad))
    # Another job of the worker, which lasts longer than a reservation.
    assert end(fleet, fleet.send("act", sleeps(5))).type == "job.completed"
    assert end(fleet, fleet.send("act", "ok")).type == "job.completed"
    client(fleet.settings.backend).set(f"go:{fleet.queue}", 1)
    for place, (good, bad) in jobs.items():
        assert_once(fleet, place, good, bad)
    eventually(lambda: fleet.left() == 0, what="an empty queue")
