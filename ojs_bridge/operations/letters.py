"""What operations read: letters and jobs of a filter, their pages, redaction, the lines of an export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..engine.redaction import Redactor
from ..errors import JobNotFound
from ..rules.fingerprint import is_fingerprint
from ..store import (
    DocumentPage,
    Filter,
    Letter,
    Page,
    Parked,
    ParkedPage,
    Stats,
    WaitingState,
    counts_of,
    from_json,
    index_text,
    matches,
)

AnyPage = TypeVar("AnyPage", Page, ParkedPage)
Entry = TypeVar("Entry", Letter, Parked)
_AnyPage = TypeVar("_AnyPage", Page, ParkedPage, DocumentPage)

MAX_PAGE = 1000
#: The most entries that an operation reads at a time.
READ = 500
#: The most entries that one page searches for a text.
LOOK_THROUGH = 2000
#: After how many seconds a page ends that searches for a text, with what it has until then.
SEARCH_SECONDS = 5.0
#: The seconds of a claim on letters, after which another process may claim them.
CLAIM_SECONDS = 60.0
#: The most letters of an import that one step writes, and the most characters of their lines.
LOT, LOT_SIZE = 200, 4_000_000
#: The most characters of a line of an import: a message of 16 MiB, and all its errors.
MAX_LINE = 64 * 1024 * 1024
#: The fewest characters that stand for a whole id, and the most ids that an error names.
_SHORTEST, _NAMED = 4, 5
#: Checks the fields of an imported letter: a dataclass takes any value.
_FIELDS = TypeAdapter(TypedDict("LetterFields", get_type_hints(Letter)))  # type: ignore[operator]


def without_text(where: Filter, what: str) -> Filter:
    """Return a filter; raises ValueError for one with a text, naming what is not searched for it."""
    if where.text is not None:
        raise ValueError(f"text: {where.text!r}: {what} are not searched for a text; leave it out")
    return where


def without_group(where: Filter) -> Filter:
    """Return a filter of waiting jobs; raises ValueError for one with a group."""
    if where.group is not None:
        raise ValueError(f"group: {where.group!r}: waiting jobs are in none; leave it out")
    return where


def is_among(job: Letter | Parked, at: datetime, where: Filter) -> bool:
    """Return whether a filter has a dead letter or a waiting job; its text is not looked at.

    `at` is when the letter died, or the job was parked.
    """
    return (
        (where.queue is None or job.queue == where.queue)
        and job.queue not in where.but_queues
        and matches(index_text(job.type), where.type)
        and matches(index_text(job.error_type), where.error_type)
        and (where.since is None or at >= where.since)
        and (where.until is None or at < where.until)
    )


def says(letter: Letter, text: str | None, redactor: Redactor) -> bool:
    """Return whether the redacted arguments or error messages of a letter have a text."""
    return text is None or text.casefold() in said(shown(letter, redactor))


def said(job: Letter | Parked) -> str:
    """Return the arguments and error messages, and the reason of a waiting job, as one casefolded text."""
    reading = job.reading
    words = [reading.args, reading.kwargs, [entry.get("message") for entry in job.errors]]
    words += [job.reason] if isinstance(job, Parked) else []
    return json.dumps(words, ensure_ascii=False, default=repr).casefold()


def count(letters: Iterable[Letter]) -> Stats:
    """Return the number of dead letters, and their numbers by queue, type and error type."""
    kinds = (((x.queue, x.type, x.error_type), 1, x.discarded_at, x.discarded_at) for x in letters)
    return counts_of([*kinds])


def shown(letter: Letter, redactor: Redactor) -> Letter:
    """Return the redacted letter; a redacted message cannot be published."""
    if not redactor:
        return letter
    # The pattern of a redacted error may be another.
    letter = replace(letter, fault=letter.group)
    message, secrets = redactor.message(letter.message)
    errors = tuple(map(secrets.out_of, letter.errors))
    return replace(letter, message=message, errors=errors, reason=secrets.out_of(letter.reason))


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What the store knows of a job: its dead letter, or the job as it waits, redacted."""

    entry: Letter | Parked

    @property
    def state(self) -> Literal["discarded"] | WaitingState:
        """The state in the specification's word: that of a dead letter is `discarded`."""
        return "discarded" if isinstance(self.entry, Letter) else self.entry.waits_as

    @property
    def attempts(self) -> int:
        """The number of attempts that have begun."""
        # A waiting job has the attempt that is to come.
        return self.entry.attempt - 1 if isinstance(self.entry, Parked) else self.entry.attempt

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """The errors of its attempts, the first one first."""
        return self.entry.errors

    def to_ojs(self) -> dict[str, Any]:
        """Return the detail of the letter or of the waiting job, by the shape of `/admin/jobs/{id}`."""
        job = self.entry.to_ojs()
        policy = job.get("policy") or job.get("retry")
        job |= {"specversion": "1.0", "created_at": job["metadata"].get("created_at")}
        return job | ({"retry_policy": policy} if policy else {})


