"""The redaction: it hides secrets of dead letters and parked jobs from their readers."""

from __future__ import annotations

import html
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import quote

from ..errors import ConfigurationError
from ..messages import Reading, read_message
from ..rules.job import parse_time

Redaction: TypeAlias = Collection[str] | Callable[[str, Any], Any]
"""Names of arguments, or a callable that gets an argument's name and value, and returns the value to show.

A positional argument whose parameter is not known has its place for a name, such as "0".
"""

HIDDEN = "[redacted]"
#: A secret that is shorter is not taken out of other texts: it is too common. So is a shorter part of one,
#: except at a cut. A piece is what is looked for first.
_TELLING, _PART, _PIECE = 4, 20, 10
#: Where the secrets of a message are longer in all, they are not looked for: each text is hidden whole.
_MOST = 500_000
_TIMES = frozenset({"timestamp", "occurred_at", "created_at", "next_retry_at"})
_DIGITS = re.compile("[0-9A-Fa-f]{0,7}")
_QUOTES = "\\'\"`"
#: All that differs between the forms of one text. A backslash that escapes nothing is as good as none.
_WRITTEN = re.compile(
    r"""
    (?P<space> \s | \+ | \\+[nrtvf] )
    | (?P<code> \\+(?:x[0-9A-Fa-f]{2} | u[0-9A-Fa-f]{4} | U[0-9A-Fa-f]{8}) | %[0-9A-Fa-f]{2} )
    | (?P<cut> (?: \\+(?:[xuU][0-9A-Fa-f]{0,7})? | %[0-9A-Fa-f]? )? (?: …\[cut\] | … | \.{3,} ) )
    | (?P<html> &(?:\#[0-9]{1,7} | \#[xX][0-9A-Fa-f]{1,6} | [A-Za-z]{2,8}); )
    | (?P<quote> ['"`]+ | \\+ )
    | (?P<astral> [\U00010000-\U0010ffff] )
    """,
    re.VERBOSE,
)


class Redactor:
    """Applies a Redaction; false if there is none. Raises ConfigurationError for any other value."""

    def __init__(self, redaction: Redaction | None) -> None:
        self._names: Collection[str] = ()
        if callable(redaction):
            self._by: Callable[[str, Any], Any] = redaction
        elif isinstance(redaction, str) or not isinstance(redaction, Collection | None):
            raise ConfigurationError(
                f"redact: {redaction!r} is neither a collection of argument names nor a callable"
            )
        else:
            self._names = frozenset(name.casefold() for name in redaction or ())
            self._by = self._by_name
        self._is_on = bool(redaction)

    def __bool__(self) -> bool:
        return self._is_on

    def message(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], Secrets]:
        """Return a kept message as it may be shown, and the secrets to be taken out of all other texts."""
        whole = read_message(message)
        secrets = self.secrets(whole)
        return {**self.told(whole, secrets).to_ojs(), "redacted": True}, secrets

    def told(self, whole: Reading, secrets: Secrets) -> Reading:
        """Return a message as it may be shown, without its secrets in any other argument."""
        shown = self.reading(whole)
        # A callable may show the beginning of a secret.
        fields = {"args": shown.args, "kwargs": shown.kwargs, "meta": shown.meta}
        parts = secrets.out_of(fields, at_cuts=False)
        hidden = [name for name, value in parts.items() if value != getattr(whole, name)]
        return replace(shown, **parts, hidden=hidden)

    def reading(self, reading: Reading) -> Reading:
        """Return a message as it may be shown."""
        args = None
        if reading.args is not None:
            names = [*reading.names, *map(str, range(len(reading.names), len(reading.args)))]
            args = [self._shown(name, value) for name, value in zip(names, reading.args, strict=False)]
        kwargs = None if reading.kwargs is None else self._mapping(reading.kwargs)
        return Reading(args, kwargs, self._mapping(reading.meta), reading.names, reading.note)

    def secrets(self, reading: Reading) -> Secrets:
        """Return the texts that the redaction hides, to be taken out of errors as well."""
        return Secrets(self._hidden(reading))

    def lost(self, before: Reading, after: Reading) -> Secrets:
        """Return the secrets of a message that it has no more after a change, so that nothing hides them."""
        return Secrets(self._hidden(before) - self._hidden(after))

    def _hidden(self, reading: Reading) -> set[str]:
        shown = self.reading(reading)
        pairs = [(reading.args, shown.args), (reading.kwargs, shown.kwargs), (reading.meta, shown.meta)]
        return {text for before, after in pairs for text in _hidden(before, after)}

    def names_hidden(self, name: str) -> bool:
        """Return whether an argument of this name is always hidden; what a callable hides is not known."""
        return name.casefold() in self._names

    def would_open(self, name: str, to: str, value: Any) -> bool:
        """Return whether what is hidden of an argument would be shown under another name."""
        shown = self._shown(name, value)
        return bool(shown not in (value, self._shown(to, value)))

    def _by_name(self, name: str, value: Any) -> Any:
        return HIDDEN if name.casefold() in self._names else value

    def _mapping(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._shown(str(name), value) for name, value in values.items()}

    def _shown(self, name: str, value: Any) -> Any:
        shown = self._by(name, value)
        if shown is not value:
            return shown
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return [self._shown(name, item) for item in value]
        return value


