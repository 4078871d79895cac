"""The plan of a fleet: each task today, the policy nearest to it, its hazards, and the check by a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias, cast

from ...config.policies import EntryFields
from ...errors import ConfigurationError, NotExpressible
from ...rules.patterns import matches
from ...rules.policy import LARGEST, AnyPartial, RetryPolicy, partial_to_ojs
from .waits import Wait, policy_wait

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
#: A busy machine makes a wait look shorter by so many seconds.
_SLACK = 0.1


@dataclass(frozen=True, slots=True)
class Open:
    """A line of code, or an option, that leaves the retries of a task open."""

    #: A place such as `shop/tasks.py:12`.
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def once(found: Iterable[Open]) -> tuple[Open, ...]:
    """Return each line once, with its first reason."""
    first: dict[str, Open] = {}
    for line in found:
        first.setdefault(line.where, line)
    return tuple(first.values())


@dataclass(frozen=True, slots=True)
class Native:
    """A task under its framework alone; no value is a guess."""

    #: The largest number of runs, the first run included.
    runs: Runs
    #: The waits before retry 1, 2 and so on, MOST of them at most.
    waits: tuple[Wait, ...] | NotKnown
    #: The errors that are retried, in words.
    retries: str
    #: The errors that are not retried, in words.
    final: str
    #: The end of a job that has failed for good, in words.
    at_the_end: str
    #: All waits together.
    span: Wait | Endless | NotKnown = NOT_KNOWN

    @classmethod
    def computed(
        cls, runs: Runs, wait: Callable[[int], Wait], *, retries: str, final: str, at_the_end: str
    ) -> Native:
        """Return a task that waits `wait(n)` before retry n."""
        listed = min(runs - 1, MOST) if isinstance(runs, int) else MOST
        waits = tuple(wait(n) for n in range(1, listed + 1))
        span = _span(runs, wait) if isinstance(runs, int) else runs
        return cls(runs, waits, retries, final, at_the_end, span)

    @classmethod
    def unknown(cls) -> Native:
        """Return a task whose retries are not known."""
        return cls(NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


def _span(runs: int, wait: Callable[[int], Wait]) -> Wait:
    one_by_one = min(runs - 1, SETTLED)
    total = sum((wait(n) for n in range(1, one_by_one + 1)), Wait.of(0.0))
    return total + wait(SETTLED) * (runs - 1 - one_by_one) if runs - 1 > SETTLED else total


@dataclass(frozen=True, slots=True)
class Hazard:
    """A hazard of a task: a kebab-case name, and one sentence with the value and its consequence."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One task or actor of a plan."""

    name: str
    #: None where the task could not be read.
    native: Native | None = None
    #: A partial policy in OJS's JSON form. With None, the task stays with its framework.
    policy: dict[str, Any] | None = None
    #: The differences between the policy and today, sentence by sentence.
    differences: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    #: The `retry_on` for `install`. With None, the task's own options say which failures are retried.
    retry_on: str | None = None
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
        """The task's entry among the `policies` of an `install`: the policy, and `retry_on` beside it."""
        said = {"retry_on": self.retry_on} if self.retry_on else {}
        return cast("EntryFields", {**said, **(self.policy or {})})

    @property
    def exact(self) -> bool:
        """Whether the task does under the policy exactly what it does today."""
        return self.policy is not None and not self.differences


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
    found = []
    for name in (n for n in names if not patterns or any(matches(n, x) for x in patterns)):
        try:
            found.append(read(name))
        except Exception as error:  # noqa: BLE001 - the options are the user's code
            found.append(Planned(name, unreadable=f"{type(error).__name__}: {error}"))
    return found


def already_ojs(name: str, has: str, policy: RetryPolicy, partial: AnyPartial | None) -> Planned:
    """Return the plan of a task with a partial policy of its own, which resolves to `policy`."""
    kept = policy.on_exhaustion == "dead_letter"
    endless = policy.max_attempts >= LARGEST
    native = Native.computed(
        ENDLESS if endless else policy.runs,
        lambda n: policy_wait(policy, n),
        retries="every error, under the bridge",
        final=", ".join(policy.non_retryable_errors) or "nothing",
        at_the_end="it is kept as a dead letter" if kept else "it is discarded",
    )
    hazard = _moved(f"it {has} already, with {_attempts_of(policy)}: there is nothing to move")
    attempts = {} if endless else {"max_attempts": policy.max_attempts}
    try:
        return Planned(name, native, {**attempts, **partial_to_ojs(partial)}, (), (hazard,))
    except NotExpressible as error:
        return Planned(name, native, attempts, (str(error),), (hazard,))


def moved_already(policy: RetryPolicy, framework: str) -> Hazard:
    """Return the hazard of a task that an `install` has moved."""
    attempts = _attempts_of(policy)
    return _moved(f"it is under the bridge already, with {attempts}: this is what {framework} alone would do")


def _moved(text: str) -> Hazard:
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


def measure(found: Sequence[Planned], native: Callable[[str], Measured], move: Moving) -> list[Planned]:
    """Return a plan after measuring its tasks, natively and then under their policies."""
    names = measurable(found)
    today = {name: native(name) for name in names}
    with TemporaryDirectory() as folder:
        entries = {one.name: one.entry for one in found if one.name in names}
        then = dict(move(f"sqlite:///{folder}/ojs.db", entries))
    return [_judged(one, today[one.name], *then[one.name]) if one.name in names else one for one in found]


def measurable(found: Iterable[Planned]) -> list[str]:
    """Return the names of the tasks that can be measured with an injected failure.

    A task whose own code asks for retries would never reach that code.
    """
    return [
        one.name
        for one in found
        if one.policy is not None
        and one.native
        and not (one.retry_on or one.open or one.native.waits == NOT_KNOWN)
    ]


def _judged(one: Planned, native: Measured, moved: Measured, policy: RetryPolicy) -> Planned:
    told = one.native or Native.unknown()
    if wrong := _unlike(native, told.runs, told.waits):
        found = Open("measured", f"{wrong}, not as it was read")
        return replace(one, native=Native.unknown(), policy=None, differences=(), open=(found,))
    waits = tuple(policy_wait(policy, n) for n in range(1, min(policy.runs, LIMIT + 1)))
    differences = [f"measured under the policy: {x}" for x in [_unlike(moved, told.runs, waits)] if x]
    if native.end != moved.end:
        differences.append(f"measured: it ends in {moved.end} under the policy, and in {native.end} today")
    return replace(one, measured=bool(native.end), differences=(*one.differences, *differences))


def _unlike(measured: Measured, runs: object, waits: tuple[Wait, ...] | NotKnown) -> str:
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
