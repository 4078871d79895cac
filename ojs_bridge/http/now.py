"""The route of the moment: whether it is bad now, what it is, and what is done about it."""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict

from ..bridge import Bridge
from ..operations.audit import Mark
from ..rules.facts import Status
from .groups import Group
from .routes import Operation, answers
from .shapes import BulkOperation, Count, Hold, Time

NOW: list[Operation] = []


class VerdictLine(TypedDict):
    """A fact under the sentence, with its number; what it is about is named where that is known."""

    kind: Literal["bleeds", "contained", "on_its_way", "slow", "away", "ended"]
    text: str
    count: float | None
    type: str | None
    fingerprint: str | None
    queue: str | None
    dependency: str | None


class Verdict(TypedDict):
    """Whether it is bad now, in one sentence; `why` says more, `since` when the worst began.

    `about` is the fact of the sentence, which is not among the lines. Times in the texts are those of RFC
    3339, so that a client can show them in its own zone.
    """

    level: Literal["well", "slow", "bad", "away"]
    sentence: str
    why: str
    since: Time | None
    lines: list[VerdictLine]
    about: VerdictLine | None


class PulsePart(TypedDict):
    """Whether the store or the broker answers, and since when it is away."""

    status: Status
    since: Time | None
    message: str


class PulseWorkers(TypedDict):
    """How many workers of a framework were seen on a host lately, and how many are silent.

    A silent one has not said that it ends, and no other one has begun in its place.
    """

    framework: str
    host: str
    seen: Count
    silent: Count
    silent_since: Time | None


class PulseWaits(TypedDict):
    """How many jobs wait in the store, by kind; `in_broker` are the retries that wait in the broker."""

    retry: Count
    scheduled: Count
    held: Count
    in_broker: Count


class Pulse(TypedDict):
    """The strip: rates beside the usual, workers, and what waits."""

    store: PulsePart
    broker: PulsePart
    workers: list[PulseWorkers]
    jobs_per_second: Annotated[float, Field(ge=0)]
    usual_jobs_per_second: float | None
    deaths_per_minute: Annotated[float, Field(ge=0)]
    usual_deaths_per_minute: float | None
    retries_per_minute: Annotated[float, Field(ge=0)]
    usual_retries_per_minute: float | None
    waits: PulseWaits
    dead_letters: Count


class Hill(TypedDict):
    """The deaths and retries of each of the last sixty minutes, what is usual for each, and their marks."""

    since: Time
    step_seconds: float
    deaths: list[Count]
    usual: list[float] | None
    retries: list[Count]
    usual_retries: list[float] | None
    marks: list[Mark]


class NowQueue(TypedDict):
    """A queue: what waits in the broker, what comes in and goes out, and whether its workers keep up.

    `depth`, `in_per_second` and `keeps_up` are null where they are not known.
    """

    framework: str
    queue: str
    depth: Count | None
    oldest_at: Time | None
    in_per_second: float | None
    out_per_second: Annotated[float, Field(ge=0)]
    keeps_up: bool | None
    paused: bool
    workers: Count


class RunningJob(TypedDict):
    """A job that a worker runs, and for how many seconds."""

    id: str
    type: str
    seconds: Annotated[float, Field(ge=0)]


class NowWorker(TypedDict):
    """A worker process, the number of the jobs that it runs, and some of them, the longest first."""

    name: str
    host: str
    framework: str
    seen_at: Time
    runs: Count
    running: list[RunningJob]


class Now(TypedDict):
    """What is known at a moment, `at`; `note` says what the store could not tell.

    `groups` are those that are new, came back or grow; `steady` are some others of the last hour.
    """

    at: Time
    verdict: Verdict
    pulse: Pulse
    hill: Hill
    groups: list[Group]
    steady: list[Group]
    operations: list[BulkOperation]
    queues: list[NowQueue]
    workers: list[NowWorker]
    holds: list[Hold]
    note: str


class Desk:
    """Serves the moment."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(NOW, "GET", "/admin/now")
    def now(self) -> Now:
        """Tell whether it is bad now, what it is, and what is done about it."""
        return cast(Now, self._bridge.now().to_ojs())
