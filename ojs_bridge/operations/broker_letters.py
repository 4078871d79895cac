"""The operator's view of the brokers' own dead queues: list, get, replay, delete (DLQ-003, DLQ-006)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.events import dead_letter
from ..engine.keeping import letter_of
from ..engine.ports import Override
from ..engine.runs import Refuse, Run
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState, LetterNotFound
from ..rules.decision import EXPIRED, Cause, DeadLettered
from ..rules.failures import Failure
from ..rules.job import ErrorEntry, Job, parse_time
from ..rules.policy import PartialPolicy, RetryPolicy
from ..store import Letter, LetterFilter, Page, index_text, matches, to_ms
from .audit import Audit, uninterrupted
from .letters import Kind, page_size, says, shown, wanted
from .replaying import job_of, publisher_of, send

#: The most letters of each framework that are read.
MOST = 10_000
#: The warning of a dead queue on RabbitMQ that hides what was read, and for how long it may take to show it.
HIDDEN = (
    "%s hides the dead letters that were read: another reader has them, or its delayed-retry-type is all or "
    "returned, and they come back after its delay; exclude dead queues from such a policy"
)
SHOWN_SECONDS = 1.0
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
        self._store = context.store
        self._audit = Audit(context)

    def list(self, *, limit: int = 50, cursor: str | None = None, **kind: Unpack[Kind]) -> Page:
        """Return a page of the dead letters of a Kind, newest first, each with the errors in its message.

        Raises ValueError for a limit outside 1 to 1000, for a cursor that no page has returned, and for a
        time without a zone.
        """
        (where, text), size = wanted(kind), page_size(limit)
        last = None if cursor is None else _read_cursor(cursor)
        found = [
            letter
            for letter in self._read()
            if (last is None or _place(letter) < last)
            and _is_among(letter, where)
            and says(letter, text, self._context.redactor)
        ]
        more = _write_cursor(found[size - 1]) if len(found) > size else None
        return Page(tuple(shown(letter, self._context.redactor) for letter in found[:size]), more)

    def get(self, letter_id: str) -> Letter:
        """Return a dead letter, with the errors that the store has kept; raises LetterNotFound."""
        return shown(self._whole(self._get(letter_id)), self._context.redactor)

    @uninterrupted()
    def replay(
        self,
        letter_id: str,
        *,
        queue: str | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        retry: PartialPolicy | None = None,
    ) -> Job:
        """Send a dead letter back to its queue: same id, fresh attempts, history kept (DLQ-003, DLQ-R002).

        The changes are those of `DeadLetters.replay`. The letter leaves its dead queue only after its message
        was published. Raises LetterNotFound, also while another process replays the letter;
        ConfigurationError when this process does not know its type; ValueError and InvalidRetryPolicy for the
        changes; and every error of publishing. After an error the letter stays.
        """
        override = Override(queue, args, kwargs, meta, retry)
        letter = self._get(letter_id)
        publisher_of(self._context, letter)
        sent: list[Job] = []
        with self._audit.recording("dead_letter.replay", ids=[letter_id], changes=sorted(override.to_ojs())):
            self._take(letter, lambda found: sent.append(send(self._context, self._whole(found), override)))
        (job,) = sent
        self._context.emit(dead_letter("retried", job, self._context.clock(), replay_count=job.replay_count))
        return job

    #: The specification's word: an alias of `replay`.
    retry = replay

    @uninterrupted()
    def delete(self, letter_id: str) -> None:
        """Delete a dead letter; raises LetterNotFound, also while a process replays the letter."""
        letter = self._get(letter_id)
        with self._audit.recording("dead_letter.delete", ids=[letter_id]):
            self._take(letter, self._forget)
        self._context.emit(dead_letter("deleted", job_of(letter), self._context.clock()))

    def _forget(self, letter: Letter) -> None:
        if self._store is not None:
            self._store.forget_errors(letter.id)

    def _take(self, letter: Letter, then: Callable[[Letter], object]) -> None:
        if not self._context.dead_queues[letter.framework].take(letter, then):
            raise LetterNotFound(f"dead letter {letter.id!r} is being replayed, or is gone")

    def _get(self, letter_id: str) -> Letter:
        found = next((letter for letter in self._read() if letter.id == letter_id), None)
        if found is None:
            raise LetterNotFound(f"there is no dead letter {letter_id!r} in the brokers' dead queues")
        return found

    def _read(self) -> Sequence[Letter]:
        if not self._context.dead_queues:
            raise ConfigurationError(
                "a dead queue is read through its app or broker, and this process has given the bridge to "
                "none: import the module that does"
            )
        found = [letter for queues in self._context.dead_queues.values() for letter in queues.read(MOST)]
        return sorted(found, key=_place, reverse=True)

    def _whole(self, letter: Letter) -> Letter:
        """Return a letter with the errors that its message had no room for, if a store has kept them."""
        kept = [] if self._store is None else [entry for _, entry in self._store.kept_errors(letter.id)]
        whole = {_which(entry): entry for entry in (*letter.errors, *kept)}
        in_time = sorted(whole.values(), key=lambda entry: str(entry.get("timestamp")))
        return replace(letter, errors=tuple(in_time)) if kept else letter


def found_letter(
    begun: Run | Refuse, framework: str, message: Mapping[str, Any], *, at: datetime | None, now: datetime
) -> Letter:
    """Return the letter of a job that was found in a dead queue, where it has been since `at`, if known.

    `begun` is the run that the bridge would begin for the message, or its refusal.
    """
    job = begun.job
    decision, policy = (
        (begun.decision, RetryPolicy()) if isinstance(begun, Refuse) else (_decision_of(job), begun.policy)
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


def _which(entry: ErrorEntry) -> tuple[Any, ...]:
    """Return the key of an error entry among those of its job: a shortened entry keeps it."""
    return entry.get("replay", 0), entry.get("attempt"), entry.get("timestamp")


def _is_among(letter: Letter, where: LetterFilter) -> bool:
    at = letter.discarded_at
    return (
        (where.queue is None or letter.queue == where.queue)
        and letter.queue not in where.but_queues
        and matches(index_text(letter.type), where.type)
        and matches(index_text(letter.error_type), where.error_type)
        and (where.since is None or at >= where.since)
        and (where.until is None or at < where.until)
        and where.group in (None, letter.group)
    )


def _place(letter: Letter) -> tuple[int, str]:
    return to_ms(letter.discarded_at), letter.id


def _write_cursor(letter: Letter) -> str:
    ms, letter_id = _place(letter)
    return f"{ms}:{letter_id}"


def _read_cursor(cursor: str) -> tuple[int, str]:
    at, separator, letter_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal()):
        raise ValueError(f"cursor: {cursor!r} was returned by no page")
    return int(at), letter_id
