"""A plan for people: in lines of a page's width, and in Markdown, for a review."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from ..migration.plan import NOT_KNOWN, Native, Planned
from ..migration.plan.waits import Wait
from ..rules.duration import spoken
from .printing import counted, page_width, plain, show

_OVERRIDES = "A message or a handler can override these numbers (send_with_options, apply_async, Retry)."
_UNKNOWN = (
    "Not known: the plan cannot read how such a task is retried. It is not in the file, and install with the "
    "file leaves it native. install without a file moves it, too, with its native numbers. Begin with the "
    "file, or with policies={}, which moves no task."
)
_OWN = "its native numbers"
_NOTHING = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"
#: The most statements of the summary: with the names beneath them they fit a screen.
_STATEMENTS = 12
#: The hazards that lose jobs, double them or never end them, the worst first; `--all` shows the others.
_SERIOUS = (
    *("stays-native", "no-retries", "reject-without-acks-late", "beyond-visibility-timeout"),
    *("beyond-consumer-timeout", "poison-job", "over-run", "infinite-retries", "retry-when", "expires"),
    *("age-limit", "unused-autoretry", "unused-retry-options"),
)
_HEADINGS = ("task", "runs", "first wait", "last wait", "all waits", "under the policy")


def show_summary(app: str, found: Sequence[Planned]) -> None:
    """Show the changes, the hazards and the unknown, the worst first, with their tasks."""
    if not found:
        show(_NOTHING)
        return
    told = _grouped(found)
    show(*_wrapped(f"{app}: {_counts(found)}"))
    for text, names in [*told.items()][:_STATEMENTS]:
        show("", *_wrapped(text), *_wrapped(_some(names), "    ", style="dim"))
    if any(one.policy is None for one in found):
        show("", *_wrapped(_UNKNOWN))
    rest = f"{len(told) - _STATEMENTS:,} more statements, and every" if len(told) > _STATEMENTS else "every"
    show("", *_wrapped(f"--all shows {rest} task with its numbers, words and lesser hazards. {_OVERRIDES}"))


def show_all(app: str, found: Sequence[Planned]) -> None:
    """Show all statements about each task."""
    if not found:
        show(_NOTHING)
        return
    show(*_wrapped(f"{app}: {_counts(found)}"))
    for one in found:
        show("", *_wrapped(one.name, style="bold"))
        for heading, text in _said(one):
            show(*_wrapped(f"{heading:<10}{text}", "  ", " " * 12))
    if any(one.policy is None for one in found):
        show("", *_wrapped(_UNKNOWN))
    show("", *_wrapped(_OVERRIDES))


def _counts(found: Sequence[Planned]) -> str:
    counts = {
        "do exactly what they do today": sum(one.exact for one in found),
        "change": sum(bool(one.differences) for one in found),
        "are not known, and not in the file": sum(one.policy is None for one in found),
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    ran = sum(one.measured for one in found)
    checked = f"; {ran:,} measured" if ran else ""
    return f"{counted(len(found), 'task', 'tasks')}; under the policies {told}{checked}"


def _grouped(found: Sequence[Planned]) -> dict[str, list[str]]:
    """Return the statements of the summary, the worst first, with the tasks that each is about."""
    ranked = sorted((rank, text, one.name) for one in found for rank, text in _worst(one))
    return _names_by_text((text, name) for _, text, name in ranked)


def _names_by_text(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return each text with the names of the tasks that it is about."""
    names: dict[str, list[str]] = {}
    for text, name in said:
        names.setdefault(text, []).append(name)
    return names


def _worst(one: Planned) -> Iterator[tuple[int, str]]:
    """Yield the statements about a task for the summary, with their ranks."""
    if one.unreadable:
        yield 0, f"cannot be read: {one.unreadable}"
    for hazard in one.hazards:
        if hazard.name in _SERIOUS:
            yield 1 + _SERIOUS.index(hazard.name), f"{hazard.name}: {hazard.text}"
    last = 1 + len(_SERIOUS)
    yield from ((last, f"changes: {text}") for text in one.differences[:1])
    yield from ((last + 1, f"not known: {found}") for found in one.open[:1])


