"""A plan in Markdown, for a review."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..migration.plan import Native, Planned
from .plan_words import NOTHING, OVERRIDES, fields, runs, span, waited
from .printing import plain

_HEADINGS = ("task", "runs", "first wait", "last wait", "all waits", "under the policy")


def as_markdown(found: Sequence[Planned]) -> str:
    """Return a plan in Markdown."""
    if not found:
        return f"{NOTHING}\n"
    return "".join(f"{line}\n" for line in _markdown(found))


def _row(one: Planned) -> tuple[str, ...]:
    native = one.native
    if native is None:
        return (one.name, "?", "?", "?", "?", "cannot be read")
    first, last = (waited(native, place) for place in (0, -1))
    return (one.name, runs(native), first, last, span(native), _verdict(one))


def _verdict(one: Planned) -> str:
    changes = len(one.differences)
    if one.policy is None:
        return "none: it stays as it is"
    return "exactly the same" if not changes else f"{changes} difference{'s' if changes > 1 else ''}"


def _sections(found: Sequence[Planned]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield what there is to say, under headings: each text with the names of the tasks that it is about."""
    kinds: dict[str, Callable[[Planned], Iterable[str]]] = {
        "Today": lambda one: [_today(one.native)] if one.native else [],
        "Nearest policies": lambda one: [fields(one.entry)] if one.entry else [],
        "What differs": lambda one: one.differences,
        "Not known": lambda one: map(str, one.open),
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
    return f"retried: {native.retries}; not retried: {native.final}; in the end: {native.at_the_end}"


def _whom(names: Sequence[str], found: Sequence[Planned]) -> str:
    return "all tasks" if len(names) == len(found) > 1 else ", ".join(names)


def _markdown(found: Sequence[Planned]) -> Iterator[str]:
    yield _cells(_HEADINGS)
    yield _cells(["---"] * len(_HEADINGS), escaped=False)
    for one in found:
        yield _cells(_row(one))
    for heading, said in _sections(found):
        yield from ("", f"### {heading}", "")
        for text, names in said.items():
            yield f"- {_escaped(text)} ({_escaped(_whom(names, found))})"
    yield from ("", _escaped(OVERRIDES))


def _cells(cells: Sequence[str], *, escaped: bool = True) -> str:
    return f"| {' | '.join(map(_escaped, cells) if escaped else cells)} |"


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is; an underscore within a word does no harm."""
    return re.sub(r"([\\`*\[\]<>|~&#@!]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain(text))
