"""The operator's view of the brokers' own dead queues, and what their readers need of Redis and RabbitMQ."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.events import deleted, replayed
from ..engine.keeping import letter_of
from ..engine.runs import Changes, Override, Refuse, Run
from ..engine.storage_retry import pause
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState, LetterNotFound
from ..rules.decision import EXPIRED, Cause, DeadLettered
from ..rules.failures import Failure
from ..rules.job import Job, parse_time
from ..rules.policy import RetryPolicy
from ..store import EVERYTHING, Fields, Filter, Letter, Page, to_ms
from .audit import Audit, uninterrupted
from .letters import CLAIM_SECONDS, is_among, page_size, says, shown
from .replaying import job_of, publisher_of, send

logger = logging.getLogger("ojs_bridge")

#: The most letters of each framework that are read.
MOST = 10_000
#: For how many seconds at most a reader of a dead queue on RabbitMQ waits for another reader.
PATIENCE = 5.0
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


class BrokerLetters:
    """Dead letters in the brokers' own dead queues: Dramatiq's `.XQ`, and `<queue>.dead` on Celery.

    Dead letters go there without a store, or when the store cannot be reached. On Dramatiq those from before
    the bridge lie there, too. Every method reads the queues anew, at most 10,000 letters of each framework.
    All raise Unreachable, and ConfigurationError when this process has given the bridge to no app or broker.
    The letters that are returned are redacted.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._letters = context.store.letters if context.store else None
        self._audit = Audit(context)

    def list(
        self,
        where: Filter = EVERYTHING,
        *,
        limit: int = 50,
        cursor: str | None = None,
        **fields: Unpack[Fields],
    ) -> Page:
        """Return a page of the dead letters of a filter, newest first, each with the errors in its message.

        Raises ValueError for a limit outside 1 to 1000, for a cursor that no page has returned, and for a
        time without a zone.
        """
        where, size = replace(where, **fields), page_size(limit)
        last = None if cursor is None else _read_cursor(cursor)
        letters = [
            letter
            for letter in self._read()
            if (last is None or _place(letter) < last)
            and is_among(letter, letter.discarded_at, where)
            and where.group in (None, letter.group)
            and says(letter, where.text, self._context.redactor)
        ]
        more = "{}:{}".format(*_place(letters[size - 1])) if len(letters) > size else None
        return Page(tuple(shown(letter, self._context.redactor) for letter in letters[:size]), more)

    def get(self, letter_id: str) -> Letter:
        """Return a dead letter, with the errors that the store has kept; raises LetterNotFound."""
        return shown(self._whole(self._get(letter_id)), self._context.redactor)

    @uninterrupted()
    def replay(self, letter_id: str, **changes: Unpack[Changes]) -> Job:
        """Send a dead letter back to its queue: same id, fresh attempts, history kept (DLQ-003, DLQ-R002).

        The changes are those of `DeadLetters.replay`. The letter leaves its dead queue only after its message
        was published. Raises LetterNotFound, also while another process replays the letter;
        ConfigurationError when this process does not know its type; ValueError and InvalidRetryPolicy for the
        changes; and every error of publishing. After an error the letter stays.
        """
        override = Override(**changes)
        letter = self._get(letter_id)
        publisher_of(self._context, letter)
        sent: list[Job] = []
        with self._audit.recording("dead_letter.replay", ids=[letter_id], changes=sorted(override.to_ojs())):
            self._take(letter, lambda held: sent.append(send(self._context, self._whole(held), override)))
        (job,) = sent
        self._context.emit(replayed(job, self._context.clock()))
        return job

    @uninterrupted()
    def delete(self, letter_id: str) -> None:
        """Delete a dead letter; raises LetterNotFound, also while a process replays the letter."""
        letter = self._get(letter_id)
        with self._audit.recording("dead_letter.delete", ids=[letter_id]):
            self._take(letter, self._forget)
        self._context.emit(deleted(job_of(letter), self._context.clock()))

    def _forget(self, letter: Letter) -> None:
        if self._letters is not None:
            self._letters.forget_errors(letter.id)

    def _take(self, letter: Letter, then: Callable[[Letter], object]) -> None:
        if not self._context.dead_queues[letter.framework].take(letter, then):
            raise LetterNotFound(f"dead letter {letter.id!r} is being replayed, or is gone")

    def _get(self, letter_id: str) -> Letter:
        letter = next((letter for letter in self._read() if letter.id == letter_id), None)
        if letter is None:
            raise LetterNotFound(f"there is no dead letter {letter_id!r} in the brokers' dead queues")
        return letter

    def _read(self) -> Sequence[Letter]:
        if not self._context.dead_queues:
            raise ConfigurationError(
                "a dead queue is read through its app or broker, and this process has given the bridge to "
                "none: import the module that does"
            )
        letters = [letter for queues in self._context.dead_queues.values() for letter in queues.read(MOST)]
        return sorted(letters, key=_place, reverse=True)

    def _whole(self, letter: Letter) -> Letter:
        """Return a letter with the errors that its message had no room for, if a store has kept them."""
        kept = [] if self._letters is None else [entry for _, entry in self._letters.kept_errors(letter.id)]
        # A shortened entry keeps what tells it from the others of its job.
        whole = {
            (entry.get("replay", 0), entry.get("attempt"), entry.get("timestamp")): entry
            for entry in (*letter.errors, *kept)
        }
        in_time = sorted(whole.values(), key=lambda entry: str(entry.get("timestamp")))
        return replace(letter, errors=tuple(in_time)) if kept else letter


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


def await_turn(has_turn: Callable[[], bool]) -> None:
    """Wait until no other reader looks through a queue on RabbitMQ: a reader hides the messages it holds.

    `has_turn` declares an exclusive queue, which belongs to the connection and goes with it; it returns False
    while another reader has that. A reader that waits in vain reads all the same: nothing is lost.
    """
    waited = 0.0
    while waited < PATIENCE and not has_turn():
        pause(0.1)
        waited += 0.1


def renewed(headers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the headers of a message on RabbitMQ to publish it anew; None unless it was delivered often."""
    if headers.get(_COUNT, 0) < _OFTEN:
        return None
    return {name: value for name, value in headers.items() if name not in _COUNTS}


def tell_if_hidden(name: str, count: Callable[[], int]) -> None:
    """Warn of a queue that has given its messages out, taken them back, and counts none of them."""
    waited = 0.0
    while not count():
        if waited > _SHOWN_SECONDS:
            logger.warning(_HIDDEN, name)
            return
        pause(0.1)
        waited += 0.1


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


def _place(letter: Letter) -> tuple[int, str]:
    return to_ms(letter.discarded_at), letter.id


def _read_cursor(cursor: str) -> tuple[int, str]:
    at, separator, letter_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal()):
        raise ValueError(f"cursor: {cursor!r} was returned by no page")
    return int(at), letter_id
