"""Retention limits the age and the number of dead letters (spec sections dlq 5 and 8: DLQ-004, DLQ-005)."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..engine import running
from ..engine.rates import IN_BROKER, READ_FOR
from ..engine.scheduler import once_a_period
from ..errors import ConfigurationError
from ..rules.job import format_time
from ..rules.notations import duration_at, format_duration, read_duration
from ..store import BIN_KEPT, Document, Documents, Filter, Letter, Store, readable, to_json, to_ms
from . import audit, health, webhooks
from .letters import CLAIM_SECONDS

#: The most letters that are pruned at a time, and the time between two prunings.
BATCH = 500
PERIOD = timedelta(minutes=5)
#: The kind of the records of prunings, how long they are shown, and the share that is nearly a whole limit.
KIND, SHOWN_FOR, NEARLY_FULL = "retention", timedelta(days=1), 0.9
#: The most groups that lose letters of their own, and the most that are named. Then the oldest letters go.
_GROUPS, _NAMED = 200, 3
#: How long the first death of a group without letters is kept, and records of these kinds.
GROUPS_KEPT = timedelta(days=365)
RECORDS = {
    audit.KIND: audit.KEPT,
    audit.MARK: audit.KEPT,
    health.KIND: health.KEPT,
    KIND: SHOWN_FOR,
    IN_BROKER: READ_FOR,
    running.KIND: running.READ_FOR,
    webhooks.KIND: webhooks.KEPT,
}

logger = logging.getLogger("ojs_bridge")


@dataclass(frozen=True, slots=True)
class Retention:
    """The limits of the age and the number of dead letters.

    Beyond `max_age` the oldest letters are deleted; beyond `max_count` the oldest of the largest groups.
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
        age = duration_at("retention: max_age", self.max_age)
        if type(self.max_count) is not int or self.max_count < 0:
            raise ConfigurationError(
                f"retention: max_count: {self.max_count!r} must be an integer of at least 0"
            )
        if not isinstance(self.queues, Mapping):
            raise ConfigurationError(f"retention: queues: {self.queues!r} must map queues to a Retention")
        for queue, own in self.queues.items():
            if not (queue and isinstance(queue, str)):
                raise ConfigurationError(f"retention: queues: {queue!r} must be the name of a queue")
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

    def rules(self) -> Iterator[tuple[Filter, Retention]]:
        """Yield each filter of letters, and its limits."""
        for queue, own in self.queues.items():
            yield Filter(queue=queue), own
        yield Filter(but_queues=frozenset(self.queues)), self


@dataclass(frozen=True, slots=True)
class Pruning:
    """What a pruning tells: the shares of the limits, how many letters these have deleted, and of which."""

    fullness: Mapping[str, float]
    overflow: int
    groups: Mapping[str, int]


_PRUNING = TypeAdapter(Pruning)


