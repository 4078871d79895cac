"""Groups of errors, which are alike: their letters and retries, their states, what operators say of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from heapq import merge
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.faults import faults_of
from ..engine.redaction import HIDDEN
from ..errors import NotFound
from ..rules.faults import (
    FRESH,
    LIVE,
    Facts,
    Fault,
    State,
    badness,
    fresh_since,
    per_minute,
    state_of,
)
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
    index_text,
    matches,
    next_of,
    readable,
    to_ms,
)
from .audit import MAX_TEXT, Actor, Audit, Marks
from .group import ErrorGroup, Mute, Resolution
from .letters import MAX_PAGE, every_page, only_id, shown, without_text

T = TypeVar("T")
#: The orders of groups: those of a store, and the worst first, as `badness` has it.
GroupOrder: TypeAlias = Literal[Order, "worst"]
#: A list: in the class of the groups this is a method's name.
Found: TypeAlias = list

KIND, RESOLVED = "mute", "resolved"
#: How long a mute lasts by default.
LASTS = timedelta(days=7)
#: The most groups, and steps of time, that one statement names; and the most groups before a page.
MOST, MOST_SKIPPED = 200, 100_000
#: The most groups that are looked at for those of a state, and the most groups without letters in a list.
WALKED, MOST_WITHOUT = 1_000, 100
#: The beginning of a fingerprint that stands for all of it.
_BEGINNING = re.compile("[0-9a-f]{4,15}")
#: The newest marks that are looked at for one that is not in the future.
_MARKS = 10


class _Known(NamedTuple):
    """What is known of groups beside their letters, at a time; `fresh` is since when a group is new."""

    now: datetime
    fresh: datetime
    mutes: Mapping[str, Mute]
    resolutions: Mapping[str, Resolution]
    faults: Mapping[str, Fault]


class _Asked(NamedTuple):
    """What is asked for: groups of a filter, their order, and the times between which deaths are counted."""

    where: Filter
    order: Order
    but: Collection[str]
    times: Sequence[datetime]

    def page(self, limit: int, offset: int) -> GroupPage:
        return GroupPage(self.order, self.but, self.times, limit, offset)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The number of deaths in each step of time, from `since` on."""

    since: datetime
    step: timedelta
    counts: tuple[int, ...]


