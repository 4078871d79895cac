"""Holds: why jobs may not begin now. A held job uses no attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from .breaker import LONGEST
from .decision import SnoozeUntil, later
from .job import Job, format_time, parse_time
from .notations import check_pattern, matches, spoken
from .rates import APART

#: After how long a held job asks again, whatever has become of its hold.
ASK_AGAIN = timedelta(minutes=10)
#: After how long somebody may have forgotten a hold that is still on.
LONG = timedelta(days=1)
#: The most characters of the words of an operator.
MAX_WHY = 1000


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold of the jobs that have its type, its queue, and the type of the last error: each where it is set.

    `type` and `error_type` are patterns. `reason` is a part of a sentence: "held by {reason}". `by` is the
    operator's name, and `why` what the operator has said. It ends by itself at `until`. It may have ended at
    `ended_at`; then what it held goes on, so many jobs a second as `rate` says. Raises ValueError that names
    the field, the value and the rule.

    A hold of a `dependency` is about the jobs that need it: those of the types `jobs`, patterns, and those of
    which a process knows it. From `probe_at` on it lets so many `probes` through.

    With a `limit_rate` or a `limit_concurrency` it keeps no job from its begin: these count in the place of
    the dependency's own. With a concurrency of 0 it holds them all.
    """

    id: str
    reason: str
    since: datetime
    by: str = ""
    why: str = ""
    type: str | None = None
    queue: str | None = None
    error_type: str | None = None
    until: datetime | None = None
    ended_at: datetime | None = None
    rate: float | None = None
    dependency: str | None = None
    jobs: tuple[str, ...] = ()
    probe_at: datetime | None = None
    probes: int = 0
    limit_rate: str | float | None = None
    limit_concurrency: int | None = None

    def __post_init__(self) -> None:
        check_pattern("type", self.type)
        check_pattern("error_type", self.error_type)
        for field, name in (("queue", self.queue), ("dependency", self.dependency)):
            # Nobody is to hold everything with the empty value of a variable.
            if name is not None and not (name and isinstance(name, str)):
                raise ValueError(f"{field}: {name!r:.100} must be the name of a {field}")
        if len(self.why) > MAX_WHY:
            raise ValueError(f"reason: {len(self.why):,} characters; there may be {MAX_WHY:,} at most")

    @property
    def is_limit(self) -> bool:
        """Whether it limits jobs, and holds none."""
        return bool(self.limit_concurrency) or (
            self.limit_concurrency is None and self.limit_rate is not None
        )

    @property
    def of(self) -> str:
        """The jobs that it is about, in words."""
        named = [f"of {self.type}"] if self.type else []
        named += [f"of the queue {self.queue}"] if self.queue else []
        named += [f"of the dependency {self.dependency}"] if self.dependency else []
        named += [f"whose last error is {self.error_type}"] if self.error_type else []
        return " ".join(("jobs", *named))

    def is_on(self, now: datetime) -> bool:
        """Return whether it holds jobs now."""
        return self.ended_at is None and (self.until is None or now < self.until)

    def still_on(self, now: datetime) -> str:
        """Return that a hold is still on, and for how long, if that is more than a day; else ""."""
        age = now - self.since
        return f"still on after {spoken(age.total_seconds())}" if self.is_on(now) and age > LONG else ""

    def covers(self, type_: str, queue: str, depends: Collection[str] = ()) -> bool:
        """Return whether it holds the jobs of a type and a queue, some of them at the least.

        `depends` names the dependencies that the type is known to have.
        """
        if self.is_limit:
            return False
        is_of = self.dependency is None or self.dependency in depends
        is_of = is_of or any(matches(type_, pattern) for pattern in self.jobs)
        return is_of and self.queue in (None, queue) and (self.type is None or matches(type_, self.type))

    @property
    def says(self) -> str:
        """Why a job waits that it holds."""
        return f"held by {self.reason}"

    def lets_probe(self, now: datetime) -> bool:
        """Return whether it may let a probe through now."""
        at = self.probe_at
        # A later time is that of a wrong clock.
        return self.is_on(now) and at is not None and not now < at < now + LONGEST + APART

    def holds(self, job: Job) -> bool:
        """Return whether it is about a job, of whose type and queue it is."""
        if self.error_type is None:
            return True
        last = str(job.errors[-1].get("type")) if job.errors else ""
        return bool(last) and matches(last, self.error_type)

    def decision(self, job: Job, now: datetime, most: timedelta = ASK_AGAIN) -> SnoozeUntil:
        """Return until when a job waits: not beyond its expiry, at which its framework drops it.

        It waits for `most` at most. Where a rate says how jobs go on, they do not all go at the end.
        """
        until = None if self.rate and most == ASK_AGAIN else self.until
        ends = [now + most, *(at for at in (until, job.expires) if at)]
        at = later(max(min(ends), now), 0)
        return SnoozeUntil(at, (at - now).total_seconds(), self.says, hold=self.id)

    def to_ojs(self) -> dict[str, Any]:
        """Return the fields, with times as texts."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: format_time(at) if isinstance(at, datetime) else at for name, at in fields.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, with times as texts."""
        return {name: value for name, value in self.to_ojs().items() if value not in (None, "", ())}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hold:
        """Return the hold that `to_json` has written; a newer version may have written more fields.

        Raises ValueError and TypeError for what cannot be read.
        """
        known = {name: value for name, value in fields.items() if name in cls.__slots__}
        for name in {"since", "until", "ended_at", "probe_at"} & known.keys():
            known[name] = parse_time(known[name])
        known["jobs"] = tuple(known.get("jobs", ()))
        return cls(**_FIELDS.validate_python(known, strict=True))


#: Checks the fields of a hold that was written: a dataclass takes any value.
_FIELDS = TypeAdapter(TypedDict("HoldFields", get_type_hints(Hold), total=False))  # type: ignore[operator]
