"""Groups of dead letters, which are alike, the mutes of groups, and the chore that indexes letters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, get_args

from pydantic import TypeAdapter
from typing_extensions import Unpack

from ..engine.context import Context
from ..errors import NotFound
from ..rules.fingerprint import frame_of, pattern_of
from ..rules.job import format_time
from ..store import (
    EVERYTHING,
    Document,
    Fields,
    Filter,
    Group,
    GroupPage,
    Letters,
    Order,
    Store,
    from_ms,
    readable,
    to_ms,
)
from .audit import Actor, Audit
from .letters import MAX_PAGE, every_page, shown, without_text

logger = logging.getLogger("ojs_bridge")

KIND = "mute"
#: How long a mute lasts by default.
LASTS = timedelta(days=7)
#: The most groups, and steps of time, that one statement names; and the most groups before a page.
MOST, MOST_SKIPPED = 200, 100_000


@dataclass(frozen=True, slots=True)
class Mute:
    """A mute of a group, by a person, from a time on, until another time.

    It is lifted before that when more letters than `count`, the number that the group had, have died since.
    """

    by: str
    at: datetime
    until: datetime
    count: int

    def to_ojs(self) -> dict[str, Any]:
        """Return the mute in JSON."""
        times = {"at": format_time(self.at), "until": format_time(self.until)}
        return {"by": self.by, **times, "count": self.count}


_MUTE = TypeAdapter(Mute)


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """A group as an operator sees it: its sample is redacted. `pattern` is what its messages have in common.

    The counts of `deaths` begin at `since`, and each is that of a `step` of time.
    """

    group: Group
    since: datetime
    step: timedelta
    mute: Mute | None = None

    @property
    def message(self) -> str:
        """The message of the newest letter's last error."""
        errors = self.group.sample.errors
        return str(errors[-1].get("message") or "") if errors else ""

    @property
    def pattern(self) -> str:
        """The message without the parts that differ within a group."""
        return pattern_of(self.message)

    @property
    def frame(self) -> str:
        """The place in the user's own code where the error was raised; empty where it is not known."""
        sample = self.group.sample
        return frame_of(sample.type, sample.backtrace, sample.framework)

    def to_ojs(self) -> dict[str, Any]:
        """Return the group in JSON."""
        group = self.group
        return {
            "fingerprint": group.fingerprint,
            "error_type": group.sample.error_type,
            "pattern": self.pattern,
            "frame": self.frame or None,
            "message": self.message,
            "sample_id": group.sample.id,
            "count": group.count,
            "first_at": format_time(group.first_at),
            "last_at": format_time(group.last_at),
            "types": [*group.types],
            "queues": [*group.queues],
            "deaths": {
                "since": format_time(self.since),
                "step_seconds": self.step.total_seconds(),
                "counts": [*group.deaths],
            },
            "muted": self.mute.to_ojs() if self.mute else None,
        }


@dataclass(frozen=True, slots=True)
class Timeline:
    """The number of deaths in each step of time, from `since` on."""

    since: datetime
    step: timedelta
    counts: tuple[int, ...]


