"""What the bridge asks of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from ..errors import ConfigurationError
from ..job import ErrorEntry, format_time


class StoreError(Exception):
    """The store cannot do what was asked: unreachable, or written by a newer version."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: a job's final state and the message it came as, unmodified (DLQ-001, DLQ-002).

    `message` is the framework's own message in JSON, enough to publish it again exactly.
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

    @property
    def error_type(self) -> str:
        """The error type of the most recent failure."""
        return str(self.errors[-1].get("type")) if self.errors else "Unknown"

    def to_ojs(self) -> dict[str, Any]:
        """Return the letter in the spec's detail shape; `occurred_at` repeats each error's timestamp."""
        created = format_time(self.created_at) if self.created_at else None
        return {
            "id": self.id,
            "type": self.type,
            "queue": self.queue,
            "state": "discarded",
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "errors": [{**entry, "occurred_at": entry.get("timestamp")} for entry in self.errors],
            "metadata": {
                "framework": self.framework,
                "cause": self.cause,
                "reason": self.reason,
                "created_at": created,
                "discarded_at": format_time(self.discarded_at),
                "ojs.replay_count": self.replay_count,
            },
            "message": dict(self.message),
        }


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which dead letters: by queue, job type and last error type; both types take `prefix.*` (DLQ-006)."""

    queue: str | None = None
    type: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Dead letters, newest first, and the cursor of the next page, None on the last one."""

    letters: tuple[Letter, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Stats:
    """How many dead letters there are, and of what kind."""

    total: int
    by_queue: Mapping[str, int] = field(default_factory=dict)
    by_type: Mapping[str, int] = field(default_factory=dict)
    by_error_type: Mapping[str, int] = field(default_factory=dict)
    oldest_at: datetime | None = None
    newest_at: datetime | None = None


class Store(Protocol):
    """Dead letters, and the error entries that a message's header had no room for.

    Every method is safe to repeat, and to call from many threads and processes. All raise StoreError.
    """

    def prepare(self) -> None:
        """Create what is missing and refuse a store of a newer version."""

    def bury(self, letter: Letter) -> None:
        """Write a dead letter; an earlier one of the same job id is replaced."""

    def keep_errors(self, job_id: str, entries: Sequence[ErrorEntry]) -> None:
        """Keep error entries that the message drops."""

    def kept_errors(self, job_id: str) -> list[ErrorEntry]:
        """Return the kept entries, oldest first."""

    def forget_errors(self, job_id: str) -> None:
        """Delete the kept entries of a job that has ended."""

    def list(self, where: LetterFilter, *, limit: int, cursor: str | None) -> Page:
        """Return a page of dead letters, newest first."""

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""

    def claim(self, letter_id: str, *, now: datetime, seconds: float) -> bool:
        """Reserve a dead letter for one replay; False when another holds it or it is gone."""

    def release(self, letter_id: str) -> None:
        """Give back a claim whose replay failed."""

    def delete(self, letter_id: str, *, discarded_at: datetime | None = None) -> bool:
        """Delete a dead letter; False when there is none, or none that was discarded at this time."""

    def stats(self) -> Stats:
        """Count the dead letters."""

    def close(self) -> None:
        """Close connections."""


def open_store(url: str, namespace: str = "ojs") -> Store:
    """Open the store at a URL: `sqlite:///file`, `postgresql+psycopg://`, `mysql+pymysql://`.

    Nothing is connected to until first use. Raises ConfigurationError for a URL that no store understands,
    and for a driver that is not installed.
    """
    if "://" not in url:
        raise ConfigurationError(f"store: {url!r} is not a URL such as sqlite:///ojs.db")
    try:
        from .sql import SQLStore
    except ImportError:
        raise ConfigurationError(f"store: {url!r} needs SQLAlchemy: pip install 'ojs-bridge[sql]'") from None
    return SQLStore(url, namespace)