class Groups:
    """Groups of errors of one bridge. Its methods raise StoreError; without a store ConfigurationError.

    To replay, delete, count or export the letters of a group, give its fingerprint as the filter's `group`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._clock = context.clock
        self._audit, self._marks = Audit(context), Marks(context)

    def list(
        self,
        where: Filter = EVERYTHING,
        *,
        order: GroupOrder = "last",
        state: State | Collection[State] | None = None,
        muted: bool = False,
        limit: int = 50,
        offset: int = 0,
        steps: int = 24,
        **fields: Unpack[Fields],
    ) -> tuple[ErrorGroup, ...]:
        """Return the groups of the letters of a filter: those seen last, the largest, or the worst first.

        The worst are those of which the most jobs die now, then those that are new or have come back, then
        those that grow, then the largest.
        Errors whose jobs still retry, or have failed within the last hour, are among them without a letter.
        Muted groups are left out unless `muted`, or asked for by a `state`, or by several of them. For a
        state the thousand groups that were seen last are looked at. On SQL, `types` and `queues` are those of
        a group's newest hundred letters at least. Raises ValueError.
        """
        _check(order=order, limit=limit, offset=offset, steps=steps)
        states = _states(state)
        where, store = without_text(replace(where, **fields), "groups"), self._store
        known = self._known(store)
        but = () if muted or "muted" in states else known.mutes.keys()
        times = times_of(store.letters, where, known.now, steps)
        asked = _Asked(where, "count" if order == "worst" else order, but, times)
        if not states and order != "worst":
            return self._seen_page(asked, known, limit, offset)
        found = self._of_states(states, asked._replace(order="last"), known)
        if order == "count":
            found.sort(key=_size, reverse=True)
        if order == "worst":
            found.sort(key=lambda one: badness(one.per_minute, one.state, _size(one)), reverse=True)
        page = tuple(found[offset : offset + limit])
        if states or len(page) == limit:
            return page
        # The others are as bad as they are large.
        asked = asked._replace(but={*but, *(one.group.fingerprint for one in found)})
        return page + self._seen_page(asked, known, limit - len(page), max(0, offset - len(found)))

    def get(self, group: str) -> ErrorGroup:
        """Return a group, muted or not; raises NotFound, and ValueError for a text that is no fingerprint."""
        found = self.list(group=group, muted=True, limit=1)
        if not found:
            raise NotFound(f"there is no group {group!r}")
        return found[0]

    def id_of(self, text: str) -> str:
        """Return the fingerprint that is this text, or else the only one of a group that begins with it.

        Four digits are enough. What cannot begin a fingerprint is returned as it is. Raises ValueError that
        names the groups, where there are several, and NotFound where there is none.
        """
        if not _BEGINNING.fullmatch(text):
            return text
        found = only_id(text, self._beginning, "group")
        if found == text:
            raise NotFound(f"there is no group whose fingerprint begins with {text!r}")
        return found

    def _beginning(self, text: str, most: int) -> Sequence[str]:
        """Return so many fingerprints at most, of letters, of jobs that retry, and of what operators said."""
        store = self._store
        known = {*store.letters.group_sizes(EVERYTHING), *faults_of(store.documents)}
        known |= {*self.mutes(), *self.resolutions()}
        return sorted(name for name in known if name.startswith(text))[:most]

    def _of_states(self, states: Collection[State], asked: _Asked, known: _Known) -> Found[ErrorGroup]:
        """Return the groups of some states, the last seen first; without a state those that live or die."""
        found: Found[ErrorGroup] = []
        for offset in range(0, WALKED, MOST):
            page = self._seen_page(asked, known, MOST, offset)
            found += [one for one in page if one.state in (states or LIVE) or (one.per_minute and not states)]
            is_old = bool(page) and page[-1].group.last_at < known.fresh
            if len(page) < MOST or (is_old and {*states} <= {*LIVE}):
                break
        return found

    def _seen_page(self, asked: _Asked, known: _Known, limit: int, offset: int) -> tuple[ErrorGroup, ...]:
        return tuple(self._seen(group, asked, known) for group in self._page(asked, known, limit, offset))

    def _page(self, asked: _Asked, known: _Known, limit: int, offset: int) -> Sequence[Group]:
        """Return a page of groups with letters, and of those without any in their places among them."""
        without = self._without_letters(asked, known)

        def rank(group: Group) -> Any:
            size = group.count or known.faults[group.fingerprint].retrying(known.now)
            return -size if asked.order == "count" else -group.last_at.timestamp()

        without.sort(key=rank)
        # So many of the others come before the page at most.
        start = max(0, offset - len(without))
        read = asked.page(limit + len(without), start)
        letters = self._store.letters.groups(asked.where, read)
        before = sum(rank(one) < rank(letters[0]) for one in without) if start and letters else 0
        both = merge(letters, without[before:], key=rank)
        return [*islice(both, offset - start - before, offset - start - before + limit)]

    def _without_letters(self, asked: _Asked, known: _Known) -> Found[Group]:
        """Return the groups of errors without a letter of the filter, whose jobs retry or failed lately."""
        live = (
            fault
            for fault in known.faults.values()
            if (fault.last_at > known.now - FRESH or fault.retrying(known.now))
            and fault.fingerprint not in asked.but
            and _is_among(fault, asked.where)
        )
        letters, zeros = self._store.letters, (0,) * (len(asked.times) - 1)
        return [
            Group(one.fingerprint, 0, one.first_at, one.last_at, (one.type,), one.queues, zeros, None)
            for one in islice(live, MOST_WITHOUT)
            if not letters.list(replace(asked.where, group=one.fingerprint), limit=1, cursor=None).letters
        ]

    def _seen(self, group: Group, asked: _Asked, known: _Known) -> ErrorGroup:
        """Return a group with its state."""
        name, now = group.fingerprint, known.now
        mute, fault = known.mutes.get(name), known.faults.get(name)
        if fault and self._context.redactor:
            # Its message may quote an argument.
            fault = replace(fault, message=HIDDEN)
        resolution = known.resolutions.get(name)
        deaths = fault.deaths(now) if fault else ()
        facts = Facts(
            group.first_at,
            fault.back_at if fault else None,
            deaths,
            mute.at if mute else None,
            resolution.at if resolution else None,
            self._died_again(name, resolution.at, fault) if resolution else None,
        )
        state, since = state_of(facts, now, known.fresh)
        rate, lately = per_minute(deaths, now), now - timedelta(minutes=1)
        if group.count and group.last_at > lately:
            # Workers count deaths some seconds later.
            rate = max(rate, self._store.letters.count(Filter(group=name, since=lately)))
        sample = group.sample and shown(group.sample, self._context.redactor)
        return ErrorGroup(
            replace(group, sample=sample),
            asked.times[0],
            asked.times[1] - asked.times[0],
            mute,
            state,
            since,
            resolution if state in ("resolved", "came_back") else None,
            fault,
            fault.retrying(now) if fault else 0,
            rate,
        )

    def _died_again(self, group: str, at: datetime, fault: Fault | None) -> datetime | None:
        """Return the first death of a group after a time, as far as it is known."""
        after = Filter(group=group, since=at + timedelta(milliseconds=1))
        letters = self._store.letters.list(after, limit=1, cursor=None, oldest_first=True).letters
        died = [letter.discarded_at for letter in letters]
        if fault and fault.died_at and fault.died_at > at:
            died.append(fault.died_at)
        return min(died, default=None)

    def _known(self, store: Store) -> _Known:
        now = self._clock()
        marks = (mark.at for mark in self._marks.list(limit=_MARKS) if mark.at <= now)
        fresh = fresh_since(now, max(marks, default=None))
        return _Known(now, fresh, self.mutes(), self.resolutions(), faults_of(store.documents))

    def mutes(self) -> Mapping[str, Mute]:
        """Return the mutes of this moment by their fingerprints.

        A mute is lifted when more letters of its group have died since than it had.
        """
        now = self._clock()
        return {
            name: mute
            for name, mute in self._said(KIND, "muted", Mute.of)
            if mute.until > now and self._store.letters.count(Filter(group=name, since=mute.at)) <= mute.count
        }

    def resolutions(self) -> Mapping[str, Resolution]:
        """Return the resolutions by their fingerprints; a group may have come back since."""
        return dict(self._said(RESOLVED, "resolved", Resolution.of))

    def _said(self, kind: str, name: str, read: Callable[[Any], T]) -> Iterator[tuple[str, T]]:
        """Yield what operators say of groups; what another version wrote, and cannot be read, is none."""

        def said(document: Document) -> tuple[str, T | None]:
            Filter(group=document.id)  # another version may have other fingerprints
            body = document.body[name]
            return document.id, None if body is None else read(body)

        for page in every_page(lambda cursor: self._store.documents.list(kind, limit=500, cursor=cursor)):
            yield from ((group, one) for group, one in readable(page.documents, said) if one is not None)

    def mute(self, group: str, *, until: datetime | None = None) -> Mute:
        """Leave a group out of the list, for seven days or until a time; its letters stay.

        The mute is lifted when the group grows by more letters than it has now. Raises ValueError, and
        NotFound for a group that is not known.
        """
        count = self._count(group, until)
        now = self._now()
        mute = Mute(Actor.current().name, now, until or now + LASTS, count)
        with self._audit.recording("group.mute", group=group, until=mute.to_ojs()["until"]):
            self._write(KIND, group, {"muted": mute.to_ojs()})
        return mute

    def unmute(self, group: str) -> None:
        """Take a mute back; a group that is not muted stays as it is. Raises ValueError."""
        where = Filter(group=group)
        if where.group in self.mutes():
            with self._audit.recording("group.unmute", group=group):
                self._write(KIND, group, {"muted": None})

    def resolve(self, group: str, mark: str | None = None) -> Resolution:
        """Say that the fault of a group is mended, by a mark such as `v42`; its letters stay.

        The group comes back with its next death. Raises ValueError, and NotFound for a group that is not
        known.
        """
        if mark is not None and not 0 < len(mark.strip()) <= MAX_TEXT:
            raise ValueError(f"mark: {mark!r:.100} must have 1 to {MAX_TEXT} characters")
        self._count(group)
        made = Resolution(Actor.current().name, self._now(), mark and mark.strip())
        with self._audit.recording("group.resolve", group=group, mark=made.mark):
            self._write(RESOLVED, group, {"resolved": made.to_ojs()})
        return made

    def unresolve(self, group: str) -> None:
        """Take a resolution back; a group that is not resolved stays as it is. Raises ValueError."""
        where = Filter(group=group)
        if where.group in self.resolutions():
            with self._audit.recording("group.unresolve", group=group):
                self._write(RESOLVED, group, {"resolved": None})

    def _count(self, group: str, until: datetime | None = None) -> int:
        """Return the number of a group's letters; raises NotFound for a group that is not known."""
        where = Filter(group=group, until=until)
        count = self._store.letters.count(replace(where, until=None))
        if not count and group not in faults_of(self._store.documents):
            raise NotFound(f"there is no group {group!r}")
        return count

    def _write(self, kind: str, group: str, body: Mapping[str, Any]) -> None:
        while True:
            known = self._store.documents.get(kind, group)
            at = known.at if known else self._now()
            if self._store.documents.write(next_of(known, kind, group, at, body)):
                return

    def _now(self) -> datetime:
        return from_ms(to_ms(self._clock()))

    @property
    def _store(self) -> Store:
        return self._context.store_for("groups")


