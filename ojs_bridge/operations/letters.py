"""Dead letters as the operations read them: the filter, what the redaction leaves, one line of an export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from ..engine.redaction import Redactor, without
from ..errors import ConfigurationError
from ..spec.patterns import check_pattern
from ..store import Letter, LetterFilter, Page, ParkedPage, Store, letter_from_json

AnyPage = TypeVar("AnyPage", Page, ParkedPage)

MAX_PAGE = 1000
#: The seconds for which a replay, or the archive, may hold letters before another may claim them.
CLAIM_SECONDS = 60.0
#: Checks what an imported letter holds: a dataclass itself takes anything.
_FIELDS = TypeAdapter(TypedDict("LetterFields", get_type_hints(Letter)))  # type: ignore[operator]


class Kind(TypedDict, total=False):
    """A choice of dead letters by queue, and by job type and last error type, which are patterns.

    By the time of their death: `since` a time, and `until` one, which is not included. By a `text` in their
    arguments or error messages, in any case. A pattern is a whole type, or has `*` for any characters.
    """

    queue: str | None
    type: str | None
    error_type: str | None
    since: datetime | None
    until: datetime | None
    text: str | None


def wanted(kind: Kind) -> tuple[LetterFilter, str | None]:
    """Return the filter that a store knows, and the text to look for; raises ValueError."""
    for name in ("since", "until"):
        at = kind.get(name)
        if at is not None and not (isinstance(at, datetime) and at.tzinfo):
            raise ValueError(f"{name}: {at!r} must be a time with a zone")
    check_pattern("type", kind.get("type"))
    check_pattern("error_type", kind.get("error_type"))
    rest = {name: value for name, value in kind.items() if name != "text"}
    return LetterFilter(**rest), kind.get("text") or None  # type: ignore[arg-type]


def says(letter: Letter, text: str | None, redactor: Redactor) -> bool:
    """Return whether what may be shown of a letter's arguments and error messages holds a text."""
    if text is None:
        return True
    told = shown(letter, redactor)
    reading = told.reading
    words = [reading.args, reading.kwargs, [entry.get("message") for entry in told.errors]]
    return text.casefold() in json.dumps(words, ensure_ascii=False, default=repr).casefold()


def shown(letter: Letter, redactor: Redactor) -> Letter:
    """Return what the redaction leaves of a letter, whose message then cannot be published."""
    if not redactor:
        return letter
    message, secrets = redactor.message(letter.message)
    errors = tuple(without(entry, secrets) for entry in letter.errors)
    return replace(letter, message=message, errors=errors, reason=without(letter.reason, secrets))


def page_size(limit: int) -> int:
    """Return how many entries a page is to have; raises ValueError outside 1 to 1000."""
    if not (isinstance(limit, int) and 1 <= limit <= MAX_PAGE):
        raise ValueError(f"limit: {limit!r} must be between 1 and {MAX_PAGE}")
    return limit


def every_page(read: Callable[[str | None], AnyPage]) -> Iterator[AnyPage]:
    """Yield page after page; `read` is given the cursor that the page before has told."""
    page = read(None)
    yield page
    while page.next_cursor is not None:
        page = read(page.next_cursor)
        yield page


def needed(store: Store | None, what: str) -> Store:
    """Return the store; raises ConfigurationError where there is none for what needs one."""
    if store is None:
        raise ConfigurationError(
            f"{what} need a store: Bridge(store='sqlite:///ojs.db'), or OJS_BRIDGE_STORE"
        )
    return store


def loaded(number: int, line: str) -> Letter:
    """Return the letter that a line of an export holds; raises ValueError that names the line."""
    try:
        letter = letter_from_json(line)
        _FIELDS.validate_python({name: getattr(letter, name) for name in Letter.__slots__}, strict=True)
    except ValidationError as error:
        raise ValueError(f"line {number}: it is no dead letter: {problem_of(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"line {number}: it is no dead letter: {error!r}") from None
    if letter.message.get("redacted"):
        raise ValueError(
            f"line {number}: dead letter {letter.id!r} was redacted, and has no message any more"
        )
    return letter


def problem_of(error: ValidationError, whole: str = "") -> str:
    """Return the first problem that pydantic has found: its place in the `whole`, the value and the rule."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    rule = cause if isinstance(cause, ValueError) else first["msg"]
    place = ".".join(map(str, first["loc"])) or whole
    return f"{place}: {first['input']!r:.100}: {rule}"
