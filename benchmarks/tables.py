"""The tables of `docs/explanation/speed.md`, and their rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.runs import Measured, Result

if TYPE_CHECKING:
    from benchmarks.rows import Group

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "speed.md"
STORES = {
    "redis": ", store on the same Valkey",
    "sqlite": ", store SQLite",
    "postgres": ", store PostgreSQL",
    "traced": ", OpenTelemetry",
}


@dataclass(frozen=True)
class Table:
    """A table, known by its columns."""

    columns: tuple[str, ...]

    @property
    def head(self) -> list[str]:
        """The lines of its head."""
        return [f"| {' | '.join(self.columns)} |", f"|---|{'---:|' * (len(self.columns) - 1)}"]


_PARTS = ("CPU a job, µs", "CPU", "system calls a job", "switches a job")
WORK = Table(("Jobs that wait", "jobs a second", "time", *_PARTS, "time and CPU of no store"))
TRACED = Table(("One run in a hundred sampled", "jobs a second", "time", *_PARTS))
IDLE = Table(("Idle worker", "system calls a second", "switches a second", "CPU, ms a second"))
DISTANCE = Table(("2 ms to servers and back", "jobs a second", "time", "trips a job", *_PARTS[:2]))
WRITTEN = Table(("What PostgreSQL writes", "commits a job", "bytes of its log a job"))
TABLES = (WORK, IDLE, DISTANCE, TRACED, WRITTEN)


def lines_of(group: Group, measured: Mapping[str, Measured]) -> Iterator[tuple[Table, list[str]]]:
    """Yield the lines of a group, by the tables that they belong to."""
    yield group.table, list(_pairs_of(group, measured))
    if group.table is WORK and "postgres" in measured:
        rounds = measured["postgres"].rounds
        commits, log = (
            statistics.median(of(result) / result.amount for result in rounds)
            for of in (attrgetter("commits"), attrgetter("log"))
        )
        yield WRITTEN, [f"| {group.name} | {commits:.2f} | {log:,.0f} |"]


def _pairs_of(group: Group, measured: Mapping[str, Measured]) -> Iterator[str]:
    """Yield a line for each side against the first."""
    base, *others = measured
    for side in others:
        pair = _Pair(measured[base], measured[side])
        if group.table is IDLE:
            cells = [pair.calls(), pair.a_piece(_switches, 1), pair.a_piece(_cpu, 1e3)]
        elif group.table is DISTANCE:
            cells = [pair.rates(), pair.ratio(_seconds), pair.a_piece(_trips, 1), *pair.cpu()]
        else:
            cells = [
                pair.rates(),
                pair.ratio(_seconds),
                *pair.cpu(),
                pair.calls(),
                pair.a_piece(_switches, 1),
            ]
        if group.table is WORK:
            cells.append("")
            if side in STORES and "bridge" in measured:
                pair = _Pair(measured["bridge"], measured[side])
                cells[-1] = f"{pair.ratio(_seconds, spread=False)}, {pair.ratio(_cpu, spread=False)}"
        yield f"| {' | '.join([group.name + STORES.get(side, ''), *cells])} |"


def refreshed(page: str, table: Table, lines: Sequence[str]) -> str:
    """Return the page with these rows in the place of those of the same names, or at the end of the table."""
    head = "\n".join(table.head) + "\n"
    at = page.index(head) + len(head)
    old = list(takewhile(lambda line: line.startswith("|"), page[at:].splitlines(keepends=True)))
    rows = {line.split(" | ")[0]: line for line in [*old, *(f"{line}\n" for line in lines)]}
    return page[:at] + "".join(rows.values()) + page[at + len("".join(old)) :]


@dataclass(frozen=True)
class _Pair:
    """The results of two sides, round by round."""

    first: Measured
    second: Measured

    def a_piece(self, of: Callable[[Result], float], times: float) -> str:
        """Return the medians of both sides."""
        medians = [
            statistics.median(of(result) * times for result in side.rounds)
            for side in (self.first, self.second)
        ]
        return " → ".join(f"{median:,.{0 if median >= 100 else 1}f}" for median in medians)

    def rates(self) -> str:
        return self.a_piece(_rate, 1)

    def cpu(self) -> tuple[str, str]:
        return self.a_piece(_cpu, 1e6), self.ratio(_cpu)

    def ratio(self, of: Callable[[Result], float], *, spread: bool = True) -> str:
        """Return the median of the ratios of all rounds, with the least and the most."""
        pairs = sorted(of(b) / of(a) for a, b in zip(self.first.rounds, self.second.rounds, strict=True))
        median = f"{statistics.median(pairs):.2f}"
        return f"**{median}** ({pairs[0]:.2f} to {pairs[-1]:.2f})" if spread else median

    def calls(self) -> str:
        sides = [side.calls for side in (self.first, self.second) if side.calls]
        if any(side.calls is None for side in sides):
            return "needs perf or strace"
        return " → ".join(f"{(side.calls or 0) / side.amount:.1f}" for side in sides)


def _rate(result: Result) -> float:
    return result.amount / result.seconds


def _seconds(result: Result) -> float:
    return result.seconds / result.amount


def _cpu(result: Result) -> float:
    return result.cpu / result.amount


def _switches(result: Result) -> float:
    return result.switches / result.amount


def _trips(result: Result) -> float:
    return result.trips / result.amount
