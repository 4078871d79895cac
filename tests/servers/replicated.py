"""Servers that survive their master: a Valkey with a replica and a Sentinel, and a cluster of three."""

from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import redis
from redis.crc import key_slot
from typing_extensions import Self

from tests.servers.ports import free_port
from tests.servers.process import Server, eventually
from tests.servers.valkey import Valkey, binary

SERVICE = "mymaster"
#: A master that is silent for so long is dead; a loaded machine must not take a busy server for dead.
_DOWN_MS = 1500
_SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {service} 127.0.0.1 {master} 1
sentinel down-after-milliseconds {service} {down}
sentinel failover-timeout {service} 3000
"""
_CLUSTER = {"cluster_enabled": "yes", "cluster_node_timeout": str(_DOWN_MS)}
_SLOTS = 16384


class Sentinel(Server):
    """A Sentinel that promotes the replica of a master alone, without others to agree."""

    def __init__(self, master: Valkey) -> None:
        super().__init__()
        self._master = master

    @property
    def url(self) -> str:
        """The URL by which clients connect to the Sentinel itself."""
        return f"redis://127.0.0.1:{self.port}"

    def _launch(self) -> None:
        facts = {"master": self._master.port, "service": SERVICE, "down": _DOWN_MS}
        configuration = self.folder / "sentinel.conf"
        configuration.write_text(_SENTINEL.format(port=self.port, folder=self.folder, **facts))
        self._spawn([binary(), str(configuration), "--sentinel"])

    def _answers(self) -> bool:
        """Return whether it has found the replica."""
        try:
            return bool(ask(self, "SENTINEL", "REPLICAS", SERVICE))
        except redis.ConnectionError:
            return False


class Replicated(ABC):
    """Servers with a master of a store's keys, which has a replica."""

    def __init__(self) -> None:
        self._running = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._running.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of a store."""

    @abstractmethod
    def master(self) -> Valkey:
        """Return the master of the store's keys, as the others know it."""

    @abstractmethod
    def rejoin(self, killed: Valkey) -> None:
        """Start a master that was killed; it becomes a replica."""

    @abstractmethod
    def hand_over(self) -> Valkey:
        """Let a replica and its master change their roles; return the new master."""

    @abstractmethod
    def _set_up(self) -> None:
        """Start the servers."""

    def await_replica(self, key: str = "{ojs}") -> None:
        """Return when the replica has all that the master of a key has acknowledged."""
        with redis.Redis.from_url(self.master().url) as client:

            def has_all() -> bool:
                with suppress(redis.ResponseError):  # without a replica
                    client.set(key, "")
                    return bool(client.wait(1, 1000))
                return False

            eventually(has_all, what="a replica that has it all")

    def fail_over(self) -> Valkey:
        """Kill the master; return it when the others know its replica as the master."""
        killed = self.master()
        killed.kill()
        self.await_promotion(killed)
        return killed

    def await_promotion(self, before: Valkey) -> None:
        """Return when another one is the master."""
        eventually(lambda: self.master() is not before, seconds=60, what="a promoted replica")

    def _start(self, **options: str) -> Valkey:
        return self._running.enter_context(Valkey(repl_diskless_sync_delay="0", **options))


class Watched(Replicated):
    """A master, two replicas, and a Sentinel; a master without a replica takes no writes."""

    def _set_up(self) -> None:
        self.servers = [self._start(min_replicas_to_write="1") for _ in range(3)]
        first, *others = self.servers
        for other in others:
            ask(other, "REPLICAOF", "127.0.0.1", first.port)
        self.sentinel = self._running.enter_context(Sentinel(first))
        self.await_replica()

    @property
    def url(self) -> str:
        """The URL of a store."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def master(self) -> Valkey:
        """Return the master, as the Sentinel names it."""
        _, port = ask(self.sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def rejoin(self, killed: Valkey) -> None:
        """Start a master that was killed, as a replica; the Sentinel takes 10 s to make one of it."""
        killed.start()
        ask(killed, "REPLICAOF", "127.0.0.1", self.master().port)
        self.await_replica()

    def hand_over(self) -> Valkey:
        """Let the Sentinel do it, without a loss, when it knows that a replica is in step."""
        before = self.master()

        def begins() -> bool:
            with suppress(redis.ResponseError):
                return bool(ask(self.sentinel, "SENTINEL", "FAILOVER", SERVICE, "COORDINATED") == "OK")
            return False

        eventually(begins, what="a replica that the Sentinel may promote")
        self.await_promotion(before)
        return self.master()


class Cluster(Replicated):
    """A cluster of three masters; the one with a store's keys has a replica."""

    slot = key_slot(b"{ojs}")

    def _set_up(self) -> None:
        buses = [free_port() for _ in range(4)]
        self.nodes = [self._start(cluster_port=str(bus), **_CLUSTER) for bus in buses]
        for n, node in enumerate(self.nodes[:3]):
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            ask(node, "CLUSTER", "ADDSLOTSRANGE", _SLOTS * n // 3, _SLOTS * (n + 1) // 3 - 1)
        for node in self.nodes[1:]:
            ask(node, "CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, buses[0])
        eventually(self._is_whole, what="a whole cluster")
        self.other = self.nodes[0]
        self.other = next(node for node in self.nodes[:3] if node is not self.master())
        ask(self.nodes[3], "CLUSTER", "REPLICATE", ask(self.master(), "CLUSTER", "MYID"))
        self.await_replica()

    @property
    def url(self) -> str:
        """The URL of a store; it names a node that never has the store's keys."""
        return f"redis+cluster://127.0.0.1:{self.other.port}"

    def master(self) -> Valkey:
        """Return the node that has the store's keys, as another one knows it."""
        shards = ask(self.other, "CLUSTER", "SLOTS")
        port = next(master[1] for first, last, master, *_ in shards if first <= self.slot <= last)
        return next(node for node in self.nodes if node.port == port)

    def rejoin(self, killed: Valkey) -> None:
        """Start a master that was killed; it learns by itself that it is a replica."""
        killed.start()
        self.await_replica()

    def hand_over(self) -> Valkey:
        """Let the replica ask for its master's role."""
        before = self.master()
        (replica,) = (node for node in self.nodes if ask(node, "ROLE")[0] == "slave")
        ask(replica, "CLUSTER", "FAILOVER")
        self.await_promotion(before)
        return replica

    def _is_whole(self) -> bool:
        known = [ask(node, "CLUSTER", "INFO") for node in self.nodes]
        return all("cluster_state:ok" in info and "cluster_known_nodes:4" in info for info in known)


def ask(server: Server, *words: str | int) -> Any:
    """Return a Redis server's answer, as the server gives it."""
    with redis.Redis.from_url(server.url, decode_responses=True, protocol=2) as client:
        client.response_callbacks.clear()
        return client.execute_command(*words)