class Pruner:
    """Prunes the dead letters of a fleet. Every worker tries to, and one worker does at a time.

    A process that is killed between archiving and deleting leaves its letters, which are archived once more.
    """

    def __init__(
        self,
        store: Store,
        retention: Retention,
        clock: Callable[[], datetime],
        surely: Callable[[], datetime],
        shown: Callable[[Letter], Letter],
    ) -> None:
        self._store = store
        self._retention = retention
        self._clock, self._surely = clock, surely
        self._shown = shown
        #: The letters that a limit of the number has deleted, by the job type and the error of their group.
        self.overflow = Counter[str]()
        #: The share of each limit of the number that was used, by the queue; `*` are all other queues.
        self.fullness: dict[str, float] = {}

    def prune(self) -> int:
        """Prune now, by age first, and return the number of letters; raises StoreError, and OSError."""
        self._store.letters.forget_bin(before=self._surely() - BIN_KEPT)
        pruned = sum(self._enforce(where, limits) for where, limits in self._retention.rules())
        self._tell()
        return pruned

    def prune_once_a_period(self) -> int | None:
        """Prune; return None if another worker has done so in this period, or does now (DLQ-005)."""
        return once_a_period(self._store.reservations, "prune", PERIOD, self._clock, self._prune_and_forget)

    def _prune_and_forget(self) -> int:
        now = self._surely()
        for kind, kept in RECORDS.items():
            self._store.documents.forget(kind, before=now - kept)
        self._store.documents.forget_rates(now)
        self._store.letters.forget_groups(before=now - GROUPS_KEPT)
        return self.prune()

    def _enforce(self, where: Filter, limits: Retention) -> int:
        pruned = self._prune_oldest(replace(where, until=self._surely() - limits.age), sys.maxsize)
        count = self._store.letters.count(where)
        if limits.max_count:
            self.fullness[where.queue or "*"] = round(count / limits.max_count, 3)
        return pruned + self._prune_excess(where, count - limits.max_count)

    def _prune_excess(self, where: Filter, excess: int) -> int:
        """Prune so many letters: the largest groups lose their oldest, so that no fault pushes out others."""
        if excess <= 0:
            return 0
        lost = losses(self._store.letters.group_sizes(where), excess)
        pruned, rest = 0, excess
        for group, count in [*lost.items()][:_GROUPS]:
            ours = replace(where, group=group)
            newest = self._store.letters.list(ours, limit=1, cursor=None).letters
            name = f"{newest[0].type}: {newest[0].error_type}" if newest else group
            gone = self._prune_oldest(ours, count)
            self.overflow[name] += gone
            pruned, rest = pruned + gone, rest - count
        # Letters of very many groups.
        if gone := self._prune_oldest(where, rest):
            self.overflow["others"] += gone
        return pruned + gone

    def _tell(self) -> None:
        """Write down how full the limits are and what was deleted; warn in the log of both."""
        now, total = self._clock(), self.overflow.total()
        before = self._store.documents.list(KIND, limit=1, cursor=None).documents
        last = next(readable(before, _read), Pruning({}, 0, {}))
        was_full = max(last.fullness.values(), default=0) >= NEARLY_FULL
        full = [f"{name} {share:.0%}" for name, share in self.fullness.items() if share >= NEARLY_FULL]
        body = asdict(Pruning(self.fullness, total, self.named()))
        told = Document(KIND, f"{to_ms(now)}-{secrets.token_hex(3)}", now, body)
        self._store.documents.write(told, of_operator=True)
        way_out = (
            "they are in the archive"
            if self._retention.archive and total
            else "an export keeps them, and so does Retention(archive=...)"
        )
        if total:
            named = ", ".join(f"{count} of {name}" for name, count in self.named().items())
            logger.warning(
                "%d dead letters were deleted, because there are more than max_count: %s; %s",
                *(total, named, way_out),
            )
        elif full and not was_full:
            logger.warning(
                "dead letters are nearly as many as max_count (%s): beyond it the largest groups lose their "
                "oldest; %s",
                *(", ".join(full), way_out),
            )

    def named(self) -> dict[str, int]:
        """Return the groups that have lost the most letters, and the number of these."""
        return dict(self.overflow.most_common(_NAMED))

    def _prune_oldest(self, where: Filter, most: int) -> int:
        """Prune at most so many letters; letters that are being replayed stay."""
        pruned, cursor = 0, None
        while most > 0:
            page = self._store.letters.list(where, limit=min(BATCH, most), cursor=cursor, oldest_first=True)
            if page.letters:
                pruned += self._prune(page.letters)
            most, cursor = most - len(page.letters), page.next_cursor
            if cursor is None:
                break
        return pruned

    def _prune(self, letters: Sequence[Letter]) -> int:
        archive = self._retention.archive
        if archive is None:
            return self._store.letters.prune(letters, now=self._clock())
        died = {letter.id: letter.discarded_at for letter in letters}
        claimed = self._store.letters.claim([*died], now=self._clock(), seconds=CLAIM_SECONDS)
        try:
            # A letter that a replay has claimed stays out of the archive, as does a newer letter of its job.
            doomed = [each for each in claimed.letters if each.discarded_at == died[each.id]]
            self._append(Path(archive), doomed)
            return self._store.letters.delete([letter.id for letter in doomed], claimed.claim)
        finally:
            self._store.letters.unclaim([*died], claimed.claim)

    def _append(self, archive: Path, letters: Sequence[Letter]) -> None:
        with archive.open("a", encoding="utf-8") as file:
            for letter in letters:
                file.write(to_json(self._shown(letter)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def losses(sizes: Mapping[str, tuple[int, datetime]], excess: int) -> dict[str, int]:
    """Return how many letters each group loses: the largest lose most, until those are of one size.

    Of groups of the same size, those lose first whose newest letter is the oldest.
    """
    counts = [count for count, _ in sizes.values()]
    kept = max(sum(counts) - excess, 0)
    low, high = 0, max(counts, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(count, middle) for count in counts) <= kept:
            low = middle
        else:
            high = middle - 1
    more = kept - sum(min(count, low) for count in counts)
    largest = sorted((group for group in sizes if sizes[group][0] > low), key=lambda group: sizes[group][1])
    lost = {group: sizes[group][0] - low for group in largest}
    # The last ones keep one letter more.
    for group in largest[len(largest) - more :]:
        lost[group] -= 1
    return {group: count for group, count in sorted(lost.items(), key=lambda one: -one[1]) if count}


def limits_of(limits: Retention, documents: Documents, now: datetime) -> dict[str, Any]:
    """Return the limits and the time of the next pruning, how full they are, and what they have deleted."""
    period = PERIOD.total_seconds()
    due = now + timedelta(seconds=period - now.timestamp() % period)
    return {
        "max_age": format_duration(limits.age),
        "max_count": limits.max_count,
        "next_prune_at": format_time(due),
        **_fullness_of(documents, now),
    }


def _fullness_of(documents: Documents, now: datetime) -> dict[str, Any]:
    """Return how full the limits of the number are, and what they have deleted in the last day."""
    told = documents.list(KIND, limit=1000, cursor=None).documents
    lately = [*readable((document for document in told if document.at > now - SHOWN_FOR), _read)]
    groups = Counter[str]()
    for pruning in lately:
        groups.update(pruning.groups)
    return {
        "fullness": {**lately[0].fullness} if lately else {},
        "overflow": sum(pruning.overflow for pruning in lately),
        "overflow_of": dict(groups.most_common(_NAMED)),
    }


def _read(document: Document) -> Pruning:
    return _PRUNING.validate_python(document.body)
