"""A group of errors as an operator sees it, and what operators say of one: a mute, a resolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from ..rules.faults import LIVE, Fault, State
from ..rules.fingerprint import frame_of, pattern_of
from ..rules.job import format_time, parse_time
from ..store import Group


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

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Mute:
        """Return the mute that a document has; raises KeyError, TypeError and ValueError."""
        return cls(str(kept["by"]), parse_time(kept["at"]), parse_time(kept["until"]), int(kept["count"]))


@dataclass(frozen=True, slots=True)
class Resolution:
    """The word of a person at a time that a fault is mended, by a `mark` such as `v42` if one is named."""

    by: str
    at: datetime
    mark: str | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the resolution in JSON."""
        return {"by": self.by, "at": format_time(self.at), "mark": self.mark}

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Resolution:
        """Return the resolution that a document has; raises KeyError, TypeError and ValueError."""
        return cls(str(kept["by"]), parse_time(kept["at"]), kept.get("mark"))


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """A group as an operator sees it: its sample is redacted. `pattern` is what its messages have in common.

    The counts of `deaths` begin at `since`, and each is that of a `step` of time. A group of errors whose
    jobs still retry may have no letter, and no sample: then the `fault` has what is known of it. `per_minute`
    is the number of deaths a minute now, `retrying` that of the jobs that failed with it and retry.
    """

    group: Group
    since: datetime
    step: timedelta
    mute: Mute | None = None
    state: State = "steady"
    state_since: datetime | None = None
    resolution: Resolution | None = None
    fault: Fault | None = None
    retrying: int = 0
    per_minute: float = 0.0

    @property
    def is_live(self) -> bool:
        """Whether it is new, has come back or grows, and not all of it was replayed or deleted since."""
        return self.state in LIVE and bool(self.group.count or self.retrying or self.per_minute)

    @property
    def error_type(self) -> str:
        """The error type of its failures."""
        sample = self.group.sample
        return sample.error_type if sample else self.fault.error_type if self.fault else ""

    @property
    def message(self) -> str:
        """The message of the newest letter's last error."""
        if self.group.sample is None:
            return self.fault.message if self.fault else ""
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
        if sample is None:
            return self.fault.frame if self.fault else ""
        return frame_of(sample.type, sample.backtrace, sample.framework)

    def to_ojs(self) -> dict[str, Any]:
        """Return the group in JSON."""
        group = self.group
        return {
            "fingerprint": group.fingerprint,
            "state": self.state,
            "state_since": self.state_since and format_time(self.state_since),
            "error_type": self.error_type,
            "pattern": self.pattern,
            "frame": self.frame or None,
            "message": self.message,
            "sample_id": group.sample.id if group.sample else None,
            "count": group.count,
            "retrying": self.retrying,
            "per_minute": self.per_minute,
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
            "resolved": self.resolution.to_ojs() if self.resolution else None,
        }
