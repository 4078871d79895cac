"""The plan of a fleet: each task today, the retry policy nearest to that, and the hazards of moving it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ...config.policies import EntryFields
from ...errors import ConfigurationError, NotExpressible
from ...spec.patterns import matches
from ...spec.policy import LARGEST, AnyPartial, RetryPolicy, partial_to_ojs
from .waits import Wait, policy_wait

Endless: TypeAlias = Literal["endless"]
NotKnown: TypeAlias = Literal["not known"]
#: How often a job runs.
Runs: TypeAlias = int | Endless | NotKnown

ENDLESS: Endless = "endless"
NOT_KNOWN: NotKnown = "not known"

#: How many waits are listed one by one; the span covers all of them.
MOST = 20
#: From here on the waits are taken to stay as they are.
SETTLED = 1000


@dataclass(frozen=True, slots=True)
class Open:
    """A line of code, or an option, that leaves something open."""

    #: Such as `shop/tasks.py:12`.
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Native:
    """A task under its framework alone; nothing in it is a guess."""

    #: At most, in total, the first one included.
    runs: Runs
    #: Before retry 1, 2 and so on: at most the first MOST.
    waits: tuple[Wait, ...] | NotKnown
    #: In words: the errors that are retried.
    retries: str
    #: In words: the errors that are not.
    final: str
    #: In words: what happens when it gives up.
    at_the_end: str
    #: All waits together.
    span: Wait | Endless | NotKnown = NOT_KNOWN

    @classmethod
    def computed(
        cls, runs: Runs, wait: Callable[[int], Wait], *, retries: str, final: str, at_the_end: str
    ) -> Native:
        """Return it with its waits and its span, of `wait(n)` before retry n."""
        listed = min(runs - 1, MOST) if isinstance(runs, int) else MOST
        waits = tuple(wait(n) for n in range(1, listed + 1))
        span = _span(runs, wait) if isinstance(runs, int) else runs
        return cls(runs, waits, retries, final, at_the_end, span)

    @classmethod
    def unknown(cls) -> Native:
        """Return a task of which nothing is known."""
        return cls(NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


def _span(runs: int, wait: Callable[[int], Wait]) -> Wait:
    one_by_one = min(runs - 1, SETTLED)
    total = sum((wait(n) for n in range(1, one_by_one + 1)), Wait.of(0.0))
    return total + wait(SETTLED) * (runs - 1 - one_by_one) if runs - 1 > SETTLED else total


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something to look at: a kebab-case name, and one sentence with the value and its consequence."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One task or actor of a plan."""

    name: str
    #: None where the task could not be read.
    native: Native | None = None
    #: A partial policy in OJS's JSON form; None where none is proposed: the task stays with its framework.
    policy: dict[str, Any] | None = None
    #: How the policy differs from today, sentence by sentence; none, if it is exact.
    differences: tuple[str, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    #: The failures that are retried, as `install` takes it; None for those that the task's own options name.
    retry_on: str | None = None
    #: The lines that leave something open.
    open: tuple[Open, ...] = ()
    #: Why the task could not be read.
    unreadable: str = ""
    #: Whether the task was also run, natively and under the policy.
    measured: bool = False
    #: What shadow mode has seen of it in production, in words.
    production: str = ""

    @property
    def verdict(self) -> str:
        """How far the numbers can be trusted: `measured`, `read`, or `not known`."""
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
        """Whether the policy does exactly what the framework does today."""
        return self.policy is not None and not self.differences


def planned(
    known: Iterable[str], patterns: Collection[str], noun: str, read: Callable[[str], Planned]
) -> list[Planned]:
    """Return, sorted, what `read` makes of the known names that a pattern matches; of all without patterns.

    Raises ConfigurationError for a pattern that names no `noun`. A name that cannot be read hides no other.
    """
    names = sorted(known)
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            raise ConfigurationError(f"names: {pattern!r} names no {noun}")
    chosen = (n for n in names if not patterns or any(matches(n, x) for x in patterns))
    return [_planned(name, read) for name in chosen]


def _planned(name: str, read: Callable[[str], Planned]) -> Planned:
    try:
        return read(name)
    except Exception as error:  # noqa: BLE001 - the options are the user's code
        return Planned(name, unreadable=f"{type(error).__name__}: {error}")


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


def counting(option: str, runs: Runs, value: float | None) -> Hazard:
    """Return the hazard of an option that counts retries, where `max_attempts` counts runs."""
    if runs == ENDLESS:
        return Hazard(
            "infinite-retries",
            f"{option} retries a job without end, however long it has failed, and so does the bridge: say a "
            "max_attempts; a job in flight that has had as many runs then ends at its next failure, or "
            'begins afresh under install(in_flight="afresh")',
        )
    times = "once" if runs == 1 else f"{runs} times"
    return Hazard(
        "counts-retries",
        f"{option} counts retries, so that a job runs {times}; max_attempts counts runs: {runs}, not {value}",
    )


def pickled(subject: str) -> Hazard:
    """Return the hazard of pickled messages."""
    return Hazard(
        "pickle", f"{subject}: who can write to the broker or the dead letters runs code in the workers"
    )
