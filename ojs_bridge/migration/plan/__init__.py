"""The plan of a fleet: each task today, the policy nearest to it, its hazards, and the check by a run."""

from __future__ import annotations

import codecs
import gzip
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, cast

from ...config.policies import EntryFields
from ...errors import ConfigurationError, NotExpressible
from ...rules.notations import format_interval, matches, spoken
from ...rules.policy import LARGEST, AnyPartial, RetryPolicy, partial_to_ojs

Endless: TypeAlias = Literal["endless"]
NotKnown: TypeAlias = Literal["not known"]
#: The number of a job's runs.
Runs: TypeAlias = int | Endless | NotKnown

ENDLESS: Endless = "endless"
NOT_KNOWN: NotKnown = "not known"

#: The number of waits that a plan lists. The span covers all waits.
MOST = 20
#: All later waits are as long as this one.
SETTLED = 1000
#: A measured task is stopped after so many runs. One that has more runs is only read.
LIMIT = 50
#: Frameworks and brokers round waits to milliseconds, and a broker's are rounded up.
_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class Open:
    """A line of code, or an option, that leaves the retries of a task open."""

    #: A place such as `shop/tasks.py:12`.
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def once(lines: Iterable[Open]) -> tuple[Open, ...]:
    """Return each line once, with its first reason."""
    first: dict[str, Open] = {}
    for line in lines:
        first.setdefault(line.where, line)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class NativeRetries:
    """A task under its framework alone; no value is a guess."""

    #: The largest number of runs, the first run included.
    runs: Runs
    #: The waits before retry 1, 2 and so on, MOST of them at most.
    waits: tuple[WaitRange, ...] | NotKnown
    #: The errors that are retried, in words.
    retries: str
    #: The errors that are not retried, in words.
    final: str
    #: The end of a job that has failed for good, in words.
    at_the_end: str
    #: All waits together.
    span: WaitRange | Endless | NotKnown = NOT_KNOWN

    @classmethod
    def computed(
        cls, runs: Runs, wait: Callable[[int], WaitRange], *, retries: str, final: str, at_the_end: str
    ) -> NativeRetries:
        """Return a task that waits `wait(n)` before retry n."""
        listed = min(runs - 1, MOST) if isinstance(runs, int) else MOST
        waits = tuple(wait(n) for n in range(1, listed + 1))
        span = _span(runs, wait) if isinstance(runs, int) else runs
        return cls(runs, waits, retries, final, at_the_end, span)

    @classmethod
    def unknown(cls) -> NativeRetries:
        """Return a task whose retries are not known."""
        return cls(NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


def _span(runs: int, wait: Callable[[int], WaitRange]) -> WaitRange:
    one_by_one = min(runs - 1, SETTLED)
    total = sum((wait(n) for n in range(1, one_by_one + 1)), WaitRange.of(0.0))
    return total + wait(SETTLED) * (runs - 1 - one_by_one) if runs - 1 > SETTLED else total


@dataclass(frozen=True, slots=True)
class Hazard:
    """A hazard of a task: a kebab-case name, and one sentence with the value and its consequence."""

    name: str
    text: str
    #: Whether the task does something else under the bridge for it.
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """One task or actor of a plan."""

    name: str
    #: None where the task could not be read.
    native: NativeRetries | None = None
    #: A partial policy in OJS's JSON form. With None, the task stays with its framework.
    policy: dict[str, Any] | None = None
    #: The differences between the policy and today, sentence by sentence.
    differences: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    #: The `retry_on` for `install`. With None, the task's own options say which failures are retried.
    retry_on: str | None = None
    #: The `acks_late` for `install`, which keeps a Celery task's job when its worker is killed.
    acks_late: bool | None = None
    #: The lines that leave the retries open.
    open: tuple[Open, ...] = ()
    #: The reason why the task could not be read.
    unreadable: str = ""
    #: Whether the task was also run, natively and under the policy.
    measured: bool = False

    @property
    def verdict(self) -> str:
        """The source of the numbers: `measured`, `read`, or `not known`."""
        if self.open or self.unreadable:
            return NOT_KNOWN
        return "measured" if self.measured else "read"

    @property
    def entry(self) -> EntryFields:
        """The task's entry among the `policies` of an `install`: the policy, and what stands beside it."""
        said = {"acks_late": self.acks_late, "retry_on": self.retry_on, **(self.policy or {})}
        return cast("EntryFields", {name: value for name, value in said.items() if value is not None})

    @property
    def exact(self) -> bool:
        """Whether the task does under the policy exactly what it does today."""
        return self.policy is not None and not self.differences and not any(x.differs for x in self.hazards)


def planned(
    known: Iterable[str], patterns: Collection[str], noun: str, read: Callable[[str], Planned]
) -> list[Planned]:
    """Return the plans of the names that match a pattern, sorted; of all names without patterns.

    Raises ConfigurationError for a pattern that names no `noun`. An error in one `read` hides no other task.
    """
    names = sorted(known)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ConfigurationError(f"names: {pattern!r} names no {noun}")
    plans = []
    for name in (n for n in names if not patterns or any(matches(n, x) for x in patterns)):
        try:
            plans.append(read(name))
        except Exception as error:  # noqa: BLE001 - the options are the user's code
            plans.append(Planned(name, unreadable=f"{type(error).__name__}: {error}"))
    return plans


def already_ojs(name: str, has: str, policy: RetryPolicy, partial: AnyPartial | None) -> Planned:
    """Return the plan of a task with a partial policy of its own, which resolves to `policy`."""
    kept = policy.on_exhaustion == "dead_letter"
    endless = policy.max_attempts >= LARGEST
    native = NativeRetries.computed(
        ENDLESS if endless else policy.runs,
        lambda n: policy_wait(policy, n),
        retries="every error, under the bridge",
        final=", ".join(policy.non_retryable_errors) or "nothing",
        at_the_end="it is kept as a dead letter" if kept else "it is discarded",
    )
    text = f"it {has} already, with {_attempts_of(policy)}: there is nothing to move"
    hazard = Hazard("already-moved", text)
    attempts = {} if endless else {"max_attempts": policy.max_attempts}
    try:
        return Planned(name, native, {**attempts, **partial_to_ojs(partial)}, (), (hazard,))
    except NotExpressible as error:
        return Planned(name, native, attempts, (str(error),), (hazard,))


def moved_already(policy: RetryPolicy, framework: str) -> Hazard:
    """Return the hazard of a task that an `install` has moved."""
    attempts = _attempts_of(policy)
    text = f"it is under the bridge already, with {attempts}: this is what {framework} alone would do"
    return Hazard("already-moved", text)


def _attempts_of(policy: RetryPolicy) -> str:
    return "no max_attempts" if policy.max_attempts >= LARGEST else f"max_attempts={policy.runs}"


def counting(runs: Runs) -> Hazard:
    """Return the hazard of `max_retries`, which counts retries, where `max_attempts` counts runs."""
    if not isinstance(runs, int):
        return Hazard(
            "infinite-retries",
            "max_retries=None retries a job without end, and so does the bridge: set max_attempts; a job in "
            "flight that has already run that often ends at its next failure, or begins afresh under "
            'install(in_flight="afresh")',
        )
    retries = f"max_retries={runs - 1} counts retries, so that a job runs {runs} times"
    return Hazard("counts-retries", f"{retries}; max_attempts counts runs: {runs}, not {runs - 1}")


def pickled(subject: str) -> Hazard:
    """Return the hazard of pickled messages."""
    return Hazard(
        "pickle", f"{subject}: anyone who writes to the broker or the dead letters runs code in the workers"
    )


_RAN: list[str] = []
#: A pickle that calls `_note` when it is read, and does nothing else.
_PROBE = b"cojs_bridge.migration.plan\n_note\n(tR."


def _note() -> None:
    _RAN.append("run")


def unpickles(decode: Callable[[bytes], object]) -> bool:
    """Return whether a decoder runs the code of a pickle that anyone could have made, perhaps compressed."""
    _RAN.clear()
    coded = (codecs.encode(_PROBE, name) for name in ("base64", "hex", "zlib", "bz2"))
    for sent in (_PROBE, gzip.compress(_PROBE), *coded):
        with suppress(Exception):
            decode(sent)
    return bool(_RAN)


class Injected(Exception):
    """The injected failure of a task that names no error of its own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A job that failed at every run: the number of its runs, the seconds between them, and its end."""

    runs: int
    waits: tuple[float, ...]
    end: str


#: A task's name, its measures under a policy, and the policy.
Moved: TypeAlias = tuple[str, tuple[Measured, RetryPolicy]]
#: Moves tasks, by their entries, to a bridge with the store at a URL, and measures them there.
Moving: TypeAlias = Callable[[str, Mapping[str, EntryFields]], Iterator[Moved]]


def measure(
    planned_tasks: Sequence[Planned], native: Callable[[str], Measured], move: Moving
) -> list[Planned]:
    """Return a plan after measuring its tasks, natively and then under their policies."""
    names = measurable(planned_tasks)
    today = {name: native(name) for name in names}
    with TemporaryDirectory() as folder:
        entries = {one.name: one.entry for one in planned_tasks if one.name in names}
        then = dict(move(f"sqlite:///{folder}/ojs.db", entries))
    return [
        _judged(one, today[one.name], *then[one.name]) if one.name in names else one for one in planned_tasks
    ]


def measurable(planned_tasks: Iterable[Planned]) -> list[str]:
    """Return the names of the tasks that can be measured with an injected failure.

    A task whose own code asks for retries never reaches that code: its policy is empty, or has `retry_on`.
    """
    return [
        one.name
        for one in planned_tasks
        if one.native
        and (one.native.runs == 1 or (one.policy and not one.retry_on))
        and not (one.open or one.native.waits == NOT_KNOWN)
    ]


def _judged(one: Planned, native: Measured, moved: Measured, policy: RetryPolicy) -> Planned:
    today = one.native or NativeRetries.unknown()
    if wrong := _unlike(native, today.runs, today.waits):
        line = Open("measured", f"{wrong}, not as it was read")
        return replace(one, native=NativeRetries.unknown(), policy=None, differences=(), open=(line,))
    waits = tuple(policy_wait(policy, n) for n in range(1, min(policy.runs, LIMIT + 1)))
    differences = [f"measured under the policy: {x}" for x in [_unlike(moved, today.runs, waits)] if x]
    if native.end != moved.end:
        differences.append(f"measured: it ends in {moved.end} under the policy, and in {native.end} today")
    return replace(one, measured=bool(native.end), differences=(*differences, *one.differences))


def _unlike(measured: Measured, runs: object, waits: tuple[WaitRange, ...] | NotKnown) -> str:
    """Return the first measure that is not as expected, in words."""
    if measured.runs != (min(runs, LIMIT) if isinstance(runs, int) else LIMIT):
        return f"it ran {measured.runs:,} times"
    if waits == NOT_KNOWN:
        return ""
    for n, (seconds, wait) in enumerate(zip(measured.waits, waits, strict=False), 1):
        if not wait.least - _SLACK <= seconds <= wait.most + _SLACK:
            return f"retry {n} waited {seconds:g} s"
    return ""


def raised_for(classes: Iterable[type[BaseException]]) -> BaseException:
    """Return an error of the first class, made without its constructor."""
    cls = next(iter(classes), Injected)
    return cls.__new__(cls, "injected by ojs-bridge plan --verify")


#: Waits that differ by a millisecond or a thousandth are the same.
_CLOSE = {"rel_tol": 1e-3, "abs_tol": 1e-3}
_DRAWS = 400
#: One over the golden ratio: the fractions of its multiples are evenly spread, for any number of them.
_GOLDEN = 0.6180339887498949
#: The bounds of a proposed wait, in seconds. No policy has a wait of 0 s.
_SHORTEST, _LONGEST = 0.001, 365 * 86_400.0

#: Dramatiq's largest `max_backoff`, in milliseconds.
DRAMATIQ_MAX_BACKOFF = 7 * 86_400_000
#: The mean of its jitter's factor: from 1 to 2, and at the cap from 0.5 to 1.
DRAMATIQ_MEAN = 1.5
DRAMATIQ_MEAN_AT_CAP = 0.75
_LARGEST_EXPONENT = 32
_LARGEST_SHIFT = 1_000


@dataclass(frozen=True, slots=True)
class WaitRange:
    """The seconds before a retry, or before several retries together: the least, the mean, the most."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, seconds: float) -> WaitRange:
        """Return a wait that is always the same."""
        return cls(seconds, seconds, seconds)

    def __add__(self, other: WaitRange) -> WaitRange:
        return WaitRange(self.least + other.least, self.mean + other.mean, self.most + other.most)

    def __mul__(self, times: int) -> WaitRange:
        return WaitRange(self.least * times, self.mean * times, self.most * times)


def celery_wait(n: int, factor: int, maximum: int, *, jitter: bool) -> WaitRange:
    """Return Celery's wait before retry n under `retry_backoff`, in whole seconds.

    With jitter Celery draws from 0 to `factor * 2**(n-1)`, both included.
    """
    longest = float(max(min(maximum, factor * 2 ** min(n - 1, _LARGEST_SHIFT)), 0))
    return WaitRange(0.0, longest / 2, longest) if jitter else WaitRange.of(longest)


def dramatiq_wait(n: int, min_backoff: float, max_backoff: float) -> WaitRange:
    """Return Dramatiq's wait before retry n; both arguments are in milliseconds.

    Dramatiq draws between once and twice `min_backoff * 2**(n-1)`. Instead of a draw above the cap it draws
    between half the cap and the cap.
    """
    cap = max(min(max_backoff, DRAMATIQ_MAX_BACKOFF), 0.0) / 1000
    base = max(min_backoff, 0.0) / 1000 * 2.0 ** min(n - 1, _LARGEST_EXPONENT)
    if 2 * base <= cap:
        return WaitRange(base, DRAMATIQ_MEAN * base, 2 * base)
    kept = max(cap - base, 0.0) / base
    mean = kept * (base + cap) / 2 + (1 - kept) * DRAMATIQ_MEAN_AT_CAP * cap
    return WaitRange(min(base, cap / 2), mean, cap)


class _Draws:
    """A source of randomness with given first draws; the later draws are evenly spread."""

    def __init__(self, *first: float) -> None:
        self._first = [*first]
        self._last = first[-1] or 0.5

    def random(self) -> float:
        """Return the next draw. All sources together spread theirs evenly, one by one and in pairs."""
        if self._first:
            return self._first.pop(0)
        self._last = (self._last * _DRAWS * _GOLDEN) % 1
        return self._last


def policy_wait(policy: RetryPolicy, n: int) -> WaitRange:
    """Return a policy's wait before retry n; raises the error of a custom strategy or jitter."""
    if policy.jitter is False:
        return WaitRange.of(policy.delay(n))
    ends = (0.0, math.nextafter(1.0, 0.0))
    extremes = [policy.delay(n, rng=_Draws(*draws)) for draws in product(ends, ends)]
    delays = [policy.delay(n, rng=_Draws((i + 0.5) / _DRAWS)) for i in range(_DRAWS)]
    return WaitRange(min(*extremes, *delays), math.fsum(delays) / _DRAWS, max(*extremes, *delays))


def steady(seconds: float) -> dict[str, Any]:
    """Return the backoff of a policy whose waits are all the same, a year at most."""
    interval = format_interval(timedelta(seconds=min(max(seconds, _SHORTEST), _LONGEST)))
    return {
        "backoff_strategy": "none",
        "initial_interval": interval,
        "max_interval": interval,
        "jitter": False,
    }


def alike(one: WaitRange, other: WaitRange) -> bool:
    """Return whether two waits are the same: ends to a millisecond or a thousandth, means to a hundredth."""
    ends = ((one.least, other.least), (one.most, other.most))
    same_mean = math.isclose(one.mean, other.mean, rel_tol=0.01, abs_tol=1e-3)
    return same_mean and all(math.isclose(a, b, **_CLOSE) for a, b in ends)


def differing(today: Sequence[WaitRange], then: Sequence[WaitRange]) -> Iterator[str]:
    """Yield the differences from today's waits, the largest first: the first and last one, and the sum."""
    told = [*_differing(today, then)]
    yield from (text for _, text in sorted(told, key=lambda x: -x[0]))


def _differing(today: Sequence[WaitRange], then: Sequence[WaitRange]) -> Iterator[tuple[float, str]]:
    """Yield differences, each with its seconds."""
    unlike = [n for n, pair in enumerate(zip(today, then, strict=True), 1) if not alike(*pair)]
    for n in dict.fromkeys(unlike[:1] + unlike[-1:]):
        was, becomes = today[n - 1], then[n - 1]
        ends = ((was.least, becomes.least), (was.mean, becomes.mean), (was.most, becomes.most))
        apart = max(abs(one - other) for one, other in ends)
        if _in_words(was) != _in_words(becomes):
            yield apart, f"retry {n} waits {_in_words(becomes)}, not {_in_words(was)}"
        else:
            means = f"{spoken(becomes.mean)} on average, not {spoken(was.mean)}"
            yield apart, f"retry {n} waits {_in_words(becomes)} as before, but {means}"
    if unlike and len(today) > 1:
        before, after = (math.fsum(wait.mean for wait in waits) for waits in (today, then))
        same = math.isclose(before, after, **_CLOSE)
        how = "the same" if same else f"{spoken(after)}, not {spoken(before)}"
        yield abs(after - before), f"the first {len(today)} waits together are on average {how}"


def _in_words(wait: WaitRange) -> str:
    if math.isclose(wait.least, wait.most, **_CLOSE):
        return spoken(wait.mean)
    return f"{spoken(wait.least)} to {spoken(wait.most)}"
