"""Documents, which operators keep beside the jobs, and rates: how many runs came to which outcome."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, TypeAlias, TypeVar
from uuid import uuid4

from ..errors import StoreError

logger = logging.getLogger("ojs_bridge")

Kept = TypeVar("Kept")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Document:
    """A record in JSON. Its `revision` is 1 when it is new, and grows by 1 with each change."""

    kind: str
    id: str
    at: datetime
    body: Mapping[str, Any]
    revision: int = 1


def next_of(
    known: Document | None, kind: str, document_id: str, at: datetime, body: Mapping[str, Any]
) -> Document:
    """Return the revision of a document that follows the one that is known, or the first one.

    It has a mark of its own: of two processes that write the same at the same moment one is told that the
    document is not its own.
    """
    return Document(kind, document_id, at, {**body, "mark": uuid4().hex}, known.revision + 1 if known else 1)


class Unreadable(StoreError):
    """Another version has written a document, and this one cannot read it."""


@contextmanager
def reading(kind: str) -> Iterator[None]:
    """Raise Unreadable for a document of a kind that has not what is read of it."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Unreadable(f"another version has written a {kind} that cannot be read: {error!r}") from error


def readable(kept: Iterable[Kept], read: Callable[[Kept], Read]) -> Iterator[Read]:
    """Yield what is read of each document, or of each part of one; what cannot be read is left out."""
    for each in kept:
        try:
            with reading("document"):
                found = read(each)
        except Unreadable as error:
            logger.debug("%s: %r", error, each)
        else:
            yield found


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """Documents of a kind, the newest first, and the cursor of the next page; None on the last page."""

    documents: tuple[Document, ...]
    next_cursor: str | None


#: The upper bounds of the durations in a rate, in seconds. A last count has what took longer.
BOUNDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 300, 1800, 3600, 21600, 86400)

Span: TypeAlias = Literal["minute", "hour"]
SECONDS: dict[Span, int] = {"minute": 60, "hour": 3600}
#: How long the rates of each span are kept.
KEPT: dict[Span, timedelta] = {"minute": timedelta(days=1), "hour": timedelta(days=14)}


@dataclass(frozen=True, slots=True)
class Rate:
    """The runs of a job type and a queue that came to an outcome in the minute or hour that begins at `at`.

    `counts` has one number for each of the BOUNDS, and one more: how many took so long.
    """

    at: datetime
    type: str
    queue: str
    outcome: str
    counts: tuple[int, ...]


class Documents(Protocol):
    """Documents and rates. All methods raise StoreError."""

    def write(self, document: Document, *, of_operator: bool = False) -> bool:
        """Write a document; False when the store has this revision, or a later one, from another writer.

        Those of an operator's act a Redis takes also where its memory is full: else nobody could free it.
        """

    def get(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""

    def list(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first; raises ValueError for a cursor that no page gave out."""

    def count(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Return the number of documents of each of these kinds that has any."""

    def forget(self, kind: str, *, before: datetime) -> int:
        """Delete the documents of a kind that are older; return how many."""

    def record_rates(self, rates: Sequence[Rate], writer: str, number: int) -> None:
        """Add the counts of minutes to these minutes and to their hours, in one step.

        A writer gives its batches the numbers from 1 on, and a batch that it repeats the same number: a store
        may leave out a batch that it has.
        """

    def rates(self, since: datetime, until: datetime, span: Span) -> Sequence[Rate]:
        """Return the rates of the spans that begin in a time, `until` not included, by time."""

    def forget_rates(self, now: datetime) -> None:
        """Delete the rates that have been kept long enough."""


def begun(at: datetime, span: Span) -> int:
    """Return when the span of a time begins, in milliseconds since 1970."""
    return int(at.timestamp()) // SECONDS[span] * SECONDS[span] * 1000
