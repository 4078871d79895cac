"""Parked retries handed to their brokers before a roll-back: each once, delayed until it is due."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.engine.scheduler import CLAIM
from ojs_bridge.errors import Unpublishable, Unreachable
from ojs_bridge.operations.waiting import Drained
from ojs_bridge.rules.job import format_time
from ojs_bridge.store import Parked, Store
from tests.lives import FRAMEWORK, Outbox
from tests.store.test_parked import parked


class Fleet:
    """A bridge, the retries that its store has parked, and the messages that its framework has published."""

    def __init__(self, url: str) -> None:
        self.bridge = Bridge(url)
        self.outbox = self.bridge.engine.context.publishers[FRAMEWORK] = Outbox()

    @property
    def store(self) -> Store:
        """Return the store."""
        assert self.bridge.store is not None
        return self.bridge.store

    def park(self, name: str, hours: float = 1, **fields: Any) -> Parked:
        """Park a retry that is due in so many hours."""
        at = self.bridge.engine.now().replace(microsecond=0) + timedelta(hours=hours)
        found = replace(parked(name, **{"framework": FRAMEWORK, **fields}), next_retry_at=at)
        self.store.parked.park(found)
        return found

    @property
    def published(self) -> list[str]:
        """Return the jobs whose messages were published, in order."""
        return [parked.id for parked, _ in self.outbox.retried]

    @property
    def left(self) -> set[str]:
        """Return the jobs that are parked."""
        return {parked.id for parked in self.bridge.retries.list().jobs}


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    """An empty store, and a fleet on it."""
    fleet = Fleet(url)
    yield fleet
    fleet.bridge.stop()


def test_all_are_published_delayed_until_they_are_due(fleet: Fleet) -> None:
    """The retry that is due first goes first, with its time, and none is left."""
    known = {name: fleet.park(name, hours) for name, hours in (("b", 2), ("c", 300), ("a", -1))}
    told: list[int] = []
    assert fleet.bridge.retries.drain(progress=told.append) == Drained(3, {}, 0, {})
    assert (fleet.published, fleet.left, told) == (["a", "b", "c"], set(), [3])
    assert fleet.outbox.delayed == {name: parked.next_retry_at for name, parked in known.items()}
    for found, state in fleet.outbox.retried:
        assert state == {**found.state, "next_retry_at": format_time(known[found.id].next_retry_at)}


def test_only_the_tasks_that_are_named(fleet: Fleet) -> None:
    """Patterns name the tasks; a dry run shows the retries that would be drained."""
    for name, type_ in (("a", "billing.charge"), ("b", "mail.send"), ("c", "mail"), ("d", "web.hook")):
        fleet.park(name, type=type_)
    tasks = ["billing.*", "mail"]
    assert {parked.id for parked in fleet.bridge.retries.drainable(tasks)} == {"a", "c"}
    assert fleet.bridge.retries.drain(tasks) == Drained(2, {}, 0, {})
    assert (set(fleet.published), fleet.left) == ({"a", "c"}, {"b", "d"})


def test_two_drains_and_a_running_scheduler_publish_each_once(url: str) -> None:
    """Each retry is published by the first of them."""
    fleets = [Fleet(url) for _ in range(3)]
    names = [f"j-{n}" for n in range(300)]
    for n, name in enumerate(names):
        fleets[0].park(name, hours=n % 2 - 0.5)
    fleets[2].bridge.start()
    with ThreadPoolExecutor(2) as pool:
        drained = list(pool.map(lambda fleet: fleet.bridge.retries.drain(), fleets[:2]))
    fleets[2].bridge.stop()
    assert sorted(name for fleet in fleets for name in fleet.published) == sorted(names)
    assert [done.published for done in drained] == [len(fleet.published) for fleet in fleets[:2]]
    assert fleets[0].left == set()


def test_what_cannot_be_published_stays_and_is_told(fleet: Fleet) -> None:
    """The retry is tried once, and no claim stays on it; the others go on."""
    for name in "abc":
        fleet.park(name)
    fleet.outbox.refuses = {"a": Unpublishable("it has no queue"), "b": OSError()}
    assert fleet.bridge.retries.drain() == Drained(1, {"a": "it has no queue", "b": "OSError()"}, 0, {})
    assert (fleet.outbox.refused, fleet.published, fleet.left) == (2, ["c"], {"a", "b"})
    fleet.outbox.refuses = {}
    assert fleet.bridge.retries.drain() == Drained(2, {}, 0, {})


def test_while_the_broker_is_gone_they_stay(fleet: Fleet) -> None:
    """No claim stays on them, and a retry that was published is not published again."""
    for n, name in enumerate("abc"):
        fleet.park(name, hours=n + 1)
    fleet.outbox.refuses = {"b": Unreachable("the broker is gone")}
    with pytest.raises(Unreachable):
        fleet.bridge.retries.drain()
    assert (fleet.published, fleet.left) == (["a"], {"b", "c"})
    fleet.outbox.refuses = {}
    assert fleet.bridge.retries.drain() == Drained(2, {}, 0, {})


def test_what_others_publish_is_left_to_them(fleet: Fleet) -> None:
    """The drain does not wait for retries that another worker has claimed, and counts them."""
    fleet.park("theirs", hours=-1)
    now = fleet.bridge.engine.now()
    fleet.store.parked.claim_due(FRAMEWORK, now=now, until=now + CLAIM, limit=1)
    fleet.park("ours")
    assert fleet.bridge.retries.drain() == Drained(1, {}, 1, {})
    assert (fleet.published, fleet.left) == (["ours"], {"theirs"})


class Busy(Outbox):
    """A publisher beside running workers: their jobs fail, or come back unchanged."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self.fleet = fleet

    def publish(self, parked: Parked, state: Mapping[str, Any], **how: Any) -> None:
        """Publish, and have the workers park the next retry at once."""
        super().publish(parked, state, **how)
        if parked.fence < 5:
            self.fleet.store.parked.park(replace(parked, fence=parked.fence + (parked.id == "fails")))


def test_those_that_arrive_meanwhile_are_published_too(fleet: Fleet) -> None:
    """A retry that comes back unchanged would do so for ever: it stays, and the drain says so."""
    fleet.bridge.engine.context.publishers[FRAMEWORK] = fleet.outbox = Busy(fleet)
    fleet.park("fails")
    fleet.park("comes back")
    assert fleet.bridge.retries.drain() == Drained(6, {}, 1, {})
    assert sorted(fleet.published) == ["comes back", *["fails"] * 5]
    assert fleet.left == {"comes back"}


def test_those_of_another_framework_are_its_own(fleet: Fleet) -> None:
    """The drain counts the retries of another framework, and leaves them."""
    fleet.park("ours")
    for name in ("x", "y"):
        fleet.park(name, framework="other")
    assert [parked.id for parked in fleet.bridge.retries.drainable()] == ["ours"]
    assert fleet.bridge.retries.drain() == Drained(1, {}, 0, {"other": 2})
    assert fleet.left == {"x", "y"}


def test_many_are_published_in_lots(fleet: Fleet) -> None:
    """More retries than one page of the list are published, none of them twice."""
    names = {f"j-{n}" for n in range(1100)}
    for name in names:
        fleet.park(name)
    assert fleet.bridge.retries.drain() == Drained(1100, {}, 0, {})
    assert len(fleet.published) == 1100
    assert set(fleet.published) == names


def test_without_a_store_there_is_nothing_to_drain() -> None:
    """The error says why."""
    with pytest.raises(ConfigurationError, match="waiting jobs need a store"):
        Bridge().retries.drain()