class Secrets:
    """Texts to be taken out of other texts, in every form in which code may have written them.

    That is, as `repr`, JSON, bytes, a URL or HTML write them. Of a long secret a part is taken out, too, and
    so is what a cut has left of any. The time grows with the lengths of the secrets and of the texts alone.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        forms = {form for text in texts for form in _forms_of(text)}
        known = {plain for plain in (_Plain(form).text.strip() for form in forms) if len(plain) >= _TELLING}
        self._all = sum(map(len, known)) > _MOST
        long = [] if self._all else [text for text in known if len(text) >= _PART]
        short = [] if self._all else [text for text in known if len(text) < _PART]
        self._parts = {text[n : n + _PART] for text in long for n in range(len(text) - _PART + 1)}
        # One of each eleven places of a text is the first of such a piece, if the text has a part there.
        self._pieces = {text[n : n + _PIECE] for text in long for n in range(len(text) - _PIECE + 1)}
        self._short, self._sizes = {*short}, sorted({len(text) for text in short})
        self._first = {text[0] for text in short}
        rests = [(text, size) for text in known for size in range(_TELLING, min(len(text), _PART))]
        self._heads = set() if self._all else {text[:size] for text, size in rests}
        self._tails = set() if self._all else {text[-size:] for text, size in rests}

    def out_of(self, value: Any, *, at_cuts: bool = True) -> Any:
        """Return a JSON value without the secrets; the times of an error entry stay."""
        if isinstance(value, str):
            return self._without(value, at_cuts)
        out_of = partial(self.out_of, at_cuts=at_cuts)
        if isinstance(value, Mapping):
            return {
                out_of(name): item if name in _TIMES and _is_time(item) else out_of(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [out_of(item) for item in value]
        return value

    def _without(self, text: str, at_cuts: bool) -> str:
        if self._all:
            return HIDDEN
        plain = _Plain(text)
        shown, done = list[str](), 0
        for start, end in _joined(self._found(plain, plain.cuts if at_cuts else ())):
            first, last = plain.begin(start), plain.end(end - 1)
            shown += [text[done:first], HIDDEN]
            done = last
        return "".join([*shown, text[done:]])

    def _found(self, plain: _Plain, cuts: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the places of secrets, of their parts, and of what a cut has left of them."""
        text = plain.text
        for at in range(0, len(text), _PART - _PIECE + 1) if self._pieces else ():
            if text[at : at + _PIECE] in self._pieces:
                for start in range(max(at + _PIECE - _PART, 0), at + 1):
                    if text[start : start + _PART] in self._parts:
                        yield start, start + _PART
        places = (at for at, char in enumerate(text) if char in self._first) if self._first else ()
        yield from (
            (at, at + size) for at in places for size in self._sizes if text[at : at + size] in self._short
        )
        for start, end, least in cuts:
            for size in range(least, min(start + 1, _PART)):
                if text[start - size : start] in self._heads:
                    yield start - size, start
            # The cut may have left the last digits of an escape.
            for first in range(end, _DIGITS.match(text, end).end() + 1):  # type: ignore[union-attr]
                sizes = (n for n in range(least, _PART) if text[first : first + n] in self._tails)
                yield from ((end, first + size) for size in sizes)


