"""All there is of one dead letter, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..spec.policy import attempts_told
from ..store import Letter
from .printing import plain, time_of


def details(letter: Letter) -> Iterator[RenderableType]:
    """Yield a letter's facts, its arguments, its policy and its history with backtraces."""
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(letter):
        facts.add_row(Text(name, style="bold"), Text(plain(value)))
    yield facts
    replay = 0
    for error in letter.errors:
        yield ""
        if error.get("replay", 0) != replay:
            replay = error.get("replay", 0)
            yield Text(plain(f"replay {replay}"), style="bold")
        yield from _error(error)


def _facts(letter: Letter) -> Iterator[tuple[str, object]]:
    reading = letter.reading
    yield "id", letter.id
    yield "type", letter.type
    yield "queue", letter.queue
    yield "framework", letter.framework
    yield "attempts", attempts_told(letter.attempt, letter.max_attempts)
    yield "cause", letter.cause
    yield "reason", letter.reason
    yield "enqueued", f"{time_of(letter.created_at)} UTC" if letter.created_at else "unknown"
    yield "died", f"{time_of(letter.discarded_at)} UTC"
    yield "replayed", "never" if not letter.replay_count else f"{letter.replay_count} times"
    if reading.args is None:
        yield "arguments", reading.note or "unknown"
    else:
        yield "args", reading.args
        yield "kwargs", reading.kwargs
    if reading.meta:
        yield "meta", reading.meta
    yield "policy", letter.policy or "unknown"
    if letter.retry:
        yield "of which its own", letter.retry


def _error(error: Any) -> Iterator[RenderableType]:
    code = f" ({error['code']})" if error.get("code") else ""
    head = f"attempt {error.get('attempt')}  {error.get('timestamp', '')}  {error.get('type')}{code}"
    yield Text(plain(head), style="bold")
    yield Text(f"  {plain(error.get('message') or '')}")
    if error.get("details"):
        yield Text(f"  {plain(error['details'])}")
    for line in _lines(error.get("backtrace")):
        yield Text(f"    {plain(line)}", style="dim")


def _lines(backtrace: Any) -> Iterator[str]:
    """Yield the lines of a backtrace, whatever an imported letter has in its place."""
    frames = backtrace if isinstance(backtrace, list) else [] if backtrace is None else [backtrace]
    for frame in frames:
        yield from str(frame).splitlines()
