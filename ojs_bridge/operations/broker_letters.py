"""The operator's view of the brokers' own dead queues, and what their readers need of Redis and RabbitMQ."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.events import deleted, replayed
from ..engine.runs import Changes, Override
from ..errors import ConfigurationError, LetterNotFound
from ..rules.job import Job
from ..store import EVERYTHING, Fields, Filter, Letter, Page, to_ms
from .audit import Audit, uninterrupted
from .letters import is_among, page_size, says, shown
from .replaying import job_of, publisher_of, send

logger = logging.getLogger("ojs_bridge")

#: The most letters of each framework that are read.
MOST = 10_000


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
        with self._audit.recording("dead_letter.replay", ids=[letter_id], changes=override.words()):
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


def _place(letter: Letter) -> tuple[int, str]:
    return to_ms(letter.discarded_at), letter.id


def _read_cursor(cursor: str) -> tuple[int, str]:
    at, separator, letter_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal()):
        raise ValueError(f"cursor: {cursor!r} was returned by no page")
    return int(at), letter_id
