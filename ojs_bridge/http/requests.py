"""The models of requests: pydantic reads queries and bodies by them, and the OpenAPI document shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import Self

from .. import store
from ..engine import runs
from ..messages import OWN_META
from ..operations.groups import GroupOrder
from ..rules.faults import State
from ..rules.job import parse_time
from ..rules.notations import DURATION, parse_duration
from ..rules.policy import RetryPolicy

#: The most entries that are read to be skipped.
MAX_OFFSET = 10_000
#: Nothing has died outside of these times, and arithmetic with times beyond them overflows.
EARLIEST = datetime(1970, 1, 1, tzinfo=timezone.utc)
LATEST = datetime(9000, 1, 1, tzinfo=timezone.utc)
_STATE = "|".join(get_args(State))
#: States of groups with commas between them.
_STATES = f"^({_STATE})(,({_STATE}))*$"
_POLICY = RetryPolicy.json_schema()
_AGE = re.compile(r"^([0-9]{1,6})([wdhms])$")
_UNITS = {"w": "weeks", "d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def _time(given: object) -> datetime:
    try:
        at = given if isinstance(given, datetime) else parse_time(str(given).upper())
        return min(max(at, EARLIEST), LATEST)
    except ValueError:
        raise ValueError("must be a time such as 2026-11-21T10:00:00Z") from None


def _age(given: object) -> datetime | timedelta:
    text = str(given)
    with suppress(ValueError, OverflowError):
        if short := _AGE.fullmatch(text):
            return timedelta(**{_UNITS[short[2]]: int(short[1])})
        return parse_duration(text) if text.startswith("P") else parse_time(text.upper())
    raise ValueError("must be an age such as 7d, 24h or P7D, or a time such as 2026-11-21T10:00:00Z")


def _period(given: object) -> timedelta:
    if isinstance(given, str) and (length := parse_duration(given)):
        return length
    raise ValueError("must be an ISO 8601 duration that is not zero, such as PT1M")


def _whole(given: object) -> object:
    """Return a number such as 5.0, which JSON Schema takes for an integer, as one."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _finite(value: object) -> object:
    json.dumps(value, allow_nan=False)
    return value


Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=1000)]
Pattern: TypeAlias = Annotated[Word, Field(description="A name, or a pattern such as billing.*")]
Time: TypeAlias = Annotated[
    datetime, BeforeValidator(_time), WithJsonSchema({"type": "string", "format": "date-time"})
]
#: An age, or a time.
Age: TypeAlias = Annotated[
    datetime | timedelta,
    BeforeValidator(_age),
    WithJsonSchema(
        {
            "description": "An age such as 7d or P7D, or a time",
            "type": "string",
            "anyOf": [{"pattern": _AGE.pattern}, {"pattern": DURATION}, {"format": "date-time"}],
        }
    ),
]
Reason: TypeAlias = Annotated[str, Field(max_length=1000, description="Why, for the audit")]
#: A value that JSON has a form for: no NaN, and no infinity, which pydantic reads from 1e999.
Finite: TypeAlias = Annotated[Any, AfterValidator(_finite)]
Meta: TypeAlias = Annotated[
    dict[str, Finite],
    Field(description="Merged over the job's own headers or options"),
    Field(json_schema_extra={"propertyNames": {"not": {"enum": sorted(OWN_META)}}}),
]
Policy: TypeAlias = Annotated[
    dict[str, Finite],
    Field(json_schema_extra={"properties": _POLICY["properties"], "additionalProperties": False}),
]
#: The word `true` in a query: a deletion keeps nothing for an undo.
Forever: TypeAlias = Literal["true"] | None
#: The spec allows 100 entries at most (http 17.1).
Limit: TypeAlias = Annotated[int, Field(ge=1, le=100, description="The most entries of the page")]
Rate: TypeAlias = Annotated[float, Field(ge=0.1, le=10_000, description="Jobs a second")]
_NEXT = "The next_cursor of the page before"
Cursor: TypeAlias = Annotated[Word, Field(pattern="^[0-9]{1,15}:", description=_NEXT)]


