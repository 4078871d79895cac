"""A policy's schedule to look at: a table, bars in the terminal, curves in a PNG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

from rich.text import Text

from ..errors import ConfigurationError
from ..spec.duration import spoken
from .printing import Rows, table
from .schedule import Wait

_WIDTH = 50


def schedule_table(waits: Sequence[Wait]) -> Rows:
    """Return the waits as a table."""
    headings = ("retry", "waits", "with jitter", "after the first run")
    rows = ((w.retry, spoken(w.planned), _range(w), spoken(w.since_first)) for w in waits)
    return replace(table(headings, rows), justify="right")


def bars(waits: Sequence[Wait]) -> Iterator[Text]:
    """Yield a bar for each wait: full as far as it surely is, light as far as jitter may stretch it."""
    most = max((w.longest for w in waits), default=0.0) or 1.0
    for wait in waits:
        sure, maybe = (round(_WIDTH * seconds / most) for seconds in (wait.shortest, wait.longest))
        bar = "█" * sure + "░" * (maybe - sure)
        yield Text(f"{wait.retry:>5} │{bar or '▏':<{_WIDTH}} {spoken(wait.planned)}")


def write_png(path: str, schedules: Mapping[str, Sequence[Wait]]) -> None:
    """Draw schedules as curves within what jitter allows; raises OSError and ConfigurationError."""
    try:
        figure = import_module("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    except ModuleNotFoundError:
        raise ConfigurationError("png: matplotlib is not installed: pip install 'ojs-bridge[png]'") from None
    axes = figure.add_subplot()
    for name, waits in schedules.items():
        numbers = [w.retry for w in waits]
        [line] = axes.plot(numbers, [w.planned for w in waits], marker="o", label=name)
        low, high = [w.shortest for w in waits], [w.longest for w in waits]
        axes.fill_between(numbers, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set(xlabel="retry", ylabel="seconds before it", title="Backoff", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _range(wait: Wait) -> str:
    if wait.shortest == wait.longest:
        return ""
    return f"{spoken(wait.shortest)} to {spoken(wait.longest)}"
