"""The engine carries decisions out over an outlet that writes down the calls it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine.carrying import NotCarried
from ojs_bridge.engine.ports import Ended, Onward
from ojs_bridge.engine.runs import Postpone, Refuse, Run
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


@dataclass
class Written:
    """An outlet; its broker answers with `raises`."""

    framework: str = "outbox"
    unreachable: tuple[type[Exception], ...] = (StoreError, ConnectionError)
    can_wait: bool = True
    raises: Exception | None = None
    asked: list[str] = field(default_factory=list)

    def prepare(self, onward: Onward) -> bool:
        """Write the call down."""
        self.asked.append(f"prepare {onward.job.attempt}")
        return True

    def publish(self, onward: Onward) -> None:
        """Write the call down, or fail."""
        if self.raises:
            raise self.raises
        self.asked.append(f"publish {onward.job.attempt}")

    def kept(self, onward: Onward | None) -> Mapping[str, Any]:
        """Return a message that tells whether it goes on."""
        return {"onward": onward is not None}

    def sent(self, onward: Onward) -> None:
        """Write the call down."""
        self.asked.append(f"sent {onward.job.attempt}")

    def complete(self) -> None:
        """Write the call down."""
        self.asked.append("complete")

    def release(self, decision: GiveBack) -> None:
        """Write the call down."""
        self.asked.append(f"release: {decision.reason}")

    def discard(self, ended: Ended) -> None:
        """Write the call down."""
        self.asked.append(f"discard {len(ended.job.errors)}")

    def dead_letter(self, ended: Ended, *, in_store: bool) -> None:
        """Write the call down, or fail where the broker is to keep the letter."""
        if self.raises and not in_store:
            raise self.raises
        self.asked.append(f"dead letter {'in the store' if in_store else 'in the broker'}")


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
    """Each decision calls one method of the outlet."""
    ways = []
    for decision in ENDS:
        outlet = Written()
        bridge.engine.carry(Refuse(JOB, DeadLettered("invalid", FAILURE, "why")), decision, outlet)
        ways += outlet.asked
    assert ways == ["discard 1", "dead letter in the store", "complete", f"release: {GiveBack().reason}"]
    assert bridge.dead_letters.get("j-1").message == {"onward": False}


@pytest.mark.parametrize(("seconds", "parked"), [(1, False), (3600, True)])
def test_the_time_of_a_retry_says_where_it_waits(bridge: Bridge, seconds: float, parked: bool) -> None:
    """A retry or a snooze that is due late waits in the store, another in the broker."""
    outlet = Written()
    bridge.engine.carry(begun(bridge), retry_in(bridge, seconds), outlet)
    assert outlet.asked == ["prepare 2", *([] if parked else ["publish 2"]), "sent 2"]
    assert bridge.retries.count() == parked
    outlet = Written()
    at = bridge.engine.now() + timedelta(seconds=seconds)
    bridge.engine.carry(begun_again(bridge), SnoozeUntil(at, seconds, "why"), outlet)
    assert outlet.asked == ["prepare 1", *([] if parked else ["publish 1"]), "sent 1"]


def begun_again(bridge: Bridge) -> Run:
    """A run of another job."""
    job = JOB._replace(id="j-2")
    found = bridge.engine.begin(job, job, bridge.engine.task())
    assert isinstance(found, Run)
    return found


def test_what_the_broker_does_not_take_is_parked(bridge: Bridge) -> None:
    """The retry is parked, though it is due soon."""
    outlet = Written(raises=ConnectionError("down"))
    bridge.engine.carry(begun(bridge), retry_in(bridge, 1), outlet)
    assert outlet.asked == ["prepare 2", "sent 2"]
    assert bridge.retries.get("j-1").message == {"onward": True}


def test_what_finds_no_place_is_told(bridge: Bridge) -> None:
    """The error carries the decision, to be carried out later."""
    engine = Bridge().engine
    decision = retry_in(bridge, 1)
    run = begun(bridge)._replace(reservation=None)
    with pytest.raises(NotCarried) as told:
        engine.carry(run, decision, Written(raises=ConnectionError("down")))
    assert (told.value.decision, str(told.value.error)) == (decision, "down")


@pytest.mark.parametrize("raises", [ValueError("cannot be written"), ConnectionError("down")])
def test_a_message_that_stands_in_its_own_way_is_a_dead_letter(bridge: Bridge, raises: Exception) -> None:
    """The job is a dead letter, whatever is wrong with its message."""
    outlet = Written(raises=raises, can_wait=False, unreachable=())
    bridge.engine.carry(begun(bridge), retry_in(bridge, 1), outlet)
    assert outlet.asked == ["prepare 2", "dead letter in the store"]
    letter = bridge.dead_letters.get("j-1")
    assert (letter.cause, letter.error_type) == ("invalid", "external.timeout")
    assert str(raises) in letter.reason


def test_a_postponement_that_no_message_can_carry_is_refused(bridge: Bridge) -> None:
    """A postponement that may succeed later raises, and so does that of a reserved attempt."""
    run, at = begun(bridge), bridge.engine.now()
    refused = bridge.engine.postpone(Postpone(JOB, at), Written(raises=ValueError("cannot be written")))
    assert isinstance(refused, Refuse)
    assert refused.decision.failure.type == "bridge.undeliverable"
    with pytest.raises(ValueError, match="cannot be written"):
        outlet = Written(raises=ValueError("cannot be written"))
        bridge.engine.postpone(Postpone(JOB, at, run.reservation), outlet)
    with pytest.raises(ConnectionError):
        Bridge().engine.postpone(Postpone(JOB, at), Written(raises=ConnectionError("down")))
