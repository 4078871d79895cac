"""A plan on a screen, at most 80 columns wide: a first page of what matters, or all of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from ..migration.plan import NOT_KNOWN, Native, Planned
from .plan_words import NOTHING, OVERRIDES, fields, runs, span, waits
from .printing import plain, show

_WIDTH = 80
#: How many statements the first page has: with the names beneath them they fit a screen.
_STATEMENTS = 12
#: What loses, doubles or never ends jobs, the worst first; other hazards stand behind `--all`.
_SERIOUS = (
    *("no-retries", "reject-without-acks-late", "beyond-visibility-timeout", "beyond-consumer-timeout"),
    *("poison-job", "over-run", "infinite-retries", "retry-when", "expires", "age-limit", "unused-autoretry"),
)


def show_first_page(app: str, found: Sequence[Planned]) -> None:
    """Show what changes, is hazardous or is not known, the worst first, and how many tasks it is about."""
    if not found:
        show(NOTHING)
        return
    told = _grouped(found)
    show(*_wrapped(f"{app}: {_counts(found)}"))
    for text, names in [*told.items()][:_STATEMENTS]:
        show("", *_wrapped(text), Text("\n".join(_wrapped(_some(names), "    ")), "dim"))
    rest = f"{len(told) - _STATEMENTS:,} more statements, and every" if len(told) > _STATEMENTS else "every"
    show("", *_wrapped(f"--all shows {rest} task with its numbers, words and lesser hazards. {OVERRIDES}"))


def show_all(app: str, found: Sequence[Planned]) -> None:
    """Show all that is said of each task."""
    if not found:
        show(NOTHING)
        return
    show(*_wrapped(f"{app}: {_counts(found)}"))
    for one in found:
        show("", Text("\n".join(_wrapped(one.name)), "bold"))
        for heading, text in _said(one):
            show(*_wrapped(f"{heading:<10}{text}", "  ", " " * 12))
    show("", *_wrapped(OVERRIDES))


def _counts(found: Sequence[Planned]) -> str:
    counts = {
        "do exactly what they do today": sum(one.exact for one in found),
        "change": sum(bool(one.differences) for one in found),
        "get none and stay as they are: what they do is not known": sum(one.policy is None for one in found),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    ran = sum(one.measured for one in found)
    checked = f"; {ran:,} measured" if ran else ""
    return f"{len(found):,} task{'' if len(found) == 1 else 's'}; under the policies {told}{checked}"


def _grouped(found: Sequence[Planned]) -> dict[str, list[str]]:
    """Return the statements of the first page, the worst first, with the tasks that each is about."""
    ranked = sorted((rank, text, one.name) for one in found for rank, text in _worst(one))
    told: dict[str, list[str]] = {}
    for _, text, name in ranked:
        told.setdefault(text, []).append(name)
    return told


def _worst(one: Planned) -> Iterator[tuple[int, str]]:
    """Yield the statements about a task for the first page, with their ranks."""
    if one.unreadable:
        yield 0, f"cannot be read: {one.unreadable}"
    for hazard in one.hazards:
        if hazard.name in _SERIOUS:
            yield 1 + _SERIOUS.index(hazard.name), f"{hazard.name}: {hazard.text}"
    last = 1 + len(_SERIOUS)
    yield from ((last, f"changes: {text}") for text in one.differences[:1])
    yield from ((last + 1, f"not known: {found}") for found in one.open[:1])


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    most = 4
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _said(one: Planned) -> Iterator[tuple[str, str]]:
    yield "verdict", one.verdict
    if one.production:
        yield "shadow", one.production
    if one.unreadable:
        yield "not read", one.unreadable
    if one.native is not None and one.native.runs == one.native.waits == NOT_KNOWN:
        yield "today", NOT_KNOWN
    elif one.native is not None:
        yield from _today(one.native)
    yield from (("open", str(found)) for found in one.open)
    if one.policy is not None:
        yield "policy", fields(one.entry) or "its native numbers"
        yield from (("differs", text) for text in one.differences or ("in nothing",))
    else:
        yield "policy", "none: it stays as it is"
    yield from (("hazard", f"{hazard.name}: {hazard.text}") for hazard in one.hazards)


def _today(native: Native) -> Iterator[tuple[str, str]]:
    yield "runs", runs(native)
    if native.runs != 1:
        yield "waits", waits(native)
        yield "together", span(native)
    yield "retried", native.retries
    yield "final", native.final
    yield "end", native.at_the_end


def _wrapped(text: str, first: str = "", other: str | None = None) -> list[str]:
    """Return a text in lines of at most 80 columns."""
    beneath = first + "  " if other is None else other
    return textwrap.wrap(
        plain(text), _WIDTH, initial_indent=first, subsequent_indent=beneath, break_on_hyphens=False
    )
