"""Jobs of a transaction are published as soon as it has committed, and not before."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.errors import Unreachable
from ojs_bridge.store import Parked
from tests.conftest import store_url
from tests.servers import eventually
from tests.store.test_parked import parked
from tests.transactions import WAYS, Begin, Undone, savepoint

JOBS = [f"j-{number:02}" for number in range(60)]


class Broker:
    """A publisher that writes down what it gets, or is out of reach."""

    system = "written"

    def __init__(self) -> None:
        self.published: list[str] = []
        self.is_away = False

    def publish(self, parked: Parked, state: Mapping[str, Any], **_: Any) -> None:
        """Write the job down."""
        if self.is_away:
            raise Unreachable("the broker is away")
        self.published.append(parked.id)


@pytest.fixture(params=[*WAYS])
def way(request: pytest.FixtureRequest) -> tuple[str, Begin]:
    """The URL of an empty store, and a way to a transaction on its database."""
    kind, begin = WAYS[request.param]
    return store_url(kind, request), begin


@pytest.fixture
def begin(way: tuple[str, Begin]) -> Callable[[], Any]:
    """Begin a transaction."""
    url, begin = way
    return lambda: begin(url)


@pytest.fixture
def bridge(way: tuple[str, Begin]) -> Iterator[Bridge]:
    """A bridge of a process that only sends; its tables are there, as a worker makes them."""
    bridge = Bridge(way[0])
    assert bridge.store is not None
    bridge.store.prepare()
    yield bridge
    bridge.engine.close()
    bridge.store.close()


@pytest.fixture
def broker(bridge: Bridge) -> Broker:
    """The broker of the bridge."""
    broker = Broker()
    bridge.engine.register("written", broker)  # type: ignore[arg-type]
    return broker


def put(bridge: Bridge, given: Any, *jobs: str, due: timedelta = timedelta(0)) -> None:
    """Write jobs in a transaction."""
    for job in jobs:
        now = bridge.engine.now()
        sent = replace(parked(job, framework="written"), next_retry_at=now + due, parked_at=now)
        bridge.engine.outbox.put(bridge.engine.outbox.join(given), sent)


def test_jobs_are_published_in_order_as_soon_as_they_are_committed(
    bridge: Bridge, broker: Broker, begin: Callable[[], Any]
) -> None:
    with begin() as given:
        put(bridge, given, *JOBS)
        time.sleep(0.1)
        assert broker.published == []
    eventually(lambda: broker.published == JOBS, seconds=8)
    eventually(lambda: bridge.retries.count() == 0, what="an empty store")


def test_what_is_rolled_back_is_never_published(
    bridge: Bridge, broker: Broker, begin: Callable[[], Any]
) -> None:
    with suppress(Undone), begin() as given:
        put(bridge, given, "undone")
        raise Undone
    with begin() as given:
        put(bridge, given, "before")
        with savepoint(given):
            put(bridge, given, "in a savepoint")
            raise Undone
        put(bridge, given, "after")
    eventually(lambda: broker.published == ["before", "after"], seconds=8)
    bridge.engine.outbox.close()
    assert (broker.published, bridge.retries.count()) == (["before", "after"], 0)


def test_a_job_that_is_due_later_waits(bridge: Bridge, broker: Broker, begin: Callable[[], Any]) -> None:
    with begin() as given:
        put(bridge, given, "later", due=timedelta(hours=1))
        put(bridge, given, "now")
    eventually(lambda: broker.published == ["now"], seconds=8)
    bridge.engine.outbox.close()
    assert [each.id for each in bridge.retries.list().jobs] == ["later"]


def test_a_job_that_the_broker_does_not_take_is_left_to_the_workers(
    bridge: Bridge, broker: Broker, begin: Callable[[], Any]
) -> None:
    broker.is_away = True
    with begin() as given:
        put(bridge, given, "j-1")
    bridge.engine.outbox.close()
    assert (broker.published, bridge.retries.count()) == ([], 1)
    assert bridge.store is not None
    now = bridge.engine.now()
    due = bridge.store.parked.claim_due("written", now=now, until=now + timedelta(minutes=1), limit=9)
    assert [each.id for each in due.retries] == ["j-1"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("way", ["psycopg", "sqlalchemy-sqlite"], indirect=True)
def test_a_forked_child_publishes_its_own_jobs(
    bridge: Bridge, broker: Broker, begin: Callable[[], Any]
) -> None:
    with begin() as given:
        put(bridge, given, "of the parent")
    eventually(lambda: broker.published == ["of the parent"], seconds=8)
    child = os.fork()
    if child == 0:
        try:
            with begin() as given:
                put(bridge, given, "of the child")
            eventually(lambda: broker.published == ["of the parent", "of the child"], seconds=8)
            bridge.engine.close()
            os._exit(7)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert bridge.retries.count() == 0