class Jobs:
    """The one place to ask for a job. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(
        self,
        letter: Callable[[str], Letter | None],
        waiting: Callable[[str], Parked | None],
        *ids: Callable[[str], str],
    ) -> None:
        self._letter, self._waiting, self._ids = letter, waiting, ids

    def get(self, job_id: str) -> Whereabouts:
        """Return where a job is, its attempts and errors; raises NotFound.

        The store does not know a job that waits in the broker, runs, has succeeded or was dropped.
        """
        known = [entry for entry in (self._letter(job_id), self._waiting(job_id)) if entry is not None]
        if not known:
            raise JobNotFound(
                f"there is no dead letter {job_id!r}, and no such job waits in the store: it waits in the "
                "broker, runs, has succeeded or was dropped"
            )
        return Whereabouts(max(known, key=lambda entry: entry.fence))

    def id_of(self, text: str) -> str:
        """Return the id that is this text, or else the only one that begins with it, as for dead letters."""
        found = {id_of(text) for id_of in self._ids} - {text}
        if len(found) > 1:
            raise ValueError(f"id: {text!r} begins several: {', '.join(sorted(found))}")
        return found.pop() if found else text


def page_size(limit: int) -> int:
    """Return the limit of a page; raises ValueError outside 1 to 1000."""
    if not (isinstance(limit, int) and 1 <= limit <= MAX_PAGE):
        raise ValueError(f"limit: {limit!r} must be between 1 and {MAX_PAGE}")
    return limit


def every_page(read: Callable[[str | None], _AnyPage]) -> Iterator[_AnyPage]:
    """Yield all pages; `read` is given the cursor of the page before."""
    page = read(None)
    yield page
    while page.next_cursor is not None:
        page = read(page.next_cursor)
        yield page


def pages_of_ids(
    get: Callable[[str], Entry | None], ids: Sequence[str], cursor: str | None
) -> Iterator[tuple[Sequence[Entry], str | None]]:
    """Yield the entries of some ids that are there, each page with the cursor after it."""
    for start in range(int(cursor or 0), len(ids), READ):
        entries = map(get, ids[start : start + READ])
        yield [entry for entry in entries if entry is not None], str(start + READ)


def only_id(text: str, beginning: Callable[[str, int], Sequence[str]], name: str = "id") -> str:
    """Return the only id that begins with a text of at least four characters; without an id, the text.

    Raises ValueError that names the ids, where there are several.
    """
    ids = beginning(text, _NAMED + 1) if len(text) >= _SHORTEST else ()
    if len(ids) > 1:
        more = ", and more" if len(ids) > _NAMED else ""
        raise ValueError(f"{name}: {text!r} begins several: {', '.join(ids[:_NAMED])}{more}")
    return ids[0] if ids else text


def loaded(number: int, line: str) -> Letter:
    """Return the letter in a line of an export; raises ValueError that names the line."""
    if len(line) > MAX_LINE:
        raise ValueError(f"line {number}: {line[:40]!r}…: it has more than {MAX_LINE:,} characters")
    try:
        letter = from_json(Letter, line)
        _FIELDS.validate_python({name: getattr(letter, name) for name in Letter.__slots__}, strict=True)
    except ValidationError as error:
        raise ValueError(f"line {number}: it is no dead letter: {problem_of(error)}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: it is no dead letter: it is not JSON: {error}") from None
    except KeyError as error:
        raise ValueError(f"line {number}: it is no dead letter: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"line {number}: it is no dead letter: {error!r}") from None
    if letter.fault and not is_fingerprint(letter.fault):
        raise ValueError(f"line {number}: fault: {letter.fault!r:.100} must be 16 hexadecimal digits")
    if letter.message.get("redacted"):
        raise ValueError(
            f"line {number}: dead letter {letter.id!r:.100} was redacted, and has no message any more"
        )
    return letter


class Line(NamedTuple):
    """A line of an export: its number, its length, and its letter."""

    number: int
    size: int
    letter: Letter


def read_lines(lines: Iterable[str]) -> list[Line]:
    """Return the letters in lines of an export; raises ValueError that names a damaged line and the rule."""
    return [Line(n, len(line), loaded(n, line)) for n, line in enumerate(lines, 1) if line.strip()]


def lots_of(lines: Iterable[Line]) -> Iterator[Sequence[Line]]:
    """Yield the lines in lots that one step may write."""
    lot, size = list[Line](), 0
    for line in lines:
        if len(lot) == LOT or (lot and size + line.size > LOT_SIZE):
            yield lot
            lot, size = [], 0
        lot.append(line)
        size += line.size
    if lot:
        yield lot


def loaded_until(lines: Sequence[Line], done: int) -> str:
    """Return how many of the letters of an import were loaded, and up to which line, in words."""
    last = f", up to line {lines[done - 1].number}" if done else ""
    return f"{done} of {len(lines)} letters were loaded{last}"


def problem_of(error: ValidationError, whole: str = "") -> str:
    """Return the first problem that pydantic has found: its place in the `whole`, the value and the rule."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    rule = cause if isinstance(cause, ValueError) else first["msg"]
    place = ".".join(map(str, first["loc"])) or whole
    return f"{place}: {first['input']!r:.100}: {rule}"
