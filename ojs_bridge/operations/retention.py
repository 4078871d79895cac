"""Retention limits the age and the number of dead letters (spec sections dlq 5 and 8: DLQ-004, DLQ-005)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from ..engine.scheduler import once_a_period
from ..errors import ConfigurationError
from ..spec.duration import read_duration
from ..store import Letter, LetterFilter, Store, letter_to_json
from . import audit, health, marks
from .letters import CLAIM_SECONDS

#: The most letters that are pruned at a time, and the time between two prunings.
BATCH = 500
PERIOD = timedelta(minutes=5)
#: How long the first death of a group without letters is kept, and records of these kinds.
GROUPS_KEPT = timedelta(days=365)
RECORDS = {audit.KIND: audit.KEPT, marks.KIND: audit.KEPT, health.KIND: health.KEPT}


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits of the age and the number of dead letters; the oldest letters are deleted first.

    `max_age` is an ISO 8601 duration or a timedelta. `queues` gives some queues limits of their own: each of
    these is counted by itself, and all other queues are counted together. `archive` is the path of a file:
    the worker that prunes appends the letters to it, in the form of an export, and then deletes them. Raises
    ConfigurationError.
    """

    max_age: str | timedelta = "P180D"
    max_count: int = 10_000
    queues: Mapping[str, Retention] = field(default_factory=dict)
    archive: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        try:
            age = read_duration(self.max_age)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"retention: max_age: {self.max_age!r} {error}") from None
        if not age:
            raise ConfigurationError(f"retention: max_age: {self.max_age!r} must be greater than zero")
        if type(self.max_count) is not int or self.max_count < 0:
            raise ConfigurationError(
                f"retention: max_count: {self.max_count!r} must be an integer of at least 0"
            )
        if not isinstance(self.queues, Mapping):
            raise ConfigurationError(f"retention: queues: {self.queues!r} must map queues to a Retention")
        for queue, own in self.queues.items():
            if not isinstance(own, Retention) or own.queues or own.archive:
                raise ConfigurationError(
                    f"retention: queues: {queue!r} must have a Retention of max_age and max_count alone"
                )
        if self.archive is not None and not (isinstance(self.archive, str | os.PathLike) and self.archive):
            raise ConfigurationError(f"retention: archive: {self.archive!r} must be the path of a file")
        object.__setattr__(self, "max_age", age)

    @property
    def age(self) -> timedelta:
        """`max_age` as a timedelta."""
        return read_duration(self.max_age)

    def rules(self) -> Iterator[tuple[LetterFilter, Retention]]:
        """Yield each filter of letters, and its limits."""
        for queue, own in self.queues.items():
            yield LetterFilter(queue=queue), own
        yield LetterFilter(but_queues=frozenset(self.queues)), self


class Pruner:
    """Prunes the dead letters of a fleet. Every worker tries to, and one worker does at a time.

    A process that is killed between archiving and deleting leaves its letters, which are archived once more.
    """

    def __init__(
        self,
        store: Store,
        retention: Retention,
        clock: Callable[[], datetime],
        shown: Callable[[Letter], Letter],
    ) -> None:
        self._store = store
        self._retention = retention
        self._clock = clock
        self._shown = shown

    def prune(self) -> int:
        """Prune now, by age first, and return the number of letters; raises StoreError, and OSError."""
        return sum(self._enforce(where, limits) for where, limits in self._retention.rules())

    def prune_once_a_period(self) -> int | None:
        """Prune; return None if another worker has done so in this period, or does now (DLQ-005)."""
        return once_a_period(self._store, "prune", PERIOD, self._clock, self._prune_and_forget)

    def _prune_and_forget(self) -> int:
        for kind, kept in RECORDS.items():
            self._store.forget_documents(kind, before=self._clock() - kept)
        self._store.forget_rates(self._clock())
        self._store.forget_groups(before=self._clock() - GROUPS_KEPT)
        return self.prune()

    def _enforce(self, where: LetterFilter, limits: Retention) -> int:
        pruned = self._prune_oldest(replace(where, until=self._clock() - limits.age), sys.maxsize)
        excess = self._store.count(where) - limits.max_count
        return pruned + self._prune_oldest(where, excess)

    def _prune_oldest(self, where: LetterFilter, most: int) -> int:
        """Prune at most so many letters; letters that are being replayed stay."""
        pruned, cursor = 0, None
        while most > 0:
            page = self._store.list(where, limit=min(BATCH, most), cursor=cursor, oldest_first=True)
            if page.letters:
                pruned += self._prune(page.letters)
            most, cursor = most - len(page.letters), page.next_cursor
            if cursor is None:
                break
        return pruned

    def _prune(self, letters: Sequence[Letter]) -> int:
        archive = self._retention.archive
        if archive is None:
            return self._store.prune(letters, now=self._clock())
        died = {letter.id: letter.discarded_at for letter in letters}
        claimed = self._store.claim([*died], now=self._clock(), seconds=CLAIM_SECONDS)
        try:
            # A letter that a replay has claimed stays out of the archive, as does a newer letter of its job.
            doomed = [each for each in claimed.letters if each.discarded_at == died[each.id]]
            self._append(Path(archive), doomed)
            return self._store.delete([letter.id for letter in doomed], claimed.claim)
        finally:
            self._store.unclaim([*died], claimed.claim)

    def _append(self, archive: Path, letters: Sequence[Letter]) -> None:
        with archive.open("a", encoding="utf-8") as file:
            for letter in letters:
                file.write(letter_to_json(self._shown(letter)) + "\n")
            file.flush()
            os.fsync(file.fileno())