def _check(*, order: GroupOrder, **numbers: int) -> None:
    if order not in get_args(GroupOrder):
        raise ValueError(f"order: {order!r} must be one of {', '.join(get_args(GroupOrder))}")
    for name, value in numbers.items():
        least, most = (0, MOST_SKIPPED) if name == "offset" else (1, MOST)
        if not (isinstance(value, int) and least <= value <= most):
            raise ValueError(f"{name}: {value!r} must be between {least} and {most}")


def _size(one: ErrorGroup) -> int:
    return one.group.count or one.retrying


def _states(state: State | Collection[State] | None) -> Collection[State]:
    """Return the states that are asked for, none for all; raises ValueError."""
    states: Collection[Any] = (state,) if isinstance(state, str) else state or ()
    for one in states:
        if one not in get_args(State):
            raise ValueError(f"state: {one!r} must be one of {', '.join(get_args(State))}")
    return states


def _is_among(fault: Fault, where: Filter) -> bool:
    """Return whether a filter of letters would choose the failures of a fault."""
    queue = where.queue and index_text(where.queue)
    return (
        where.group in (None, fault.fingerprint)
        and (queue is None or queue in map(index_text, fault.queues))
        and matches(index_text(fault.type), where.type)
        and matches(index_text(fault.error_type), where.error_type)
        and (where.since is None or fault.last_at >= where.since)
        and (where.until is None or fault.last_at < where.until)
    )


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