class Asked(BaseModel):
    """The fields of a query, or of a JSON object in which null stands for the absence of a field.

    Another field is refused: a filter that is misspelt must not widen a replay or a purge.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Change(Asked):
    """The body of a request that changes something."""

    reason: Reason | None = None


class RatesQuery(Asked):
    """A choice of runs, and of a time: the last day, unless another is named."""

    queue: Word | None = None
    type: Pattern | None = None
    since: Time | None = None
    until: Time | None = None


class Choice(RatesQuery):
    """A choice of dead letters or of waiting jobs that the store can count."""

    error_type: Pattern | None = None

    def where(self) -> store.Filter:
        """Return the filter as the library takes it."""
        fields: Any = {name: getattr(self, name, None) for name in AnyFilter.model_fields}
        return store.Filter(**fields)


class Counted(Choice):
    """A choice of dead letters that the store can count: a text it cannot."""

    group: Annotated[str, Field(pattern="^[0-9a-f]{16}$", description="A fingerprint")] | None = None


class Filter(Counted):
    """A choice of dead letters."""

    text: Word | None = None


class AnyFilter(Filter):
    """A choice of dead letters, or of waiting jobs."""

    kind: store.Kind | None = None


class Paging(Asked):
    """The choice of a page: a page with an offset reads all entries before it."""

    limit: Limit = 50
    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET, description="The entries to skip; not with a text")] = 0
    cursor: Cursor | None = None


class Limited(Asked):
    """The choice of the newest entries."""

    limit: Limit = 50


class DiedQuery(Limited):
    """A page of letters of jobs that a replay has sent."""

    cursor: Cursor | None = None


class LettersQuery(Filter, Paging):
    """A page of dead letters."""


class Numbered(Asked):
    """The choice of a page by its number."""

    page: Annotated[int, Field(ge=1)] = 1
    per_page: Limit = 20

    @model_validator(mode="after")
    def _is_near(self) -> Self:
        if self.offset > MAX_OFFSET:
            raise ValueError(f"page: {self.page}: lies beyond {MAX_OFFSET} entries; choose fewer by a filter")
        return self

    @property
    def offset(self) -> int:
        """The number of entries before the page."""
        return (self.page - 1) * self.per_page


class AdminQuery(Numbered, Counted):
    """A numbered page of dead letters."""

    state: Literal["discarded"] | None = None


#: The specification's words for the states that the store knows, and for the others.
Known: TypeAlias = Literal["scheduled", "retryable", "pending", "discarded"]
Unknown: TypeAlias = Literal["available", "active", "completed", "cancelled"]


class JobsQuery(Numbered):
    """A numbered page of jobs; the order is that of the store."""

    queue: Word | None = None
    type: Pattern | None = None
    state: Literal[Known, Unknown] | None = None
    sort: Literal["scheduled_at"] | None = None
    order: Literal["asc"] | None = None


class GroupsQuery(Counted):
    """A page of groups of dead letters: those last seen first, the largest, or the worst."""

    order: GroupOrder = "last"
    muted: Annotated[bool, Field(description="Whether muted groups are listed, too")] = False
    state: Annotated[str, Field(pattern=_STATES, description="With commas between several")] | None = None
    limit: Limit = 50
    cursor: Annotated[str, Field(pattern="^[0-9]{1,5}$", description=_NEXT)] | None = None

    @property
    def states(self) -> Sequence[State]:
        """The states that are asked for; none for all."""
        return cast(Sequence[State], self.state.split(",") if self.state else ())


class WaitingQuery(Choice, Paging):
    """A page of waiting jobs; `since` and `until` are times of the parking."""

    text: Word | None = None
    kind: store.Kind | None = None


class DueQuery(Asked):
    """A choice of what falls due, in an hour, a day or a week."""

    queue: Word | None = None
    type: Pattern | None = None
    kind: Literal["retry", "scheduled"] | None = None
    within: Literal["PT1H", "P1D", "P7D"] = "PT1H"


class Move(Change):
    """Another time for a job that waits."""

    at: Time


class Since(Limited):
    """The choice of the newest entries since a time."""

    since: Time | None = None


class MuteBody(Change):
    """A mute of a group, for seven days or until a time."""

    until: Time | None = None


class ResolveBody(Change):
    """A resolution of a group, in a mark if one is named."""

    mark: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class PauseQueue(Change):
    """A pause of a queue, whose name is in the path; without `until` it has no end of its own."""

    until: Time | None = None


class Pause(PauseQueue):
    """A pause of the jobs that have all that is named; `error_type` is that of the last error."""

    type: Pattern | None = None
    queue: Word | None = None
    error_type: Pattern | None = None
    dependency: Word | None = None


class Resume(Change):
    """The end of a pause, whose jobs go on at once, or so many a second."""

    rate: Rate | None = None


class RateBody(Asked):
    """A rate: so many jobs begin in a period, evenly spaced."""

    limit: Annotated[int, Field(ge=1, le=1_000_000_000), BeforeValidator(_whole)]
    period: Annotated[
        timedelta, BeforeValidator(_period), WithJsonSchema({"type": "string", "pattern": DURATION})
    ]


class LimitBody(Change):
    """A limit in the place of a dependency's own; what it leaves out stays as it is.

    Rates and throttles are one thing here: evenly spaced. Of both the slower one counts.
    """

    concurrency: Annotated[int, Field(ge=0, le=1_000_000_000), BeforeValidator(_whole)] | None = None
    rate: RateBody | None = None
    throttle: RateBody | None = None
    expires_at: Time | None = None

    @property
    def per_second(self) -> float | None:
        """The rate in jobs a second."""
        rates = (one.limit / one.period.total_seconds() for one in (self.rate, self.throttle) if one)
        return min(rates, default=None)


class MarkBody(Change):
    """A new mark."""

    text: Word
    at: Time | None = None


class AuditQuery(Since):
    """A page of the audit."""

    until: Time | None = None
    who: Pattern | None = None
    action: Pattern | None = None
    cursor: Cursor | None = None


class DeleteQuery(Asked):
    """How a letter is deleted: `forever`, with no undo, or as an undo within an hour takes it back."""

    forever: Forever = None


class PurgeQuery(Filter):
    """A purge, by a query; the word `true` is the consent to it."""

    model_config = ConfigDict(json_schema_extra={"required": ["confirm"]})

    confirm: Literal["true"] | None = None
    forever: Forever = None


class Purge(Change):
    """A purge, by a body; without consent its matches are counted, and it is refused."""

    # The document wants the consent; the server says what happens without it.
    model_config = ConfigDict(json_schema_extra={"required": ["confirm"]})

    filter: Filter | None = None
    confirm: Annotated[bool, WithJsonSchema({"const": True})] = False

    def where(self) -> store.Filter:
        """Return the filter as the library takes it; without one, all."""
        return (self.filter or Filter()).where()


class PurgeBody(Purge):
    """A purge, by a body; `forever` keeps nothing for an undo."""

    forever: bool = False


class OlderQuery(Asked):
    """A purge by age, by a query; the word `true` is the consent to it."""

    older_than: Age | None = None
    confirm: Literal["true"] | None = None
    forever: Forever = None


class Older(Change):
    """A purge by age, by a body."""

    older_than: Age | None = None
    confirm: bool = False
    forever: bool = False


class Replay(Purge):
    """A replay of many; its rate has a lower limit, because a very slow one looks as if it hung."""

    rate: Rate | None = None


class Override(Asked):
    """The changes of a replay."""

    queue: Word | None = None
    args: list[Finite] | None = None
    kwargs: dict[str, Finite] | None = None
    meta: Meta | None = None
    retry: Policy | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        self.changes()
        return self

    def changes(self) -> runs.Override:
        """Return the changes as the library takes them."""
        return runs.Override(**dict(self))


class ReplayOne(Change):
    """A replay of a single dead letter."""

    override: Override | None = None
