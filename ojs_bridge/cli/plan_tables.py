"""A plan to look at: a table on a screen, Markdown for a review."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..duration import spoken
from ..migration.plan.planned import Native, Planned, Wait
from .printing import plain, show, table

_HEADINGS = ("task", "runs", "first wait", "last wait", "all waits", "under the policy")
_OVERRIDES = (
    "What a message or a handler says itself (send_with_options, apply_async, Retry) wins over these numbers."
)
_NOTHING = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"


def show_plan(found: Sequence[Planned]) -> None:
    """Show a plan: a row a task, and beneath it what is said of one or of several of them."""
    if not found:
        show(_NOTHING)
        return
    show(table(_HEADINGS, map(_row, found)))
    for heading, said in _sections(found):
        show("", Text(heading, "bold"))
        for text, names in said.items():
            show(*_point(text, _whom(names, found)))
    show("", _OVERRIDES)


def as_markdown(found: Sequence[Planned]) -> str:
    """Return a plan in Markdown."""
    if not found:
        return f"{_NOTHING}\n"
    return "".join(f"{line}\n" for line in _markdown(found))


def _row(one: Planned) -> tuple[str, ...]:
    native = one.native
    if native is None:
        return (one.name, "?", "?", "?", "?", "cannot be read")
    first, last = (_waited(native, place) for place in (0, -1))
    changes = len(one.differences)
    verdict = "exactly the same" if not changes else f"{changes} difference{'s' if changes > 1 else ''}"
    return (one.name, _runs(native), first, last, _span(native), verdict)


def _runs(native: Native) -> str:
    return "without end" if native.runs is None else f"{native.runs:,}"


def _waited(native: Native, place: int) -> str:
    return _told(native.waits[place]) if native.waits else ""


def _span(native: Native) -> str:
    if native.runs is None:
        return "without end"
    return _told(native.span) if native.span and native.waits else ""


def _told(wait: Wait) -> str:
    words = [spoken(seconds) for seconds in (wait.least, wait.mean, wait.most)]
    return words[1] if len({*words}) == 1 else f"{words[0]} to {words[2]}, mean {words[1]}"


def _sections(found: Sequence[Planned]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield what there is to say, under headings: each text with the names of the tasks that it is about."""
    kinds: dict[str, Callable[[Planned], Iterable[str]]] = {
        "Today": lambda one: [_today(one.native)] if one.native else [],
        "Nearest policies": lambda one: [_fields(one.policy)] if one.policy is not None else [],
        "What differs": lambda one: one.differences,
        "Hazards": lambda one: [f"{hazard.name}: {hazard.text}" for hazard in one.hazards],
        "Not read": lambda one: [one.unreadable] if one.unreadable else [],
    }
    for heading, texts in kinds.items():
        said: dict[str, list[str]] = {}
        for one in found:
            for text in texts(one):
                said.setdefault(text, []).append(one.name)
        if said:
            yield heading, said


def _today(native: Native) -> str:
    return f"retried: {native.retries}; not retried: {native.final}; in the end {native.at_the_end}"


def _fields(policy: dict[str, Any]) -> str:
    return ", ".join(f"{name} {plain(value)}" for name, value in policy.items())


def _whom(names: Sequence[str], found: Sequence[Planned]) -> str:
    return "all tasks" if len(names) == len(found) > 1 else ", ".join(names)


def _point(text: str, whom: str) -> Iterator[RenderableType]:
    yield Padding(Text(plain(text), overflow="fold"), (0, 0, 0, 2))
    yield Padding(Text(plain(whom), "dim", overflow="fold"), (0, 0, 0, 4))


def _markdown(found: Sequence[Planned]) -> Iterator[str]:
    yield _cells(_HEADINGS)
    yield _cells(["---"] * len(_HEADINGS), escaped=False)
    for one in found:
        yield _cells(_row(one))
    for heading, said in _sections(found):
        yield from ("", f"### {heading}", "")
        for text, names in said.items():
            yield f"- {_escaped(text)} ({_escaped(_whom(names, found))})"
    yield from ("", _escaped(_OVERRIDES))


def _cells(cells: Sequence[str], *, escaped: bool = True) -> str:
    return f"| {' | '.join(map(_escaped, cells) if escaped else cells)} |"


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is; an underscore within a word does no harm."""
    return re.sub(r"([\\`*\[\]<>|~&#@!]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain(text))
