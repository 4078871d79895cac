"""Jobs that wait to be woken, and say something different the second time."""

from __future__ import annotations

import time
from typing import Any

import dramatiq
from dramatiq.common import dq_name
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from ojs_bridge import DeadLetter, Retry, Snooze
from tests import zombies
from tests.on_dramatiq.app import QUEUE, RUNS, URL, broker, run
from tests.on_dramatiq.fleet import left_in

broker.add_middleware(Results(backend=RedisBackend(url=URL, namespace=f"{QUEUE}-results")))
SAYS = {"DeadLetter": DeadLetter, "Retry": Retry, "Snooze": Snooze}


@dramatiq.actor(queue_name=QUEUE, ojs_retry=zombies.POLICY, store_results=True)
def waits(name: str) -> Any:
    """Wait the first time, and speak the job's last words; succeed the second time."""
    if run(name) > 1:
        return "second"
    while not RUNS.with_name("go").exists():
        time.sleep(0.05)
    said = eval(zombies.LAST_WORDS[name.replace("_", " ")], {**globals(), **SAYS})
    if isinstance(said, BaseException):
        raise said
    return said


@dramatiq.actor(queue_name=QUEUE)
def follows(word: str) -> None:
    """Follow in a pipeline."""
    run(f"follows-{word}")


def results() -> dict[str, Any]:
    """Return the results of the jobs by name."""
    return {name: job(name).get_result() for name in zombies.LAST_WORDS}


def job(name: str) -> dramatiq.Message[Any]:
    """Return the message of a job, with its own id."""
    return waits.message_with_options(args=(name.replace(" ", "_"),)).copy(message_id=f"{QUEUE}-{name}")


def left() -> int:
    """Return how many messages the broker still has."""
    return sum(left_in(broker, name) for name in (QUEUE, dq_name(QUEUE)))


def send() -> None:
    """Send all jobs, each as the first step of a pipeline."""
    for name in zombies.LAST_WORDS:
        (job(name) | follows.message()).run()