def _some(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    most = 4
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _said(one: Planned) -> Iterator[tuple[str, str]]:
    yield "verdict", one.verdict
    if one.unreadable:
        yield "not read", one.unreadable
    if one.native is not None and one.native.runs == one.native.waits == NOT_KNOWN:
        yield "today", NOT_KNOWN
    elif one.native is not None:
        yield from _today(one.native)
    yield from (("open", str(found)) for found in one.open)
    if one.policy is not None:
        yield "policy", _fields(one.entry) or _OWN
        yield from (("differs", text) for text in one.differences or ("in nothing",))
    else:
        yield "policy", "none: it is not in the file"
    yield from (("hazard", f"{hazard.name}: {hazard.text}") for hazard in one.hazards)


def _today(native: Native) -> Iterator[tuple[str, str]]:
    yield "runs", _runs(native)
    if native.runs != 1:
        yield "waits", _waits(native)
        yield "together", _span(native)
    yield "retried", native.retries
    yield "final", native.final
    yield "end", native.at_the_end


def _wrapped(text: str, first: str = "", other: str | None = None, style: str = "") -> list[Text]:
    """Return a text in the lines of a page. A path that is longer than a line stays whole."""
    beneath = first + "  " if other is None else other
    lines = textwrap.wrap(
        plain(text),
        page_width(),
        initial_indent=first,
        subsequent_indent=beneath,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [Text(line, style, no_wrap=True) for line in lines]


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
    return (one.name, _runs(native), first, last, _span(native), _verdict(one))


def _verdict(one: Planned) -> str:
    if one.policy is None:
        return "not in the file"
    if not one.differences:
        return "exactly the same"
    return counted(len(one.differences), "difference", "differences")


def _sections(found: Sequence[Planned]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield the statements about a fleet under headings: each text with the names of its tasks."""
    kinds: dict[str, Callable[[Planned], Iterable[str]]] = {
        "Today": lambda one: [_in_a_line(one.native)] if one.native else [],
        "Nearest policies": lambda one: [] if one.policy is None else [_fields(one.entry) or _OWN],
        "What differs": lambda one: one.differences,
        "Not known": lambda one: map(str, one.open),
        "Hazards": lambda one: [f"{hazard.name}: {hazard.text}" for hazard in one.hazards],
        "Not read": lambda one: [one.unreadable] if one.unreadable else [],
    }
    for heading, texts in kinds.items():
        if said := _names_by_text((text, one.name) for one in found for text in texts(one)):
            yield heading, said


def _in_a_line(native: Native) -> str:
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
    if any(one.policy is None for one in found):
        yield from ("", _escaped(_UNKNOWN))
    yield from ("", _escaped(_OVERRIDES))


def _cells(cells: Sequence[str], *, escaped: bool = True) -> str:
    return f"| {' | '.join(map(_escaped, cells) if escaped else cells)} |"


def _escaped(text: str) -> str:
    """Return a text that Markdown shows as it is; an underscore within a word does no harm."""
    return re.sub(r"([\\`*\[\]<>|~&#@!]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", plain(text))


def _runs(native: Native) -> str:
    """Return the number of a task's runs."""
    return f"{native.runs:,}" if isinstance(native.runs, int) else native.runs


def _waits(native: Native) -> str:
    """Return the first wait and the last listed wait."""
    first, last = (_waited(native, place) for place in (0, -1))
    return first if first == last else f"{first}; at last {last}"


def _waited(native: Native, place: int) -> str:
    """Return one of the waits."""
    if native.waits == NOT_KNOWN:
        return NOT_KNOWN if native.runs == NOT_KNOWN else "as its code says"
    return _told(native.waits[place]) if native.waits else ""


def _span(native: Native) -> str:
    """Return the sum of all waits."""
    if not isinstance(native.span, Wait):
        return "as its code says" if native.runs != native.span == NOT_KNOWN else native.span
    return _told(native.span) if native.waits else ""


def _told(wait: Wait) -> str:
    """Return a wait with its ends and its mean."""
    words = [spoken(seconds) for seconds in (wait.least, wait.mean, wait.most)]
    return words[1] if len({*words}) == 1 else f"{words[0]} to {words[2]}, mean {words[1]}"


def _fields(policy: Mapping[str, object]) -> str:
    """Return the fields of a policy in a line."""
    return ", ".join(f"{name} {plain(value)}" for name, value in policy.items())
