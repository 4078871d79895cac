"""The operator's view of dead letters: list, get, retry, delete, stats (DLQ-003, DLQ-006)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from .decision import DeadLetter
from .errors import ConfigurationError
from .events import Event, dead_letter, pruned
from .job import ErrorEntry, Header, Job
from .policy import RetryPolicy
from .publishing import Publisher
from .retention import Pruner, Retention
from .store import Claim, Letter, LetterFilter, Page, Stats, Store

logger = logging.getLogger("ojs_bridge")

#: How long one replay may hold a letter before another may take it over.
CLAIM_SECONDS = 60.0
MAX_PAGE = 1000


class LetterNotFound(KeyError):
    """There is no dead letter of this id, or another replay holds it at this moment."""

    def __str__(self) -> str:
        return str(self.args[0])


class DeadLetters:
    """Dead letters of one bridge. Every method raises ConfigurationError when the bridge has no store."""

    def __init__(
        self,
        store: Store | None,
        publishers: Mapping[str, Publisher],
        *,
        encode: Callable[[Job], Header],
        clock: Callable[[], datetime],
        emit: Callable[[Event], None],
        retention: Retention,
    ) -> None:
        self._maybe_store = store
        self._publishers = publishers
        self._encode = encode
        self._clock = clock
        self._emit = emit
        #: How long letters are kept, and how many.
        self.retention = retention

    def list(
        self,
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002 - the spec's word
        error_type: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> Page:
        """Return a page, newest first; `type` and `error_type` take `prefix.*` (DLQ-006, DLQ-R005).

        `since` and `until` say when a job died; the latter moment is not included.

        Raises ValueError for a limit outside 1 to 1000 and for a cursor that no page gave out.
        """
        where = LetterFilter(queue, type, error_type, since, until)
        return self._store.list(where, limit=page_size(limit), cursor=cursor)

    def get(self, letter_id: str) -> Letter:
        """Return one dead letter with its whole history (DLQ-002); raises LetterNotFound."""
        letter = self._store.get(letter_id)
        if letter is None:
            raise LetterNotFound(f"there is no dead letter {letter_id!r}")
        return letter

    def retry(self, letter_id: str) -> Job:
        """Send a dead letter back to its queue: same id, fresh attempts, history kept (DLQ-003).

        The letter leaves the store only after its message was published. Raises LetterNotFound,
        ConfigurationError when this process has no publisher for the letter's framework, and whatever
        publishing raises; the letter then stays.
        """
        letter = self.get(letter_id)
        publisher = self._publishers.get(letter.framework)
        if publisher is None:
            name = letter.framework
            raise ConfigurationError(
                f"dead letter {letter_id!r} belongs to {name}, and this process has given the bridge to no "
                f"{name} app or broker: import the module that does"
            )
        claim = self._claim(letter_id)
        try:
            job = self._replay(self.get(letter_id), publisher)
        except BaseException:
            self._store.release(letter_id, claim)
            raise
        # The job may have died again already, and its new letter stays.
        self._store.delete(letter_id, claim)
        self._emit(dead_letter("retried", job, self._clock(), replay_count=job.replay_count))
        return job

    def delete(self, letter_id: str) -> None:
        """Delete a dead letter; raises LetterNotFound, also for one that is being replayed."""
        letter = self.get(letter_id)
        claim = self._claim(letter_id)
        self._store.forget_errors(letter_id)
        if not self._store.delete(letter_id, claim):
            raise LetterNotFound(f"dead letter {letter_id!r} was replayed, and its job has died again")
        self._emit(dead_letter("deleted", _job(letter), self._clock()))

    def stats(self) -> Stats:
        """Count the dead letters, in all and by queue, job type and last error type (DLQ-R004)."""
        return self._store.stats()

    def prune(self) -> int:
        """Delete the letters that exceed the retention, now, and return how many (DLQ-004).

        Workers do so every five minutes. Raises OSError when the archive cannot be written.
        """
        return self._pruned(self._pruner().prune())

    def prune_in_turn(self) -> None:
        """Do so unless another worker of the fleet has, or is at it (DLQ-005)."""
        self._pruned(self._pruner().prune_in_turn() or 0)

    def _pruner(self) -> Pruner:
        return Pruner(self._store, self.retention, self._clock)

    def _pruned(self, count: int) -> int:
        if count:
            archived = self.retention.archive is not None
            self._emit(pruned(count, self._clock(), archived=archived))
            logger.info("%d dead letters were pruned", count)
        return count

    def _replay(self, letter: Letter, publisher: Publisher) -> Job:
        header = self._encode(_job(letter).replayed())
        self._store.forget_errors(letter.id)
        if header.left_out:
            self._store.keep_errors(letter.id, header.left_out)
        publisher.republish(letter, header)
        return header.job

    def _claim(self, letter_id: str) -> Claim:
        claim = self._store.claim(letter_id, now=self._clock(), seconds=CLAIM_SECONDS)
        if claim is None:
            raise LetterNotFound(f"dead letter {letter_id!r} is being replayed, or is gone")
        return claim

    @property
    def _store(self) -> Store:
        return needed(self._maybe_store, "dead letters")


def page_size(limit: int) -> int:
    """Return how many entries a page is to have; raises ValueError outside 1 to 1000."""
    if not (isinstance(limit, int) and 1 <= limit <= MAX_PAGE):
        raise ValueError(f"limit: {limit!r} must be between 1 and {MAX_PAGE}")
    return limit


def needed(store: Store | None, what: str) -> Store:
    """Return the store; raises ConfigurationError where there is none for what needs one."""
    if store is None:
        raise ConfigurationError(
            f"{what} need a store: Bridge(store='sqlite:///ojs.db'), or OJS_BRIDGE_STORE"
        )
    return store


def letter_of(
    job: Job,
    decision: DeadLetter,
    policy: RetryPolicy,
    framework: str,
    message: Mapping[str, Any],
    errors: tuple[ErrorEntry, ...],
    *,
    at: datetime,
) -> Letter:
    """Return the letter of a job that died at a time, with all its errors and its message (DLQ-002)."""
    return Letter(
        id=job.id,
        type=job.type,
        queue=job.queue,
        framework=framework,
        attempt=job.attempt,
        max_attempts=policy.max_attempts,
        cause=decision.cause,
        reason=decision.reason,
        discarded_at=at,
        message=message,
        errors=errors,
        retry=job.retry,
        created_at=job.created_at,
        replay_count=job.replay_count,
        key=job.key,
        fence=job.fence,
    )


def _job(letter: Letter) -> Job:
    return Job(
        id=letter.id,
        type=letter.type,
        queue=letter.queue,
        attempt=letter.attempt,
        retry=letter.retry,
        errors=letter.errors,
        created_at=letter.created_at,
        replay_count=letter.replay_count,
        fence=max(letter.fence, letter.attempt - 1),
        chain=letter.key.removeprefix(letter.id).removeprefix("#"),
    )
