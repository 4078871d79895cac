"""`self.retry(...)` with options that a broker cannot take: the job is a dead letter, or is seen to wait."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from ojs_bridge import JobNotFound, LetterNotFound
from tests.contract.steps import OPAQUE, an, retries
from tests.on_celery.fleet import Fleet
from tests.servers import eventually

#: Options that Redis takes in its own way, and that RabbitMQ may refuse.
ODD: dict[str, dict[str, Any]] = {
    "a priority in words": {"priority": "high"},
    "a high priority": {"priority": 300},
    "a header of an unknown type": {"headers": {"a": OPAQUE}},
    "a long header": {"headers": {"x" * 300: 1}},
}
#: An exchange, or a queue behind it, that may be there later: a parked retry waits for it.
MISSING: dict[str, dict[str, Any]] = {
    "an exchange": {"exchange": "nowhere", "routing_key": "nowhere"},
    "a queue": {"exchange": "amq.direct", "routing_key": "nowhere"},
}


def buried(fleet: Fleet, job_id: str) -> bool:
    with suppress(LetterNotFound):
        return bool(fleet.bridge.dead_letters.get(job_id))
    return False


def parked(fleet: Fleet, job_id: str) -> bool:
    with suppress(JobNotFound):
        return bool(fleet.bridge.retries.get(job_id))
    return False


@pytest.mark.parametrize("delay", [0.1, 61], ids=["published", "parked"])
def test_what_a_broker_does_not_take_is_kept(fleet: Fleet, delay: float) -> None:
    def send(options: dict[str, Any]) -> str:
        step = retries(exc=an(KeyError, "k"), countdown=delay, **options)
        return fleet.send("act_kept", step, ojs_retry={"max_interval": "PT2M"}).id

    def kept(job_id: str) -> bool:
        return buried(fleet, job_id) or parked(fleet, job_id)

    jobs = {odd: send(options) for odd, options in {**ODD, **MISSING}.items()}
    if delay > 60:
        for odd, job_id in jobs.items():
            eventually(lambda job_id=job_id: kept(job_id), seconds=30, what=f"{odd} kept")
            with suppress(JobNotFound):
                fleet.bridge.retries.run(job_id)
    for odd in ODD:
        eventually(lambda odd=odd: buried(fleet, jobs[odd]), seconds=30, what=f"a letter of {odd}")
    for missing in MISSING:
        eventually(lambda missing=missing: kept(jobs[missing]), seconds=30, what=f"{missing} kept")
        with suppress(JobNotFound):
            fleet.bridge.retries.cancel(jobs[missing])
