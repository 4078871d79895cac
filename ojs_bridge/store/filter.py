"""The one filter: a choice of dead letters or of parked jobs, from the doors down to the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args

from typing_extensions import Self, TypedDict

from ..rules.fingerprint import is_fingerprint
from ..rules.job import format_time, parse_time
from ..rules.notations import check_pattern

#: Why a job waits in the store: for its next attempt, because its user has delayed it, or in a hold.
Kind: TypeAlias = Literal["retry", "scheduled", "held"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_TIMES = ("since", "until")


class Fields(TypedDict, total=False):
    """The fields of a Filter, for calls that take them as keyword arguments."""

    queue: str | None
    type: str | None
    error_type: str | None
    since: datetime | None
    until: datetime | None
    text: str | None
    group: str | None
    kind: Kind | None


@dataclass(frozen=True, slots=True)
class Filter:
    """A choice of dead letters or of parked jobs (DLQ-006); without any field, of all.

    A `queue` is matched whole. `type` and `error_type`, the type of the last error, are patterns: `*` stands
    for any characters. `since` is included and `until` is not: they are times of a letter's death, or of a
    job's parking. `but_queues` leaves some queues out. A `group` is a fingerprint; a parked job is in none.
    A `kind` says why a job is parked; a letter has none. A `text` is in the arguments or the error messages,
    in lower or upper case.

    A store does not look at the text, and of parked jobs it looks at the queue, the type and the kind alone.
    The operations look at the rest. Raises ValueError that names the field, the value and the rule.
    """

    queue: str | None = None
    type: str | None = None
    error_type: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    but_queues: frozenset[str] = frozenset()
    group: str | None = None
    text: str | None = None
    kind: Kind | None = None

    def __post_init__(self) -> None:
        for name in ("queue", "text"):
            text = getattr(self, name)
            if text is not None and not (text and isinstance(text, str)):
                raise ValueError(f"{name}: {text!r} must be a text with at least one character")
        check_pattern("type", self.type)
        check_pattern("error_type", self.error_type)
        for name in _TIMES:
            at = getattr(self, name)
            if at is not None and not (isinstance(at, datetime) and at.tzinfo):
                raise ValueError(f"{name}: {at!r} must be a time with a zone")
        if self.group is not None and not is_fingerprint(self.group):
            raise ValueError(f"group: {self.group!r} must be a fingerprint, 16 hexadecimal digits")
        if self.kind not in (None, *KINDS):
            raise ValueError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")

    @property
    def is_plain(self) -> bool:
        """Whether no field but the queue, the type and the kind is set."""
        return replace(self, queue=None, type=None, kind=None) == EVERYTHING

    def until_now(self, now: datetime) -> Self:
        """Return the filter without what comes after now."""
        soon = now + timedelta(milliseconds=1)
        return replace(self, until=soon if self.until is None else min(self.until, soon))

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, with times as texts."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        times = {name: format_time(fields[name]) for name in _TIMES if fields[name]}
        return {
            name: value
            for name, value in {**fields, **times, "but_queues": sorted(self.but_queues)}.items()
            if value
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Return the filter that `to_json` has written; raises ValueError, also for a field it does not know.

        A field of a newer version must not be left out: the choice would be wider.
        """
        unknown = sorted(fields.keys() - {*cls.__slots__})
        if unknown:
            raise ValueError(
                f"{unknown[0]}: {fields[unknown[0]]!r}: a filter of this version has no such field"
            )
        times = {name: parse_time(fields[name]) for name in _TIMES if fields.get(name)}
        return cls(**{**fields, **times, "but_queues": frozenset(fields.get("but_queues", ()))})


EVERYTHING = Filter()
