"""The protocol of a store: dead letters, and all methods that a store has."""

from __future__ import annotations

import os.path
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

from ..errors import ConfigurationError
from ..messages import Reading, read_message, shown_errors
from ..rules.failures import VISIBILITY_TIMEOUT
from ..rules.fingerprint import fingerprint
from ..rules.job import ErrorEntry, Job, PlacedEntry, format_time
from .documents import Documents
from .filter import EVERYTHING, Filter
from .jobs import KEEP, ParkedJobs, Reservation, ReservedRuns, Settle, Transaction

#: The claim of a replay. While it lasts, no other replay gets the letter.
Claim: TypeAlias = int

#: Groups in the order of the last death, or of their size, falling.
Order: TypeAlias = Literal["last", "count"]
#: The most job types and queues of a group that are named. On SQL they are those of so many newest letters,
#: or of more.
NAMED, NEWEST = 10, 100

MAX_NAMESPACE = 64
#: The URL of a store in the memory of one process.
MEMORY = "memory://"
_TCP = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
#: The schemes of a Redis' URL, and their names in redis-py, which knows nothing of Valkey.
REDIS_SCHEMES = {
    **_TCP,
    **{f"{scheme}+sentinel": name for scheme, name in _TCP.items()},
    **{f"{scheme}+cluster": name for scheme, name in _TCP.items()},
    "unix": "unix",
}


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: a job's final state and its unmodified message (DLQ-001, DLQ-002).

    `message` is the framework's own message in JSON, enough to publish it again exactly. `key` and `fence`
    name the job's last reservation, `policy` is the job's retry policy, as far as JSON can say it. `fault` is
    the fingerprint of its last error, as its worker kept it.
    """

    id: str
    type: str
    queue: str
    framework: str
    attempt: int
    max_attempts: int
    cause: str
    reason: str
    discarded_at: datetime
    message: Mapping[str, Any]
    errors: tuple[ErrorEntry, ...] = ()
    retry: Mapping[str, Any] | None = None
    created_at: datetime | None = None
    replay_count: int = 0
    key: str = ""
    fence: int = 0
    policy: Mapping[str, Any] | None = None
    fault: str = ""

    @property
    def job_id(self) -> str:
        """The id of its job. Several letters may have one, where a user has sent jobs under one id."""
        return os.path.commonprefix([self.id, self.key]) if self.key else self.id  # noqa: RUF071 - no paths

    @property
    def last_run(self) -> Reservation:
        """The last run of its job before it died. A replay has a higher fence."""
        return Reservation(self.key or self.id, max(self.fence, self.attempt - 1))

    def is_left_by(self, job: Job, at: datetime) -> bool:
        """Return whether an earlier message of this job, which ends at a time, has left the letter behind.

        An attempt was taken for lost, and had sent the job on; or a replay did so, and was killed before it
        deleted the letter. The letter of another job under the same id shares no error with this one; for a
        day after a burial no other job has the same key.
        """
        if self.key not in ("", job.key) or self.fence > job.fence:
            return False
        times = {entry.get("timestamp") for entry in job.errors}
        if any(entry.get("timestamp") in times for entry in self.errors):
            return True
        its_first = len(self.errors) == 1 and (not times or self.error_type == VISIBILITY_TIMEOUT)
        return its_first and self.discarded_at > at - KEEP

    @property
    def group(self) -> str:
        """The fingerprint of the most recent failure, which names the letter's group."""
        message = str(self.errors[-1].get("message") or "") if self.errors else ""
        if self.fault:
            return self.fault
        return fingerprint(self.type, self.error_type, message, self.backtrace, self.framework)

    @property
    def backtrace(self) -> Sequence[object]:
        """The frames of the most recent failure; an imported letter may hold anything in their place."""
        frames = self.errors[-1].get("backtrace") if self.errors else None
        return frames if isinstance(frames, list) else ()

    @property
    def error_type(self) -> str:
        """The error type of the most recent failure."""
        return str(self.errors[-1].get("type") or "Unknown") if self.errors else "Unknown"

    @property
    def reading(self) -> Reading:
        """The message's arguments, read without running any code of it."""
        return read_message(self.message)

    def to_ojs(self) -> dict[str, Any]:
        """Return the letter in the spec's detail shape."""
        created = format_time(self.created_at) if self.created_at else None
        return {
            "id": self.id,
            "type": self.type,
            "queue": self.queue,
            **self.reading.to_ojs(),
            "state": "discarded",
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "discarded_at": format_time(self.discarded_at),
            "errors": shown_errors(self.errors),
            "metadata": {
                "framework": self.framework,
                "cause": self.cause,
                "reason": self.reason,
                "created_at": created,
                "discarded_at": format_time(self.discarded_at),
                "ojs.replay_count": self.replay_count,
                "fingerprint": self.group,
            },
            "retry": dict(self.retry) if self.retry else None,
            "policy": dict(self.policy) if self.policy else None,
        }


