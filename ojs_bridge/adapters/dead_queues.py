"""What the readers of both frameworks' dead queues need of Redis and of RabbitMQ."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, Generic, TypeVar

from ..engine.runs import Refuse, Run
from ..engine.storage_retry import pause
from ..engine.storing import letter_of
from ..errors import InvalidRetryPolicy, InvalidState
from ..operations.letters import CLAIM_SECONDS
from ..rules.decision import EXPIRED, Cause, DeadLettered
from ..rules.failures import Failure
from ..rules.job import Job, parse_time
from ..rules.policy import RetryPolicy
from ..store import Letter

logger = logging.getLogger("ojs_bridge")

#: For how many seconds at most a reader of a dead queue on RabbitMQ waits for another reader.
PATIENCE = 5.0
#: RabbitMQ's answers: there is no such queue, and another connection has an exclusive queue.
NOT_FOUND, _LOCKED = 404, 405
#: The headers in which RabbitMQ counts the deliveries of a quorum queue's message, which it drops at a limit,
#: and the count at which a reader publishes a message anew, so that it begins at zero.
_COUNT, _COUNTS, _OFTEN = "x-delivery-count", ("x-delivery-count", "x-acquired-count"), 5
#: The warning of a dead queue on RabbitMQ that hides what was read, and for how long it may take to show it.
_HIDDEN = (
    "%s hides the dead letters that were read: another reader has them, or its delayed-retry-type is all or "
    "returned, and they come back after its delay; exclude dead queues from such a policy"
)
_SHOWN_SECONDS = 1.0
_UNLOCK = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end"
#: The cause of a job's end, where its error type alone tells the cause.
_CAUSES: dict[str, Cause] = {
    EXPIRED: "expired",
    InvalidState.type: "invalid",
    InvalidRetryPolicy.type: "invalid",
}
#: A message in a dead queue, as the adapter reads it.
Held = TypeVar("Held")


class HeldQueues(Generic[Held]):
    """Dead queues whose reader holds each message that it has read until it is done."""

    #: A connection, and the errors by which its channels are closed; their `reply_code` says why.
    connection: Any
    errors: tuple[type[Exception], ...]

    def read(self, name: str, most: int) -> list[Held]:
        """Return at most `most` messages, the oldest first, and leave them where they are."""
        with self._looking(name) as messages:
            return [message for message, _ in islice(messages, most)]

    def take(self, name: str, is_it: Callable[[Held], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then` and delete it, unless `then` raises; False without a message."""
        with self._looking(name) as messages:
            for message, acknowledge in messages:
                if is_it(message):
                    then()
                    acknowledge()
                    return True
        return False

    def depth(self, name: str) -> int:
        """Return the number of messages in a queue, 0 where there is no such queue."""
        try:
            with self.connection.channel() as channel:
                declared = channel.queue_declare(name, passive=True)
        except self.errors as error:
            if not _is_missing(error):
                raise
            return 0
        # Pika wraps the answer.
        return int(getattr(declared, "method", declared).message_count)

    @contextmanager
    def _looking(self, name: str) -> Iterator[Iterator[tuple[Held, Callable[[], object]]]]:
        """Give a queue's messages, the oldest first, each with what deletes it; all others go back."""
        channel = self.connection.channel()
        try:
            yield self._messages(channel, name)
        finally:
            if getattr(channel, "is_open", True):
                # For RabbitMQ 4.3 closing alone is a failed delivery, which a quorum queue may delay.
                self.put_back(channel)
                channel.close()

    def _messages(self, channel: Any, name: str) -> Iterator[tuple[Held, Callable[[], object]]]:
        try:
            while (message := self.get(channel, name)) is not None:
                if not self.is_renewed(channel, name, message):
                    yield self.shown(channel, message), functools.partial(self.delete, channel, message)
        except self.errors as error:
            if not _is_missing(error):
                raise

    def get(self, channel: Any, name: str) -> Any:
        """Return the next message of a queue, as the broker gives it, or None."""

    def shown(self, channel: Any, message: Any) -> Any:
        """Return a message as the adapter reads it."""

    def delete(self, channel: Any, message: Any) -> None:
        """Acknowledge a message."""

    def put_back(self, channel: Any) -> None:
        """Put back what was not acknowledged."""

    def is_renewed(self, channel: Any, name: str, message: Any) -> bool:  # noqa: ARG002
        """Return whether a message is in another place of its queue now, and will be read there."""
        return False


