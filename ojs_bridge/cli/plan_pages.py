"""A plan for people, in lines of a page's width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from rich.text import Text

from ..migration.plan import NOT_KNOWN, NativeRetries, Planned, WaitRange
from ..rules.duration import spoken
from .printing import counted, page_width, plain, show

_OVERRIDES = "A message or a handler can override these numbers (send_with_options, apply_async, Retry)."
_UNKNOWN = (
    "Not known: the plan cannot read how such a task is retried. It is not in the file, and install with the "
    "file leaves it native. install without a file moves it, too, with its native numbers. Begin with the "
    "file, or with policies={}, which moves no task."
)
_NOTHING = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"
#: The most statements of the summary: with the names beneath them they fit a screen.
_STATEMENTS = 12
#: The most names of tasks beneath a statement.
_NAMES = 4
#: The hazards that lose jobs, double them or never end them, the worst first; `--all` shows the others.
_SERIOUS = (
    *("stays-native", "no-retries", "reject-without-acks-late", "beyond-visibility-timeout"),
    *("beyond-consumer-timeout", "poison-job", "over-run", "infinite-retries", "retry-when", "expires"),
    *("age-limit", "unused-autoretry", "unused-retry-options"),
)


def show_summary(app: str, found: Sequence[Planned]) -> None:
    """Show the changes, the hazards and the unknown, the worst first, with their tasks."""
    if not found:
        show(_NOTHING)
        return
    show(*_wrapped(f"{app}: {_counts(found)}"))
    names_by_text: dict[str, list[str]] = {}
    for _, text, name in sorted((rank, text, one.name) for one in found for rank, text in _worst(one)):
        names_by_text.setdefault(text, []).append(name)
    for text, names in [*names_by_text.items()][:_STATEMENTS]:
        more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
        show("", *_wrapped(text), *_wrapped(", ".join(names[:_NAMES]) + more, "    ", style="dim"))
    if any(one.policy is None for one in found):
        show("", *_wrapped(_UNKNOWN))
    hidden = len(names_by_text) - _STATEMENTS
    rest = f"{hidden:,} more statements, and every" if hidden > 0 else "every"
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
        fields = ", ".join(f"{name} {plain(value)}" for name, value in one.entry.items())
        yield "policy", fields or "its native numbers"
        yield from (("differs", text) for text in one.differences or ("in nothing",))
    else:
        yield "policy", "none: it is not in the file"
    yield from (("hazard", f"{hazard.name}: {hazard.text}") for hazard in one.hazards)


def _today(native: NativeRetries) -> Iterator[tuple[str, str]]:
    yield "runs", f"{native.runs:,}" if isinstance(native.runs, int) else native.runs
    if native.runs != 1:
        first, last = (_waited(native, place) for place in (0, -1))
        yield "waits", first if first == last else f"{first}; at last {last}"
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


def _waited(native: NativeRetries, place: int) -> str:
    """Return one of the waits."""
    if native.waits == NOT_KNOWN:
        return NOT_KNOWN if native.runs == NOT_KNOWN else "as its code says"
    return _told(native.waits[place]) if native.waits else ""


def _span(native: NativeRetries) -> str:
    """Return the sum of all waits."""
    if not isinstance(native.span, WaitRange):
        return "as its code says" if native.runs != native.span == NOT_KNOWN else native.span
    return _told(native.span) if native.waits else ""


def _told(wait: WaitRange) -> str:
    """Return a wait with its ends and its mean."""
    words = [spoken(seconds) for seconds in (wait.least, wait.mean, wait.most)]
    return words[1] if len({*words}) == 1 else f"{words[0]} to {words[2]}, mean {words[1]}"
