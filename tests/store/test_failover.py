"""A Redis store behind Sentinels and in a cluster: a master dies, is demoted, or gives its keys away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from ojs_bridge import StoreError, open_store
from ojs_bridge.store import Grant, Reservation, Store
from tests.servers import Cluster, Replicated, Watched, ask, eventually, free_port
from tests.store.test_redis import LATER, parked, reserve, use_everything
from tests.store.test_store import letter


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A master, its replica and a Sentinel."""
    with Watched() as servers:
        yield servers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of three."""
    with Cluster() as servers:
        yield servers


def takes(store: Store) -> bool:
    """Return whether the store takes writes."""
    try:
        store.letters.forget_errors("j-1")
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("kind", ["watched", "cluster"])
def test_what_the_replica_had_outlives_the_master(kind: str, request: pytest.FixtureRequest) -> None:
    """The store is in an outage until the replica is promoted, and finds it by itself."""
    servers: Replicated = request.getfixturevalue(kind)
    scheme, _, rest = servers.url.partition("127.0.0.1")
    # The first of those that are asked is away.
    with closing(open_store(f"{scheme}127.0.0.1:{free_port()},127.0.0.1{rest}")) as store:
        use_everything(store)
        store.letters.bury(letter("j-7"))
        store.parked.park(parked("j-7"))
        assert reserve(store, Reservation("k-7", 0)) is Grant.TAKEN
        servers.await_replica()
        killed = servers.master()
        killed.kill()
        with pytest.raises(StoreError, match=rf"^the store '{re.escape(scheme)}127.* failed: "):
            reserve(store, Reservation("k-8", 0))
        servers.await_promotion(killed)
        eventually(lambda: takes(store), what="the end of the outage")
        assert store.letters.get("j-7") == letter("j-7")
        assert reserve(store, Reservation("k-7", 0), "w-2") is Grant.HELD
        due = store.parked.claim_due("celery", now=LATER, until=LATER, limit=9)
        assert {retry.id for retry in due.retries} == {"j-3", "j-7"}
        servers.rejoin(killed)
        # The master lives on as a replica, and the store's connections with it.
        promoted = servers.hand_over()
        eventually(lambda: takes(store), what="the end of the change")
        assert reserve(store, Reservation("k-8", 0)) is Grant.TAKEN
        assert ask(promoted, "EXISTS", "ojs:{ojs}:turn:k-8")


def test_keys_on_their_way_to_another_node(cluster: Cluster) -> None:
    """A question about a key that has gone is asked there; one about keys on both nodes is an outage."""
    ask(cluster.master(), "FLUSHALL")
    with closing(open_store(cluster.url)) as store:
        assert reserve(store) is Grant.TAKEN
        store.letters.bury(letter())
        source = cluster.master()
        target = next(
            node for node in cluster.nodes if ask(node, "ROLE")[0] == "master" and node is not source
        )
        names = {node.port: ask(node, "CLUSTER", "MYID") for node in (source, target)}
        ask(target, "CLUSTER", "SETSLOT", cluster.slot, "IMPORTING", names[source.port])
        ask(source, "CLUSTER", "SETSLOT", cluster.slot, "MIGRATING", names[target.port])
        for n in range(2):
            assert reserve(store, Reservation("k-new", n)) is Grant.TAKEN
        assert reserve(store) is Grant.HELD
        with pytest.raises(StoreError, match=r"^the store 'redis\+cluster://127.* failed: "):
            store.letters.bury(letter("j-2"))
        keys = ask(source, "CLUSTER", "GETKEYSINSLOT", cluster.slot, 1000)
        ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source):
            ask(node, "CLUSTER", "SETSLOT", cluster.slot, "NODE", names[target.port])
        assert reserve(store) is Grant.HELD
        assert reserve(store, Reservation("k-new", 1)) is Grant.HELD
        assert store.letters.get("j-1") == letter()