class Groups:
    """Groups of dead letters of one bridge. Its methods raise StoreError; without a store ConfigurationError.

    To replay, delete, count or export the letters of a group, give its fingerprint as the filter's `group`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._clock = context.clock
        self._audit = Audit(context)

    def list(
        self,
        where: Filter = EVERYTHING,
        *,
        order: Order = "last",
        muted: bool = False,
        limit: int = 50,
        offset: int = 0,
        steps: int = 24,
        **fields: Unpack[Fields],
    ) -> tuple[ErrorGroup, ...]:
        """Return the groups of the letters of a filter, those that were seen last, or the largest, first.

        Muted groups are left out unless `muted`. On SQL, `types` and `queues` are those of a group's newest
        hundred letters at least. Raises ValueError.
        """
        if order not in get_args(Order):
            raise ValueError(f"order: {order!r} must be one of {', '.join(get_args(Order))}")
        for name, value, least in (("limit", limit, 1), ("offset", offset, 0), ("steps", steps, 1)):
            most = MOST if least else MOST_SKIPPED
            if not (isinstance(value, int) and least <= value <= most):
                raise ValueError(f"{name}: {value!r} must be between {least} and {most}")
        where = without_text(replace(where, **fields), "groups")
        times, mutes = times_of(self._store.letters, where, self._clock(), steps), self.mutes()
        page = GroupPage(order, () if muted else mutes.keys(), times, limit, offset)
        return tuple(
            ErrorGroup(
                replace(group, sample=shown(group.sample, self._context.redactor)),
                times[0],
                times[1] - times[0],
                mutes.get(group.fingerprint),
            )
            for group in self._store.letters.groups(where, page)
        )

    def mutes(self) -> Mapping[str, Mute]:
        """Return the mutes of this moment by their fingerprints.

        A mute is lifted when more letters of its group have died since than it had.
        """
        pages = every_page(lambda cursor: self._store.documents.list(KIND, limit=500, cursor=cursor))
        read = (pair for page in pages for pair in readable(page.documents, _mute_of))
        now = self._clock()
        return {
            name: mute
            for name, mute in read
            if mute is not None
            and mute.until > now
            and self._store.letters.count(Filter(group=name, since=mute.at)) <= mute.count
        }

    def mute(self, group: str, *, until: datetime | None = None) -> Mute:
        """Leave a group out of the list, for seven days or until a time; its letters stay.

        The mute is lifted when the group grows by more letters than it has now. Raises ValueError, and
        NotFound for a group without letters.
        """
        ours = Filter(group=group, until=until)
        now, count = self._now(), self._store.letters.count(replace(ours, until=None))
        if not count:
            raise NotFound(f"there is no group {group!r}")
        mute = Mute(Actor.current().name, now, until or now + LASTS, count)
        with self._audit.recording("group.mute", group=group, until=mute.to_ojs()["until"]):
            self._write(group, {"muted": mute.to_ojs()})
        return mute

    def unmute(self, group: str) -> None:
        """Take a mute back; a group that is not muted stays as it is. Raises ValueError."""
        where = Filter(group=group)
        if where.group in self.mutes():
            with self._audit.recording("group.unmute", group=group):
                self._write(group, {"muted": None})

    def _write(self, group: str, body: Mapping[str, Any]) -> None:
        while True:
            document = self._store.documents.get(KIND, group)
            at, revision = (document.at, document.revision + 1) if document else (self._now(), 1)
            if self._store.documents.write(Document(KIND, group, at, body, revision)):
                return

    def _now(self) -> datetime:
        return from_ms(to_ms(self._clock()))

    @property
    def _store(self) -> Store:
        return self._context.store_for("groups")


def times_of(letters: Letters, where: Filter, now: datetime, steps: int) -> list[datetime]:
    """Return the times that begin and end so many steps: from `since`, or the oldest letter, until now."""
    until = where.until_now(now).until or now
    oldest = letters.list(where, limit=1, cursor=None, oldest_first=True).letters
    since = where.since or (oldest[0].discarded_at if oldest else until - timedelta(days=1))
    step = max((until - since) / steps, timedelta(milliseconds=1))
    return [since + n * step for n in range(steps + 1)]


def timeline(letters: Letters, where: Filter, now: datetime, steps: int) -> Timeline:
    """Count the deaths in so many steps of time; raises ValueError for steps outside 1 to 1000."""
    if not (isinstance(steps, int) and 1 <= steps <= MAX_PAGE):
        raise ValueError(f"steps: {steps!r} must be between 1 and {MAX_PAGE}")
    times = times_of(letters, where, now, steps)
    counts = (letters.count(replace(where, since=a, until=b)) for a, b in pairwise(times))
    return Timeline(times[0], times[1] - times[0], tuple(counts))


def _mute_of(document: Document) -> tuple[str, Mute | None]:
    Filter(group=document.id)  # another version may have other fingerprints
    muted = document.body["muted"]
    return document.id, None if muted is None else _MUTE.validate_python(muted)
