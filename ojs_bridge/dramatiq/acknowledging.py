"""The acknowledgement of a job that succeeded: its run is settled just before it, or in one step with it.

If the run were settled earlier, a worker that is killed would lose the job's pipeline, callbacks and result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dramatiq.broker import MessageProxy
from dramatiq.common import current_millis

from ..bridge import Bridge
from ..engine.runs import Run
from ..rules.decision import Complete
from ..store import Settle
from .brokers import is_redis, redis_outages
from .compat import REDIS_ID, acks_of, connection_kwargs, heartbeats_of, message_in, messages_of, worker_id

#: Dramatiq's own acknowledgement. Returns 1 if the message was still this worker's, and is gone.
#: keys: the heartbeats, this worker's unacknowledged ids, the queue's messages. words: the time, the worker's
#: id, the message's id.
_ACKNOWLEDGE = """
redis.call('zadd', keys[1], words[1], words[2])
if redis.call('srem', keys[2], words[3]) == 0 then return 0 end
redis.call('hdel', keys[3], words[3])
return 1
"""


#: Acknowledges a message on its broker.
Ack: TypeAlias = Callable[[MessageProxy], None]


class Joint(Protocol):
    """A store on the broker's own server, which settles and acknowledges in one step."""

    def settle(self, settle: Settle, keys: list[bytes], words: list[Any]) -> tuple[bool, bool]:
        """Settle a reservation and acknowledge its message; return whether each was done."""

    def works(self, keys: list[bytes], words: list[Any]) -> bool:
        """Return whether the server allows it."""


class Acknowledging:
    """Settles and acknowledges the jobs that succeeded, on any broker."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def settle(self, run: Run) -> None:
        """Settle a run; never raises."""
        self._bridge.engine.settling.settle(run, Complete())

    def acknowledge(self, run: Run, message: MessageProxy, ack: Ack) -> None:  # noqa: ARG002
        """Acknowledge the message of a settled run; raises the errors of `ack`."""
        ack(message)

    def in_one_step(self, run: Run, message: MessageProxy) -> bool:  # noqa: ARG002
        """Settle a run and acknowledge its message, or return False; raises StoreError."""
        return False


class RedisAcknowledging(Acknowledging):
    """Settles and acknowledges jobs that succeeded on a RedisBroker, in one step if one server has both."""

    def __init__(self, broker: Any, bridge: Bridge) -> None:
        super().__init__(bridge)
        self._broker = broker
        self._script = broker.client.register_script(
            f"local function companion(keys, words) {_ACKNOWLEDGE} end return companion(KEYS, ARGV)"
        )
        self._keys: dict[str, list[bytes]] = {}
        self._joint = self._find_joint()

    def in_one_step(self, run: Run, message: MessageProxy) -> bool:
        """Settle a run and acknowledge its message if one server has both; raises StoreError."""
        joint = self._joint
        if joint is None:
            return False
        keys, words = self._keys_of(message_in(message).queue_name), self._words_of(message)
        settling = self._bridge.engine.settling
        settling.settle_with(run, lambda settle: self._take_note(run, *joint.settle(settle, keys, words)))
        return True

    def acknowledge(self, run: Run, message: MessageProxy, ack: Ack) -> None:  # noqa: ARG002
        """Acknowledge, and have the store forget the reservation of a message that cannot come again."""
        if self._script(keys=self._keys_of(message_in(message).queue_name), args=self._words_of(message)):
            self._bridge.engine.reservations.acknowledged(run.reservation)

    def _take_note(self, run: Run, settled: bool, acknowledged: bool) -> bool:
        if acknowledged:
            self._bridge.engine.reservations.acknowledged(run.reservation)
        return settled

    def _find_joint(self) -> Joint | None:
        offer: Callable[..., Joint | None] | None = getattr(self._bridge.engine.store, "joint", None)
        if offer is None:
            return None
        client = self._broker.client
        try:
            run_id = client.info("server").get("run_id")
            database = int(connection_kwargs(client.connection_pool).get("db") or 0)
            joint = offer(_ACKNOWLEDGE, run_id=run_id, database=database)
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
    """The end of the message of a job that succeeded. Its run is settled once, even if a step is repeated."""

    _by: Acknowledging
    _run: Run
    _settled: bool = False

    def acknowledge(self, message: MessageProxy, ack: Ack) -> None:
        """Settle the run and acknowledge the message; raises StoreError, and the errors of `ack`."""
        if self._settled or not self._by.in_one_step(self._run, message):
            self.settle()
            self._by.acknowledge(self._run, message, ack)

    def settle(self) -> None:
        """Settle the run alone, because another middleware has failed the message; never raises."""
        if not self._settled:
            self._settled = True
            self._by.settle(self._run)


def acknowledging_on(broker: Any, bridge: Bridge) -> Acknowledging:
    """Return the acknowledgement for this broker."""
    return RedisAcknowledging(broker, bridge) if bridge.store and is_redis(broker) else Acknowledging(bridge)


def _response_error() -> type[Exception]:
    from redis import ResponseError

    return ResponseError
