"""The shapes of the answers: mypy checks the handlers against them, and the OpenAPI document shows them.

An object that has a `to_ojs` of its own fields is its own shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from ..operations.audit import Mark, Record
from ..operations.operation import Jobs, JsonAction, State
from ..operations.rates import InBroker
from ..rules.facts import Status
from ..store import WaitingState

Count: TypeAlias = Annotated[int, Field(ge=0)]
Time: TypeAlias = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class Problem(TypedDict):
    """An error, in the spec's shape (http 16.1)."""

    code: str
    message: str
    retryable: bool
    details: dict[str, Any]
    request_id: str


class Error(TypedDict):
    """The answer to a request that was refused."""

    error: Problem


class ErrorEntry(TypedDict, total=False):
    """A failed attempt in a job's history."""

    attempt: Count
    type: str
    message: str
    code: str | None
    details: dict[str, Any]
    backtrace: list[str] | None
    timestamp: Time | None
    occurred_at: Time | None


class Job(TypedDict):
    """The fields of dead letters and waiting jobs; `note` says why the arguments cannot be read.

    `hidden` names the fields, such as `args`, in which the redaction hides values.
    """

    id: str
    type: str
    queue: str
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    meta: dict[str, Any]
    note: str
    parameters: list[str]
    hidden: list[Literal["args", "kwargs", "meta"]]
    attempt: Count
    max_attempts: Count
    errors: list[ErrorEntry]


class LetterMetadata(TypedDict):
    """The metadata of a dead letter; `ojs.replay_count`, the number of replays, is among them."""

    framework: str
    cause: str
    reason: str
    created_at: Time | None
    discarded_at: Time
    fingerprint: str


class Letter(Job):
    """A dead letter."""

    state: Literal["discarded"]
    discarded_at: Time
    retry: dict[str, Any] | None
    policy: dict[str, Any] | None
    metadata: LetterMetadata


class LetterDetail(Letter):
    """A dead letter with the seconds before each retry that its policy asks for, at most fifty."""

    schedule: list[Annotated[float, Field(ge=0)]]


class WaitingMetadata(TypedDict):
    """The framework of a waiting job, the time of its first send, the reason and the time of its parking."""

    framework: str
    reason: str
    created_at: Time | None
    parked_at: Time


class Waiting(Job):
    """A parked retry, which is due at `next_retry_at`, or a scheduled job, which is due at `scheduled_at`."""

    state: WaitingState
    next_retry_at: NotRequired[Time]
    scheduled_at: NotRequired[Time]
    metadata: WaitingMetadata


class Cancelled(Job):
    """A job that was cancelled."""

    state: Literal["cancelled"]
    cancelled_at: Time


class CancelledJob(TypedDict):
    """The answer to a cancellation."""

    job: Cancelled


class JobDetail(Job):
    """A dead letter or a waiting job as the admin API details it."""

    specversion: Literal["1.0"]
    state: Literal["discarded"] | WaitingState
    created_at: Time | None
    discarded_at: NotRequired[Time]
    next_retry_at: NotRequired[Time]
    scheduled_at: NotRequired[Time]
    retry_policy: NotRequired[dict[str, Any]]
    metadata: dict[str, Any]


class JobInfo(TypedDict):
    """Where a job is."""

    job: JobDetail


class Pagination(TypedDict):
    """The place of a page among all entries; `total` is null if a count would take too long."""

    total: Count | None
    limit: Count
    offset: Count
    has_more: bool
    next_cursor: str | None


class Page(TypedDict):
    """A page of dead letters; `total` is that of the pagination, where some clients look for it."""

    jobs: list[Letter]
    total: Count | None
    pagination: Pagination


class WaitingPage(TypedDict):
    """A page of waiting jobs; `total` is that of the pagination.

    `in_broker` is not among them, and null where the filter has more than a queue, a type and a kind.
    """

    jobs: list[Waiting]
    total: Count | None
    in_broker: InBroker | None
    pagination: Pagination


class Replayed(TypedDict):
    """A job that was sent back to its queue."""

    id: str
    type: str
    state: Literal["available"]
    queue: str
    attempt: Literal[0]
    max_attempts: Count
    retry: dict[str, Any] | None
    metadata: dict[str, Any]
    re_enqueued_at: Time


class ReplayedJob(TypedDict):
    """The answer to a replay."""

    job: Replayed


class WaitingJob(TypedDict):
    """The answer to a change of a waiting job."""

    job: Waiting


class Failed(TypedDict):
    """A letter that stays, and the reason."""

    job_id: str
    error: str


class Result(TypedDict):
    """The result of a replay or a purge of many letters (adm 6.5); `deleted` is a purge's `succeeded`."""

    action: JsonAction
    matched: Count
    succeeded: Count
    deleted: NotRequired[Count]
    failed: Count
    errors: list[Failed]


class Undone(TypedDict):
    """The outcome of an undo: how many letters are back, and how many stay in the bin; why, of a hundred."""

    restored: Count
    stayed: Count
    errors: list[Failed]


