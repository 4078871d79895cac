"""A bridge counts the jobs in each state that it knows of."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ojs_bridge import Bridge, ConfigurationError, StoreError
from ojs_bridge.store import Filter, Store
from tests.conftest import store_url
from tests.store.test_parked import parked
from tests.store.test_store import letter


@pytest.fixture(params=["sqlite", "valkey", "postgres"])
def bridge(request: pytest.FixtureRequest) -> Bridge:
    """A bridge on an empty store."""
    return Bridge(store_url(request.param, request))


def fill(bridge: Bridge) -> Store:
    """Park three retries and bury two letters."""
    store = bridge.store
    assert store is not None
    for name, queue in {"p-1": "mail", "p-2": "mail", "p-3": "billing"}.items():
        store.parked.park(parked(name, 3600, queue=queue))
    for name, queue in {"d-1": "billing", "d-2": "web"}.items():
        store.letters.bury(letter(name, queue=queue, discarded_at=bridge.engine.now()))
    return store


def test_counts_by_state(bridge: Bridge) -> None:
    """The counts are those of all queues, or of one; zero is a count, too."""
    assert bridge.counts() == {"retryable": 0, "scheduled": 0, "pending": 0, "discarded": 0}
    fill(bridge)
    assert bridge.counts() == {"retryable": 3, "scheduled": 0, "pending": 0, "discarded": 2}
    assert bridge.counts(queue="mail") == {"retryable": 2, "scheduled": 0, "pending": 0, "discarded": 0}
    assert bridge.counts(queue="billing") == {"retryable": 1, "scheduled": 0, "pending": 0, "discarded": 1}
    assert bridge.counts(queue="mai") == {"retryable": 0, "scheduled": 0, "pending": 0, "discarded": 0}


def test_what_changes_state_is_counted_there(bridge: Bridge) -> None:
    """A retry counts until it has been published; a letter that has gone does not count."""
    store = fill(bridge)
    later = bridge.engine.now() + timedelta(hours=2)
    due = store.parked.claim_due("dramatiq", now=later, until=later + timedelta(minutes=1), limit=2)
    assert bridge.counts()["retryable"] == 3
    store.parked.unpark(due.retries, due.claim)
    bridge.dead_letters.delete("d-1")
    assert bridge.counts() == {"retryable": 1, "scheduled": 0, "pending": 0, "discarded": 1}


def test_parked_retries_are_counted_by_queue_and_type(bridge: Bridge) -> None:
    """The filters are those of the list."""
    store = fill(bridge)
    store.parked.park(replace(parked("p-4", 3600), type="auth.login", queue="mail"))
    assert bridge.retries.count() == 4
    assert bridge.retries.count(queue="mail") == 3
    assert bridge.retries.count(type="auth.*") == bridge.retries.count(queue="mail", type="auth.login") == 1
    assert store.parked.count(Filter("mail", "billing.*")) == 2


def test_without_a_store_nobody_knows() -> None:
    """The error says why."""
    with pytest.raises(ConfigurationError, match="counts by state need a store"):
        Bridge().counts()


def test_a_store_that_is_out_of_reach() -> None:
    """The error is the store's own."""
    with pytest.raises(StoreError):
        Bridge("sqlite:////nowhere/at/all/ojs.db").counts()
