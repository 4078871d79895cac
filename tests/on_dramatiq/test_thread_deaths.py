"""Whatever strikes a thread as its job ends, and wherever: the job goes on, and at once."""

from __future__ import annotations

import time
from pathlib import Path

import dramatiq
import pytest
from dramatiq.middleware import TimeLimitExceeded

from ojs_bridge.dramatiq import consumer, watch
from ojs_bridge.engine import heartbeat
from tests.on_dramatiq.fleet import QUICK, Fleet
from tests.servers import eventually
from tests.strikes import Strike

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

#: Of the lines that a thread runs after its actor, every so-manieth is struck.
STRIDE = 7
#: The code in whose lines an exception strikes; those of a lock or of a client of a broker are not ours.
STRUCK = ("/ojs_bridge/", "/dramatiq/worker.py", "/dramatiq/broker.py")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "LATER_SECONDS", 0.05)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watch, "GIVE_UP_SECONDS", 600.0)
    monkeypatch.setattr(heartbeat, "CLEAR_SECONDS", 0.1)
    for name in ("CONSUMER_RESTART", "POST_PROCESS_MESSAGE_RETRY"):
        monkeypatch.setattr(f"dramatiq.worker.{name}_DELAY_SECS", 0.1)


def rests(fleet: Fleet, worker: dramatiq.Worker) -> bool:
    """Return whether no message is in a queue or in the worker, and no reservation is extended."""
    heart = fleet.bridge.engine.reservations.heart
    assert heart is not None
    # RabbitMQ does not count what it has not heard of again.
    unheard = [tag for each in worker.consumers.values() for tag in getattr(each.consumer, "known_tags", ())]
    return not (fleet.left() or unheard or heart._live or fleet.left())


@pytest.mark.parametrize("error", [TimeLimitExceeded, MemoryError])
@pytest.mark.parametrize("raises", [True, False], ids=["failed", "succeeded"])
def test_whatever_strikes_as_a_job_ends_the_job_goes_on(
    broker: dramatiq.Broker,
    unique: str,
    tmp_path: Path,
    error: type[BaseException],
    raises: bool,
) -> None:
    policy = {**QUICK, "max_attempts": 9, "max_interval": "PT0.2S", "on_exhaustion": "dead_letter"}
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", retry=policy)
    strikes: dict[int, Strike] = {}

    def ends(n: int, nth: int) -> None:
        if n == 1:
            strikes[nth] = Strike(nth, error, STRUCK, "process_message")
            strikes[nth].arm()
            if raises:
                raise OSError("down")

    actor = fleet.actor(ends)
    with fleet.working(threads=4) as worker:
        first = fleet.send(actor, 0)
        eventually(lambda: len(first.runs) > raises and fleet.heard.ends(first.id))
        lines = strikes[0].lines
        jobs = {nth: fleet.send(actor, nth) for nth in range(1, lines, STRIDE)}
        # No job may wait for a reservation to run out, which takes a minute.
        ends = time.monotonic() + 40
        for nth, job in jobs.items():
            what = f"run {1 + raises} of the job that was struck at {strikes.get(nth)}"
            eventually(lambda job=job: len(job.runs) > raises, seconds=ends - time.monotonic(), what=what)
        # A copy that is put off is in no queue for a moment.
        eventually(lambda: rests(fleet, worker) and time.sleep(0.5) is None and rests(fleet, worker))
    assert fleet.left() == 0
    assert fleet.bridge.dead_letters.list().letters == ()
    assert len(jobs) > 15
