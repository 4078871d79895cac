"""`ojs-bridge policy`: check retry policies before they are rolled out, and see when their retries come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from typing import Annotated

from rich.text import Text
from typer import Argument, Option

from ..config.policy_files import Named, read_file
from ..config.settings import the_retry
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..spec.duration import spoken
from ..spec.policy import RetryPolicy
from .commands import INCOMPLETE, AsJson, command, group_of, json_of
from .printing import Rows, plain, say, show, show_json, table

group = group_of("policy", "Check retry policies, and see their schedules.")

_FILE = (
    "TOML or JSON: one policy, or a table `policies` of partial ones by task name, and perhaps a `default`."
)
#: The most retries of a policy that are shown; later delays hardly differ.
_MOST = 50
#: The columns of the longest bar.
_WIDTH = 50


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait before a retry, in seconds: as planned, and from `shortest` to `longest` with jitter.

    `since_first` is the sum of the planned ones so far.
    """

    retry: int
    planned: float
    shortest: float
    longest: float
    since_first: float


@command(group, "check")
def check(file: Annotated[str, Argument(metavar="FILE", help=_FILE)], as_json: AsJson = False) -> int | None:
    """Print the problems of each policy in a file, or OK; the exit code is 1 if a policy is invalid."""
    found = read_file(file)
    for named in found:
        _tell(named, as_json=as_json)
    return INCOMPLETE if any(named.problems for named in found) else None


@command(group, "show")
def show_(
    file: Annotated[str | None, Argument(metavar="[FILE]", help=_FILE)] = None,
    policy: Annotated[str | None, Option(metavar="JSON", help="A policy, in place of a file.")] = None,
    png: Annotated[str | None, Option(metavar="PATH", help="Also draw it, as a PNG.")] = None,
    as_json: AsJson = False,
) -> int | None:
    """Show when the retries of a policy come: of a file, --policy, the configured `retry`, or the default."""
    found = _named(file, policy)
    schedules: dict[str, Sequence[Wait]] = {}
    for named in found:
        if named.policy is None:
            _tell(named, as_json=False)
            continue
        schedules[named.name] = [*_schedule(named.policy)]
        _show(named.name, named.policy, schedules[named.name], as_json=as_json)
    if png:
        _write_png(png, schedules)
        say(f"written to {png}")
    return INCOMPLETE if any(named.problems for named in found) else None


def _named(file: str | None, policy: str | None) -> list[Named]:
    if file and policy is not None:
        raise ValueError("policy: either a file or --policy, not both")
    if file:
        return read_file(file)
    try:
        return [Named("policy", RetryPolicy.merge(the_retry(), json_of("policy", policy)))]
    except InvalidRetryPolicy as error:
        raise error.under("policy") if policy is not None else error from None


def _tell(named: Named, *, as_json: bool) -> None:
    if as_json:
        show_json({"name": named.name, "valid": not named.problems, "problems": named.problems})
        return
    for problem in named.problems:
        say(f"{named.name}: {problem}")
    if not named.problems:
        show(f"{named.name}: OK")


def _show(name: str, policy: RetryPolicy, waits: Sequence[Wait], *, as_json: bool) -> None:
    if as_json:
        show_json({"name": name, "policy": policy.to_ojs(), "schedule": [asdict(wait) for wait in waits]})
        return
    fields = ", ".join(f"{field} {plain(value)}" for field, value in policy.to_ojs().items())
    show(f"{name}: {fields}")
    if not waits:
        show("It is run once and never retried.")
        return
    show("", _table(waits), *_bars(waits))
    more = policy.runs - 1 - _MOST
    if more > 0:
        show(f"... and {more:,} more, {spoken(waits[-1].planned)} or longer apart")


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A source of randomness that always draws the same number."""

    number: float

    def random(self) -> float:
        return self.number


def _schedule(policy: RetryPolicy) -> Iterator[Wait]:
    """Yield the waits of a policy, the first fifty."""
    steady = RetryPolicy.merge(policy, {"jitter": False})
    since_first = 0.0
    for n in range(1, min(policy.runs - 1, _MOST) + 1):
        planned = steady.delay(n, rng=_Drawn(0.0))
        since_first += planned
        shortest = policy.delay(n, rng=_Drawn(0.0))
        longest = policy.delay(n, rng=_Drawn(math.nextafter(1.0, 0.0)))
        yield Wait(n, planned, shortest, longest, since_first)


def _table(waits: Sequence[Wait]) -> Rows:
    headings = ("retry", "waits", "with jitter", "after the first run")
    rows = ((w.retry, spoken(w.planned), _range(w), spoken(w.since_first)) for w in waits)
    return replace(table(headings, rows), justify="right")


def _range(wait: Wait) -> str:
    if wait.shortest == wait.longest:
        return ""
    return f"{spoken(wait.shortest)} to {spoken(wait.longest)}"


def _bars(waits: Sequence[Wait]) -> Iterator[Text]:
    """Yield a bar for each wait: full up to the shortest with jitter, light up to the longest."""
    most = max((w.longest for w in waits), default=0.0) or 1.0
    for wait in waits:
        sure, maybe = (round(_WIDTH * seconds / most) for seconds in (wait.shortest, wait.longest))
        bar = "█" * sure + "░" * (maybe - sure)
        yield Text(f"{wait.retry:>5} │{bar or '▏':<{_WIDTH}} {spoken(wait.planned)}")


def _write_png(path: str, schedules: Mapping[str, Sequence[Wait]]) -> None:
    """Draw schedules as curves, with the range of jitter; raises OSError and ConfigurationError."""
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
