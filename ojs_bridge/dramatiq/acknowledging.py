"""How a job that succeeded leaves a RedisBroker: settled by what acknowledges it, if one server does both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dramatiq.broker import MessageProxy
from dramatiq.common import current_millis

from ..bridge import Bridge
from ..decision import Complete
from ..runs import Run
from ..store import Settle
from .on_redis import acks_of, is_redis
from .outages import redis_outages

#: keys: heartbeats, our unacknowledged ids, the queue's messages. words: now, our worker's id, the message's.
#: What Dramatiq's own does; 1 when the message was still ours, and is gone.
_ACKNOWLEDGE = """
redis.call('zadd', keys[1], words[1], words[2])
if redis.call('srem', keys[2], words[3]) == 0 then return 0 end
redis.call('hdel', keys[3], words[3])
return 1
"""


class Joint(Protocol):
    """What a store on the broker's own server offers."""

    def settle(self, settle: Settle, keys: list[bytes], words: list[Any]) -> bool:
        """Settle a turn and acknowledge."""

    def works(self, keys: list[bytes], words: list[Any]) -> bool:
        """Return whether it may."""


class Acknowledging:
    """Settles and acknowledges what succeeded on one RedisBroker under one bridge."""

    def __init__(self, broker: Any, bridge: Bridge) -> None:
        self._broker = broker
        self._bridge = bridge
        self._script = broker.client.register_script(
            f"local function companion(keys, words) {_ACKNOWLEDGE} end return companion(KEYS, ARGV)"
        )
        self._keys: dict[str, list[bytes]] = {}
        self._joint = self._find_joint()

    def end(self, run: Run, message: MessageProxy) -> Ending:
        """Settle a run that succeeded, unless that is done along with its acknowledgement."""
        if self._joint is None or run.turn is None:
            self._bridge.settled(run, Complete())
        return Ending(self, run, message)

    def acknowledge(self, run: Run, message: MessageProxy) -> None:
        """Acknowledge, and have the store forget what cannot come again; raises StoreError."""
        joint, keys, words = self._joint, self._keys_of(message.queue_name), self._words_of(message)
        if joint and run.turn:
            self._bridge.succeeded(run, lambda settle: joint.settle(settle, keys, words))
        elif self._script(keys=keys, args=words):
            self._bridge.acknowledged(run)

    def reject(self, run: Run) -> None:
        """Settle a run whose message another middleware has failed."""
        if self._joint and run.turn:
            self._bridge.settled(run, Complete())

    def _find_joint(self) -> Joint | None:
        offer: Callable[..., Joint | None] | None = getattr(self._bridge.store, "joint", None)
        if offer is None:
            return None
        client = self._broker.client
        database = client.connection_pool.connection_kwargs.get("db") or 0
        try:
            joint = offer(_ACKNOWLEDGE, run_id=client.info("server").get("run_id"), database=int(database))
        except (*redis_outages(), _response_error()):
            return None
        probe = [current_millis(), self._broker.broker_id, ""]
        return joint if joint and joint.works(self._keys_of("ojs"), probe) else None

    def _keys_of(self, queue_name: str) -> list[bytes]:
        keys = self._keys.get(queue_name)
        if keys is None:
            space = self._broker.namespace
            names = (
                f"{space}:__heartbeats__",
                acks_of(self._broker, queue_name),
                f"{space}:{queue_name}.msgs",
            )
            keys = self._keys[queue_name] = [name.encode() for name in names]
        return keys

    def _words_of(self, message: MessageProxy) -> list[Any]:
        return [current_millis(), self._broker.broker_id, message.options["redis_message_id"]]


@dataclass(frozen=True, slots=True)
class Ending:
    """How one message of a job that succeeded leaves."""

    _by: Acknowledging
    _run: Run
    _message: MessageProxy

    def acknowledge(self) -> None:
        """Acknowledge it; raises StoreError."""
        self._by.acknowledge(self._run, self._message)

    def reject(self) -> None:
        """Settle what follows no acknowledgement."""
        self._by.reject(self._run)


def acknowledging_on(broker: Any, bridge: Bridge) -> Acknowledging | None:
    """Return how jobs that succeeded leave this broker; None for what is not Redis, and without a store."""
    return Acknowledging(broker, bridge) if bridge.store and is_redis(broker) else None


def _response_error() -> type[Exception]:
    from redis import ResponseError

    return ResponseError
