"""The engine carries decisions out over an outlet that writes down the calls it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine.carrying import NotCarried
from ojs_bridge.engine.runs import Onward, Postpone, Refuse, Run, Settlement
from ojs_bridge.errors import StoreError
from ojs_bridge.rules.decision import (
    Complete,
    DeadLettered,
    Decision,
    Discarded,
    GiveBack,
    RetryAt,
    SnoozeUntil,
)
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job

JOB = Job("j-1", "billing.charge", "default")
FAILURE = Failure("external.timeout", "down")
ENDS: list[Decision] = [
    Discarded("exhausted", FAILURE, "why"),
    DeadLettered("exhausted", FAILURE, "why"),
    Complete(),
    GiveBack(),
]


class Letter(dict[str, bool]):
    """A message that tells whether it goes on."""

    def kept(self) -> Mapping[str, bool]:
        """Return what the store keeps."""
        return self


@dataclass
class Written:
    """An outlet; its broker answers with `raises`."""

    framework: str = "outbox"
    unreachable: tuple[type[Exception], ...] = (StoreError, ConnectionError)
    parts: tuple[object, ...] = ()
    can_wait: bool = True
    at_once: bool = False
    raises: Exception | None = None
    asked: list[str] = field(default_factory=list)

    def message(self, onward: Onward | None) -> Letter:
        """Return a message that tells whether it goes on."""
        return Letter(onward=onward is not None)

    def publish(self, message: Letter, at: datetime) -> None:
        """Write the call down, or fail."""
        if self.raises:
            raise self.raises
        self.asked.append(f"publish {message}")

    def bury(self, job: Job, /) -> bool:
        """Write the call down, or fail."""
        if self.raises:
            raise self.raises
        self.asked.append(f"bury {job.attempt}")
        return True


def told(settlement: Settlement[Letter]) -> str:
    """What was carried out, in words."""
    decision, job = settlement.decision, settlement.job
    where = ", in its place" if settlement.in_place else ""
    return f"{type(decision).__name__} {job.attempt} {len(job.errors)}{where}"


@pytest.fixture
def bridge(tmp_path: Path) -> Bridge:
    """A bridge with a store."""
    return Bridge(f"sqlite:///{tmp_path}/ojs.db")


def begun(bridge: Bridge) -> Run:
    """A run of the job."""
    found = bridge.engine.begin(JOB, JOB, bridge.engine.task())
    assert isinstance(found, Run)
    return found


def retry_in(bridge: Bridge, seconds: float) -> RetryAt:
    """A retry that is due in so many seconds."""
    return RetryAt(bridge.engine.now() + timedelta(seconds=seconds), seconds, FAILURE, "why")


def test_each_decision_has_its_way_out(bridge: Bridge) -> None:
    """Each is told, and whether its letter has a place: in the store, or else in the broker's dead queue."""
    refused = Refuse(JOB, DeadLettered("invalid", FAILURE, "why"))
    ways = [told(bridge.engine.carrying.carry(refused, decision, Written())) for decision in ENDS]
    assert ways == ["Discarded 1 1", "DeadLettered 1 1, in its place", "Complete 1 0", "GiveBack 1 0"]
    outlet = Written()
    assert told(Bridge().engine.carrying.carry(refused, ENDS[1], outlet)) == ways[1]
    assert outlet.asked == ["bury 1"]
    assert bridge.dead_letters.get("j-1").message == {"onward": False}


@pytest.mark.parametrize(("seconds", "parked"), [(1, False), (3600, True)])
def test_the_time_of_a_retry_says_where_it_waits(bridge: Bridge, seconds: float, parked: bool) -> None:
    """A retry or a snooze that is due late waits in the store, another in the broker."""
    outlet = Written()
    settlement = bridge.engine.carrying.carry(begun(bridge), retry_in(bridge, seconds), outlet)
    published = [] if parked else ["publish {'onward': True}"]
    assert (outlet.asked, told(settlement)) == (published, "RetryAt 2 1")
    assert bridge.retries.count() == parked
    outlet = Written()
    at = bridge.engine.now() + timedelta(seconds=seconds)
    settlement = bridge.engine.carrying.carry(begun_again(bridge), SnoozeUntil(at, seconds, "why"), outlet)
    assert (outlet.asked, told(settlement)) == (published, "SnoozeUntil 1 0")


def begun_again(bridge: Bridge) -> Run:
    """A run of another job."""
    job = JOB._replace(id="j-2")
    found = bridge.engine.begin(job, job, bridge.engine.task())
    assert isinstance(found, Run)
    return found


def test_what_the_broker_does_not_take_is_parked(bridge: Bridge) -> None:
    """The retry is parked, though it is due soon."""
    outlet = Written(raises=ConnectionError("down"))
    settlement = bridge.engine.carrying.carry(begun(bridge), retry_in(bridge, 1), outlet)
    assert (outlet.asked, told(settlement)) == ([], "RetryAt 2 1")
    assert bridge.retries.get("j-1").message == {"onward": True}


def test_what_finds_no_place_is_told(bridge: Bridge) -> None:
    """The error carries the decision, to be carried out later."""
    engine = Bridge().engine
    decision = retry_in(bridge, 1)
    run = begun(bridge)._replace(reservation=None)
    with pytest.raises(NotCarried) as told:
        engine.carrying.carry(run, decision, Written(raises=ConnectionError("down")))
    assert (told.value.decision, str(told.value.error)) == (decision, "down")


@pytest.mark.parametrize("raises", [ValueError("cannot be written"), ConnectionError("down")])
def test_a_message_that_stands_in_its_own_way_is_a_dead_letter(bridge: Bridge, raises: Exception) -> None:
    """The job is a dead letter, whatever is wrong with its message."""
    outlet = Written(raises=raises, can_wait=False, unreachable=())
    settlement = bridge.engine.carrying.carry(begun(bridge), retry_in(bridge, 1), outlet)
    assert (outlet.asked, told(settlement)) == ([], "DeadLettered 1 1, in its place")
    letter = bridge.dead_letters.get("j-1")
    assert (letter.cause, letter.error_type) == ("invalid", "external.timeout")
    assert str(raises) in letter.reason


def test_a_postponement_that_no_message_can_carry_is_refused(bridge: Bridge) -> None:
    """A postponement that may succeed later raises, and so does that of a reserved attempt."""
    run, at = begun(bridge), bridge.engine.now()
    refused = bridge.engine.carrying.postpone(
        Postpone(JOB, at), Written(raises=ValueError("cannot be written"))
    )
    assert isinstance(refused, Refuse)
    assert refused.decision.failure.type == "bridge.undeliverable"
    with pytest.raises(ValueError, match="cannot be written"):
        outlet = Written(raises=ValueError("cannot be written"))
        bridge.engine.carrying.postpone(Postpone(JOB, at, run.reservation), outlet)
    with pytest.raises(ConnectionError):
        Bridge().engine.carrying.postpone(Postpone(JOB, at), Written(raises=ConnectionError("down")))