class BulkOperation(TypedDict):
    """A bulk operation; `ids` is the number of its ids, `changes` the names of what it changes of its jobs.

    `at` is the time of a move. `succeeded` counts the letters or jobs with which it is done. `jobs` says what
    became of replayed ones. A probe has a `limit`, and when it has ended a `rest`: how many letters it has
    left. `rest_operation` is the operation that sends these, and `rest_of` the probe of such a one.
    """

    id: str
    action: JsonAction
    state: State
    began_at: Time
    updated_at: Time
    kind: dict[str, Any]
    ids: Count | None
    changes: list[str]
    rate: float | None
    stop_if_failing: float | None
    at: Time | None
    total: Count | None
    matched: Count
    succeeded: Count
    failed: Count
    died_again: Count
    jobs: Jobs | None
    errors: list[Failed]
    why: str
    limit: Count | None
    newest: bool
    rest: Count | None
    rest_operation: str
    rest_of: str
    forever: bool


class Arguments(TypedDict):
    """The arguments of a job, by place and by name; null where they cannot be read."""

    args: list[Any] | None
    kwargs: dict[str, Any] | None


class EditedLetter(TypedDict):
    """A dead letter before and after edits; where it cannot be edited, `error` says why it would stay.

    `parameters` are the names of the arguments by place, as far as they are known. `notes` say which edits
    have nothing to do.
    """

    id: str
    type: str
    parameters: list[str]
    before: Arguments
    after: Arguments | None
    notes: list[str]
    error: str | None


class Edited(TypedDict):
    """Dead letters before and after edits."""

    letters: list[EditedLetter]


class Dead(TypedDict):
    """A dead letter of a job that a replay has sent."""

    id: str
    type: str
    queue: str
    error_type: str
    discarded_at: Time


class DiedAgain(TypedDict):
    """A page of dead letters of a replay's jobs, the newest death first."""

    jobs: list[Dead]
    next_cursor: str | None


class BulkOperations(TypedDict):
    """Bulk operations, the newest first."""

    operations: list[BulkOperation]


class Records(TypedDict):
    """A page of records, the newest first."""

    records: Sequence[Record]
    next_cursor: str | None


class Backend(TypedDict):
    """Whether store and broker answer."""

    status: Literal["connected", "disconnected"]


class Health(TypedDict):
    """The health of a fleet; all but the status is for holders of a token."""

    status: Status
    backend: NotRequired[Backend]
    checks: NotRequired[dict[str, dict[str, Any]]]


class Marks(TypedDict):
    """Marks, the newest first."""

    marks: Sequence[Mark]


class Deleted(TypedDict):
    """The answer to a deletion."""

    deleted: Literal[True]
    job_id: str


class Timeline(TypedDict):
    """The number of deaths in each step of time."""

    since: Time
    step_seconds: float
    counts: list[Count]


class Ahead(TypedDict):
    """The number of jobs that fall due in each step of time, by kind; `late` are due before.

    Null stands for what is not known: where SQL has looked at 50,000 jobs, it counts no further.
    """

    since: Time
    step_seconds: float
    late: Count | None
    by_kind: dict[str, list[Count | None]]


class Rates(TypedDict):
    """The numbers of runs in each step of time, by job type and outcome.

    `seconds` has durations by outcome and quantile; null for a step without runs. `seconds_by_type` has those
    of the runs that succeeded, over all of the time.
    """

    since: Time
    step_seconds: float
    by_type: dict[str, dict[str, list[Count]]]
    seconds: dict[str, dict[str, list[float | None]]]
    seconds_by_type: dict[str, dict[str, float | None]]


class Stats(TypedDict):
    """The numbers of dead letters, the limits of their retention, and whose letters can be replayed here."""

    total: Count
    by_queue: dict[str, Count]
    by_type: dict[str, Count]
    by_error_type: dict[str, Count]
    oldest_at: Time | None
    newest_at: Time | None
    retention: dict[str, Any]
    replayable: list[str]


class Hold(TypedDict):
    """A hold, and how many jobs of its type and its queue are held, by it or by another hold.

    `by` is the operator, `why` what the operator said. `rate` is how the jobs go on, in jobs a second. A hold
    of a dependency is about the types `jobs`; from `probe_at` on a breaker lets `probes` through. With a
    `limit_rate` or a `limit_concurrency` above 0 it limits jobs.
    """

    id: str
    reason: str
    since: Time
    by: str
    why: str
    type: str | None
    queue: str | None
    error_type: str | None
    until: Time | None
    ended_at: Time | None
    rate: float | None
    dependency: str | None
    jobs: list[str]
    probe_at: Time | None
    probes: Count
    limit_rate: str | float | None
    limit_concurrency: Count | None
    held: Count


class Holds(TypedDict):
    """The holds that are on, the oldest first."""

    holds: list[Hold]


class QueueState(TypedDict):
    """A queue in the words of the conformance suite (L4-PAUSE-001)."""

    name: str
    paused: bool


class Queue(TypedDict):
    """A queue that was paused or resumed: `status` as in http 11.3, `name` and `paused` as in adm 6.3."""

    queue: QueueState
    name: str
    status: Literal["active", "paused"]
    paused: bool
    paused_at: NotRequired[Time]
    resumed_at: NotRequired[Time]