@dataclass(frozen=True, slots=True)
class Page:
    """Dead letters, newest first, and the cursor of the next page; None on the last page."""

    letters: tuple[Letter, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Claimed dead letters as they are now. Until the claim ends, no other caller gets them."""

    claim: Claim
    letters: tuple[Letter, ...]


class Bin(NamedTuple):
    """Where deleted letters are kept: the bin of a deletion, and the time."""

    deletion: str
    at: datetime


#: How long a bin keeps its letters.
BIN_KEPT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers of dead letters, in all and by kind, and how long they are kept, where that is known."""

    total: int
    by_queue: Mapping[str, int] = field(default_factory=dict)
    by_type: Mapping[str, int] = field(default_factory=dict)
    by_error_type: Mapping[str, int] = field(default_factory=dict)
    oldest_at: datetime | None = None
    newest_at: datetime | None = None
    retention: Mapping[str, Any] = field(default_factory=dict)

    def to_ojs(self) -> dict[str, Any]:
        """Return the counts in the spec's JSON form (section dlq 10)."""
        return {
            "total": self.total,
            "by_queue": dict(self.by_queue),
            "by_type": dict(self.by_type),
            "by_error_type": dict(self.by_error_type),
            "oldest_at": format_time(self.oldest_at) if self.oldest_at else None,
            "newest_at": format_time(self.newest_at) if self.newest_at else None,
            "retention": dict(self.retention),
        }


@dataclass(frozen=True, slots=True)
class Group:
    """The letters of a fingerprint that a filter chooses: their number, their times, the newest of them.

    `first_at` is the first death of the fault, whatever became of its letter, and whatever the filter.
    `deaths` are the numbers of letters between each two of the given times. A store gives each a sample.
    """

    fingerprint: str
    count: int
    first_at: datetime
    last_at: datetime
    types: tuple[str, ...]
    queues: tuple[str, ...]
    deaths: tuple[int, ...]
    sample: Letter | None


class GroupPage(NamedTuple):
    """A page of groups: without the fingerprints in `but`, with the numbers of deaths between the times."""

    order: Order
    but: Collection[str]
    times: Sequence[datetime]
    limit: int
    offset: int


def counts_of(kinds: Sequence[tuple[Sequence[str], int, datetime, datetime]]) -> Stats:
    """Add up the counts of each queue, job type and error type together.

    A kind has these three texts, the number of its letters, and the times of the oldest and the newest.
    """
    by_queue, by_type, by_error_type = Counter[str](), Counter[str](), Counter[str]()
    for (queue, type_, error_type), count, _, _ in kinds:
        by_queue[queue] += count
        by_type[type_] += count
        by_error_type[error_type] += count
    oldest, newest = (at for _, _, at, _ in kinds), (at for _, _, _, at in kinds)
    return Stats(
        by_queue.total(),
        by_queue,
        by_type,
        by_error_type,
        min(oldest, default=None),
        max(newest, default=None),
    )


class Letters(Protocol):
    """Dead letters, their groups, and the errors of jobs that are not dead yet. All methods raise StoreError.

    A queue, a type and an error type are compared as `index_text` returns them. The errors of a job that is
    not dead yet have the id of the letter that it would have.
    """

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Write a dead letter and settle the job's reservation, in one step.

        The letter replaces an earlier one of the job, claimed or not, and the kept error entries. False when
        the reservation cannot be settled (see `settle`): then nothing is written.
        """

    def bury_all(self, letters: Sequence[Letter]) -> None:
        """Write some hundred letters in one step, each as `bury` does; after an error none is written."""

    def keep_errors(self, letter_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep error entries for which the message has no room; an entry that is there already stays.

        Raises StoreError for a place that needs more than 64 bits.
        """

    def kept_errors(self, letter_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""

    def forget_errors(self, letter_id: str) -> None:
        """Delete the kept entries of a job."""

    def list(self, where: Filter, *, limit: int, cursor: str | None, oldest_first: bool = False) -> Page:
        """Return a page of dead letters; raises ValueError for a cursor that no page gave out.

        The caller looks for the filter's text.
        """

    def cursor_after(self, letter: Letter) -> str:
        """Return the cursor of the page that begins after a letter."""

    def count(self, where: Filter) -> int:
        """Count the dead letters that match a filter."""

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of dead letters that begin with a text, as many as `limit` at most."""

    def claim(self, letter_ids: Sequence[str], *, now: datetime, seconds: float) -> Claimed:
        """Claim dead letters for some seconds; return those that are there and have no other claim."""

    def unclaim(self, letter_ids: Sequence[str], claim: Claim) -> None:
        """End a claim of dead letters; another caller's claim stays."""

    def delete(self, letter_ids: Sequence[str], claim: Claim, into: Bin | None = None) -> int:
        """Delete claimed dead letters; return how many. A letter whose job has died again stays.

        In the same step they are written into a bin, if one is named.
        """

    def prune(self, letters: Sequence[Letter], *, now: datetime, into: Bin | None = None) -> int:
        """Delete letters; return how many. A claimed letter, or one whose job has died again, stays.

        In the same step they are written into a bin, if one is named.
        """

    def binned(self, deletion: str, *, since: datetime) -> Iterator[Sequence[Letter]]:
        """Yield the letters that went into the bin of a deletion since a time, some hundred at a time."""

    def restore(self, deletion: str, letters: Sequence[Letter]) -> Collection[str]:
        """Take letters out of a bin, back to the others; return the ids of those that are there now.

        A letter stays in the bin if its job has begun again since, whatever became of that run, or if there
        is another letter of its id. It is one step: no run of the job begins between the look and the end.
        """

    def forget_bin(self, *, before: datetime) -> int:
        """Delete the letters that went into a bin before a time; return how many."""

    def stats(self, where: Filter = EVERYTHING) -> Stats:
        """Count the dead letters that match a filter, in all and by kind."""

    def groups(self, where: Filter, page: GroupPage) -> Sequence[Group]:
        """Return a page of the groups of the letters that match a filter."""

    def group_sizes(self, where: Filter) -> Mapping[str, tuple[int, datetime]]:
        """Return the number of letters of each group that match a filter, and the time of the newest."""

    def forget_groups(self, *, before: datetime) -> int:
        """Forget the first deaths, before a time, of groups without letters; return how many."""


class Store(Protocol):
    """All that is kept, in four parts: dead letters, parked jobs, reservations, documents with rates.

    Many threads and processes may call every method, and each sees what the others have written. All methods
    but `record_rates` are safe to repeat. All raise StoreError. Times are kept and compared in whole
    milliseconds, rounded down.
    """

    letters: Letters
    parked: ParkedJobs
    reservations: ReservedRuns
    documents: Documents
    #: Its kind in words, such as `sql`.
    backend: str
    #: Whether it is in the memory of this process, and ends with it.
    is_in_memory: bool
    #: Whether all processes that use it must run on one host.
    is_on_one_host: bool

    def prepare(self) -> None:
        """Create what is missing; raises StoreError for a store of a newer version."""

    def schema(self) -> int | None:
        """Return the version of the store, None before its first use; raises StoreError for a newer one."""

    def clock(self) -> datetime:
        """Return the time of the store's own machine."""

    def join(self, connection: Any) -> Transaction:  # noqa: ARG002
        """Return the open transaction of a user's connection: of psycopg, SQLAlchemy or Django.

        Raises NotInTransaction, and ConfigurationError for a store that is no SQL database.
        """
        raise ConfigurationError(
            f"ojs_in: the store is of the kind {self.backend!r}, and a transaction needs a store in its own "
            "database, such as postgresql://host/shop"
        )

    def joined(self) -> Transaction | None:
        """Return the transaction of Django's on this database that this thread is in, or None.

        Raises as `join` does.
        """
        return self.join(None)

    def close(self) -> None:
        """Close connections."""


#: Hosts, each with a port that is a number, as they stand in a URL without a name and a password.
_HOSTS = re.compile(r"(?:(?:[a-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?(?:,|$))*")
_OPTION = re.compile(r"(?i)(pass\w*|pwd)=([^&]*)")
_HIDDEN = "***"
#: A secret that is shorter is not taken out of other texts: it is too common.
_TELLING = 4


def without_password(url: str, text: str | None = None) -> str:
    """Return a URL as a log may show it, or a text about it, such as a driver's error. It may be invalid.

    Where no `@` ends the name and the password, and the hosts look odd, they are taken for a secret.
    """
    scheme, slashes, rest = url.partition("://") if "://" in url else ("", "", url)
    place = re.split(r"[/?#\s]", rest, maxsplit=1)[0] if slashes else rest
    if "@" in rest:
        secret = rest[: rest.rindex("@")]
        words = [secret.partition(":")[2] or secret]
    else:
        is_host = _HOSTS.fullmatch(place) or not (slashes or re.match(r"[A-Za-z][\w+.-]*:", place))
        secret = "" if is_host else place
        words = [secret]
    if text is None:
        shown = f"{_HIDDEN}{rest[len(secret) :]}" if secret else rest
        return scheme + slashes + _OPTION.sub(rf"\1={_HIDDEN}", shown)
    words += [part for word in words for part in re.split("[:@,]", word)]
    words += [word for _, word in _OPTION.findall(rest)]
    for word in sorted({*words, *map(unquote, words)}, key=len, reverse=True):
        if len(word) >= _TELLING and not word.isdecimal():
            # A driver writes a host in lower case.
            text = re.sub(re.escape(word), _HIDDEN, text, flags=re.IGNORECASE)
    return text