class _Plain:
    """A text as all its written forms have it: without escapes and quotes, in units of UTF-16.

    `cuts` are the places of marks such as `…`, with the fewest characters that a cut secret has left there.
    """

    def __init__(self, text: str) -> None:
        parts, self.cuts, at, size = list[str](), list[tuple[int, int, int]](), 0, 0
        #: Where runs of the plain text begin, there and in the text; and where those of the text end.
        self._starts, self._runs = list[int](), list[tuple[int, int, bool]]()
        for found in _WRITTEN.finditer(text):
            for run, start, end in (
                (text[at : found.start()], at, found.start()),
                (_unwritten(found), found.start(), found.end()),
            ):
                plain = run if not (run == " " and parts and parts[-1].endswith(" ")) else ""
                if plain:
                    self._starts.append(size)
                    self._runs.append((start, end, end == found.start()))
                    parts.append(plain)
                    size += len(plain)
            if found.lastgroup == "cut":
                self.cuts.append((size - 1, size, _TELLING))
            at = found.end()
        if at < len(text):
            self._starts.append(size)
            self._runs.append((at, len(text), True))
            parts.append(text[at:])
        self.text = "".join(parts)
        self.cuts.append((len(self.text), len(self.text), _PIECE))

    def begin(self, place: int) -> int:
        """Return where the written form of a plain character begins in the text."""
        run = bisect_right(self._starts, place) - 1
        start, _, is_itself = self._runs[run]
        return start + place - self._starts[run] if is_itself else start

    def end(self, place: int) -> int:
        """Return where the written form of a plain character ends in the text."""
        run = bisect_right(self._starts, place) - 1
        _, end, is_itself = self._runs[run]
        return self.begin(place) + 1 if is_itself else end


def _forms_of(text: str) -> Iterator[str]:
    """Yield a text as it is written where that cannot be read back alone: as bytes, in a URL, in HTML."""
    yield text
    yield text.encode("utf-8", "replace").decode("latin-1")
    yield quote(text, safe="", errors="replace")
    yield html.escape(text)


def _unwritten(found: re.Match[str]) -> str:
    """Return the plain form of an escape, a quote or a space."""
    text = found.group()
    match found.lastgroup:
        case "cut":
            return "…"
        case "space":
            return " "
        case "code":
            code = int(text.lstrip("\\%xuU"), 16)
            made = chr(code) if code <= sys.maxunicode else text
        case "html":
            made = html.unescape(text)
        case "astral":
            made = text
        case _:
            return ""
    if made.isspace() or made == "+":
        return " "
    if made in _QUOTES:
        return ""
    units = made.encode("utf-16-le", "surrogatepass")
    return "".join(chr(units[n] | units[n + 1] << 8) for n in range(0, len(units), 2))


def _joined(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield spans that neither meet nor overlap."""
    last = (0, 0)
    for start, end in sorted(spans):
        if start > last[1]:
            yield from [last] if last[1] else []
            last = start, end
        last = (min(last[0], start) if last[1] else start), max(last[1], end)
    yield from [last] if last[1] else []


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(parse_time(value))
    except ValueError:
        return False


def _hidden(before: Any, after: Any) -> Iterator[str]:
    """Yield the texts of a value that the redacted value has not in the same place."""
    if isinstance(before, Mapping):
        rest = after if isinstance(after, Mapping) else {}
        for name, value in before.items():
            yield from _hidden(value, rest.get(name))
    elif isinstance(before, list | tuple):
        items = after if isinstance(after, list) and len(after) == len(before) else [None] * len(before)
        for value, shown in zip(before, items, strict=True):
            yield from _hidden(value, shown)
    elif before is not None and before is not True and before is not False and before != after:
        yield str(before)