def _is_missing(error: Exception) -> bool:
    """Return whether there is no such queue; kombu's own transports have the code as a text."""
    return str(getattr(error, "reply_code", "")) == str(NOT_FOUND)


class QueuesOnRabbitMQ(HeldQueues[Held]):
    """Dead queues on RabbitMQ, where one reader waits for another, and no look uses a message up."""

    def read(self, name: str, most: int) -> list[Held]:
        """Return at most `most` messages, the oldest first, and warn of a queue that hides them now."""
        held, waited = super().read(name, most), 0.0
        while held and not self.depth(name):
            if waited > _SHOWN_SECONDS:
                logger.warning(_HIDDEN, name)
                break
            pause(0.1)
            waited += 0.1
        return held

    @contextmanager
    def _looking(self, name: str) -> Iterator[Iterator[tuple[Held, Callable[[], object]]]]:
        """Wait until no other reader looks, then give the messages: a reader hides those that it holds.

        A reader that waits in vain reads all the same: nothing is lost.
        """
        waited = 0.0
        while waited < PATIENCE and not self._has_turn(name):
            pause(0.1)
            waited += 0.1
        with super()._looking(name) as messages:
            yield messages

    def _has_turn(self, name: str) -> bool:
        """Declare an exclusive queue, which goes with this connection; False while another reader has it."""
        try:
            self.connection.channel().queue_declare(f"{name}.ojs", exclusive=True)
        except self.errors as error:
            return getattr(error, "reply_code", None) != _LOCKED
        return True

    def is_renewed(self, channel: Any, name: str, message: Any) -> bool:
        """Publish a message anew that was delivered often, to the end of its queue; False if it stays."""
        counted = self.headers_of(message)
        if counted.get(_COUNT, 0) < _OFTEN:
            return False
        headers = {header: value for header, value in counted.items() if header not in _COUNTS}
        try:
            self.publish(channel, name, message, headers)
        except Exception as error:  # noqa: BLE001 - a full queue refuses it; its old place is as good
            logger.warning("a message in %s was delivered often, and cannot go there anew: %r", name, error)
            return False
        self.delete(channel, message)
        return True

    def headers_of(self, message: Any) -> Any:
        """Return the headers of a message."""

    def publish(self, channel: Any, name: str, message: Any, headers: dict[str, Any]) -> None:
        """Publish a message with other headers, and wait until RabbitMQ has confirmed it."""


@contextmanager
def claimed_on_redis(client: Any, lock: str) -> Iterator[bool]:
    """Give whether the lock of a message on Redis was free; then no other reader has it for a minute.

    A reader that had it before may have deleted the message.
    """
    token = uuid.uuid4().hex
    is_ours = bool(client.set(lock, token, nx=True, px=int(CLAIM_SECONDS * 1000)))
    try:
        yield is_ours
    finally:
        if is_ours:
            client.eval(_UNLOCK, 1, lock, token)


def found_letter(
    run: Run | Refuse, framework: str, message: Mapping[str, Any], *, at: datetime | None, now: datetime
) -> Letter:
    """Return the letter of a job that was found in a dead queue, where it has been since `at`, if known.

    `run` is the run that the bridge would begin for the message, or its refusal.
    """
    job = run.job
    decision, policy = (
        (run.decision, RetryPolicy()) if isinstance(run, Refuse) else (_decision_of(job), run.policy)
    )
    at = at or _last_failure(job) or job.created_at or now
    return letter_of(job, decision, policy, framework, message, job.errors, at=at)


def _decision_of(job: Job) -> DeadLettered:
    """Return the decision that ended a job, as far as its message tells."""
    last = job.errors[-1] if job.errors else {}
    failure = Failure(str(last.get("type") or "Unknown"), str(last.get("message") or ""))
    reason = f"attempt {job.attempt} was its last, and it was found in the broker's dead queue"
    cause = "handler" if last.get("code") == "DEAD_LETTER" else _CAUSES.get(failure.type, "exhausted")
    return DeadLettered(cause, failure, reason)


def _last_failure(job: Job) -> datetime | None:
    try:
        return parse_time(str(job.errors[-1].get("timestamp"))) if job.errors else None
    except ValueError:
        return None
