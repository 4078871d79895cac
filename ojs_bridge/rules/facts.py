"""What is known of a fleet at a moment, as far as the verdict needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "unknown", "degraded", "away"]

#: The minutes that are looked at. The last one runs now, and is not whole.
MINUTES = 60
#: One number for each of these minutes.
Minutes: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Whether the store or the broker answers, and since when it is away."""

    status: Status
    message: str = ""
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class TypeFacts:
    """How many runs of a job type ended in each minute, how many died and how many were retried."""

    type: str
    runs: Minutes
    deaths: Minutes
    retried: Minutes


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue: what waits in the broker, what comes in and goes out, and whether its workers keep up.

    What is not known is None.
    """

    framework: str
    queue: str
    depth: int | None
    oldest_at: datetime | None
    in_per_second: float | None
    out_per_second: float
    keeps_up: bool | None
    paused: bool
    workers: int


@dataclass(frozen=True, slots=True)
class HostFacts:
    """How many workers of a framework were seen on a host lately; a silent host had some before."""

    framework: str
    host: str
    seen: int
    silent_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at a moment. `deaths` are those of all types, by the minute."""

    at: datetime
    store: Part
    broker: Part
    deaths: Minutes = (0,) * MINUTES
    types: tuple[TypeFacts, ...] = ()
    queues: tuple[QueueFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    notes: tuple[str, ...] = field(default=())
