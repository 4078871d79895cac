"""A job that succeeded leaves: its run is settled just before its message is acknowledged, or with it.

Not before: what follows it, its pipeline, callbacks and result, would be lost with a worker that is killed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dramatiq.broker import MessageProxy
from dramatiq.common import current_millis

from ..engine.engine import Engine
from ..engine.runs import Run
from ..spec.decision import Complete
from ..store import Settle
from .brokers import is_redis, redis_outages
from .compat import REDIS_ID, acks_of, database_of, heartbeats_of, message_in, messages_of, worker_id

#: keys: heartbeats, our unacknowledged ids, the queue's messages. words: now, our worker's id, the message's.
#: What Dramatiq's own does; 1 when the message was still ours, and is gone.
_ACKNOWLEDGE = """
redis.call('zadd', keys[1], words[1], words[2])
if redis.call('srem', keys[2], words[3]) == 0 then return 0 end
redis.call('hdel', keys[3], words[3])
return 1
"""


#: What acknowledges a message on its broker.
Ack: TypeAlias = Callable[[MessageProxy], None]


class Joint(Protocol):
    """A store on the broker's own server settles and acknowledges in one step."""

    def settle(self, settle: Settle, keys: list[bytes], words: list[Any]) -> tuple[bool, bool]:
        """Settle a turn and acknowledge its message; return whether each was done."""

    def works(self, keys: list[bytes], words: list[Any]) -> bool:
        """Return whether it may."""


class Acknowledging:
    """Settles and acknowledges what succeeded under one bridge, on any broker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def settle(self, run: Run) -> None:
        """Settle a run; never raises."""
        self._engine.settle(run, Complete())

    def acknowledge(self, run: Run, message: MessageProxy, ack: Ack) -> None:  # noqa: ARG002
        """Acknowledge a settled run's message; raises what `ack` raises."""
        ack(message)

    def in_one_step(self, run: Run, message: MessageProxy) -> bool:  # noqa: ARG002
        """Settle a run and acknowledge its message, or return False; raises StoreError."""
        return False


class RedisAcknowledging(Acknowledging):
    """Settles and acknowledges what succeeded on one RedisBroker, in one step if one server does both."""

    def __init__(self, broker: Any, engine: Engine) -> None:
        super().__init__(engine)
        self._broker = broker
        self._script = broker.client.register_script(
            f"local function companion(keys, words) {_ACKNOWLEDGE} end return companion(KEYS, ARGV)"
        )
        self._keys: dict[str, list[bytes]] = {}
        self._joint = self._find_joint()

    def in_one_step(self, run: Run, message: MessageProxy) -> bool:
        """Settle and acknowledge where one server does both."""
        joint = self._joint
        if joint is None:
            return False
        keys, words = self._keys_of(message_in(message).queue_name), self._words_of(message)
        self._engine.settle_with(run, lambda settle: self._take_note(run, *joint.settle(settle, keys, words)))
        return True

    def acknowledge(self, run: Run, message: MessageProxy, ack: Ack) -> None:  # noqa: ARG002
        """Acknowledge, and have the store forget what cannot come again."""
        if self._script(keys=self._keys_of(message_in(message).queue_name), args=self._words_of(message)):
            self._engine.acknowledged(run.reservation)

    def _take_note(self, run: Run, settled: bool, acknowledged: bool) -> bool:
        if acknowledged:
            self._engine.acknowledged(run.reservation)
        return settled

    def _find_joint(self) -> Joint | None:
        offer: Callable[..., Joint | None] | None = getattr(self._engine.store, "joint", None)
        if offer is None:
            return None
        client = self._broker.client
        try:
            run_id = client.info("server").get("run_id")
            joint = offer(_ACKNOWLEDGE, run_id=run_id, database=database_of(client))
        except (*redis_outages(), _response_error()):
            return None
        probe = [current_millis(), worker_id(self._broker), ""]
        return joint if joint and joint.works(self._keys_of("ojs"), probe) else None

    def _keys_of(self, queue_name: str) -> list[bytes]:
        keys = self._keys.get(queue_name)
        if keys is None:
            broker = self._broker
            names = heartbeats_of(broker), acks_of(broker, queue_name), messages_of(broker, queue_name)
            keys = self._keys[queue_name] = [name.encode() for name in names]
        return keys

    def _words_of(self, message: MessageProxy) -> list[Any]:
        return [current_millis(), worker_id(self._broker), message_in(message).options[REDIS_ID]]


@dataclass(slots=True)
class Ending:
    """The end of one message of a job that succeeded; its run is settled once, whatever is repeated."""

    _by: Acknowledging
    _run: Run
    _settled: bool = False

    def acknowledge(self, message: MessageProxy, ack: Ack) -> None:
        """Settle its run and acknowledge it; raises StoreError and what `ack` raises."""
        if self._settled or not self._by.in_one_step(self._run, message):
            self.settle()
            self._by.acknowledge(self._run, message, ack)

    def settle(self) -> None:
        """Settle its run alone, as when another middleware has failed its message; once, and never raises."""
        if not self._settled:
            self._settled = True
            self._by.settle(self._run)


def acknowledging_on(broker: Any, engine: Engine) -> Acknowledging:
    """Return how jobs that succeeded leave this broker."""
    return RedisAcknowledging(broker, engine) if engine.store and is_redis(broker) else Acknowledging(engine)


def _response_error() -> type[Exception]:
    from redis import ResponseError

    return ResponseError
