"""What a task does today, the retry policy nearest to it, and what to look at before it is moved."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from ...config.policies import EntryFields
from ...errors import ConfigurationError

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
class Wait:
    """Seconds before a retry, or of several retries together."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, seconds: float) -> Wait:
        """Return a wait that is always the same."""
        return cls(seconds, seconds, seconds)

    def __add__(self, other: Wait) -> Wait:
        return Wait(self.least + other.least, self.mean + other.mean, self.most + other.most)

    def __mul__(self, times: int) -> Wait:
        return Wait(self.least * times, self.mean * times, self.most * times)


@dataclass(frozen=True, slots=True)
class Open:
    """What the reading of code leaves open."""

    #: The line that leaves it open, such as `shop/tasks.py:12`, or the option that does.
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class Native:
    """What a task does today, under its framework alone; nothing in it is a guess."""

    #: At most, in total, the first one included.
    runs: Runs
    #: Before retry 1, 2 and so on: at most the first MOST.
    waits: tuple[Wait, ...] | NotKnown
    #: In words: which errors are retried.
    retries: str
    #: In words: which are not.
    final: str
    #: In words: what happens when it gives up.
    at_the_end: str
    #: All waits together.
    span: Wait | Endless | NotKnown = NOT_KNOWN

    @classmethod
    def computed(
        cls, runs: Runs, wait: Callable[[int], Wait] | None, *, retries: str, final: str, at_the_end: str
    ) -> Native:
        """Return it with its waits and its span, of `wait(n)` before retry n; None is not known."""
        if wait is None:
            return cls(runs, NOT_KNOWN, retries, final, at_the_end)
        listed = min(runs - 1, MOST) if isinstance(runs, int) else MOST
        waits = tuple(wait(n) for n in range(1, listed + 1))
        span = _span(runs, wait) if isinstance(runs, int) else runs
        return cls(runs, waits, retries, final, at_the_end, span)

    @classmethod
    def unknown(cls) -> Native:
        """Return what is said of a task of which nothing is known."""
        return cls(NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN, NOT_KNOWN)


def _span(runs: int, wait: Callable[[int], Wait]) -> Wait:
    one_by_one = min(runs - 1, SETTLED)
    total = sum((wait(n) for n in range(1, one_by_one + 1)), Wait.of(0.0))
    return total + wait(SETTLED) * (runs - 1 - one_by_one) if runs - 1 > SETTLED else total


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something to look at: a kebab-case name, and one sentence with the value and what follows from it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Planned:
    """One task or actor of a plan."""

    name: str
    #: None where the task could not be read.
    native: Native | None
    #: A partial policy in OJS's JSON form; None where none is proposed: the task stays with its framework.
    policy: dict[str, Any] | None
    #: How the policy differs from today, sentence by sentence; none, if it is exact.
    differences: tuple[str, ...]
    hazards: tuple[Hazard, ...]
    #: Which failures are retried, as `install` takes it; None for what the task's own options say.
    retry_on: str | None = None
    #: What is not known of it, and which lines leave it open.
    open: tuple[Open, ...] = ()
    #: Why the task could not be read.
    unreadable: str = ""
    #: Whether what was read was run, too, natively and under the policy.
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
        """What stands for it among the `policies` of an `install`: the policy, and `retry_on` beside it."""
        said = {"retry_on": self.retry_on} if self.retry_on else {}
        return cast("EntryFields", {**said, **(self.policy or {})})

    @property
    def exact(self) -> bool:
        """Whether the policy does what the framework does today."""
        return self.policy is not None and not self.differences


def planned(name: str, read: Callable[[], Planned]) -> Planned:
    """Return what `read` makes of a task, or that the task could not be read, so that the others can be."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - the options are the user's code: whatever is in them
        return Planned(name, None, None, (), (), unreadable=f"{type(error).__name__}: {error}")


def chosen(known: Iterable[str], names: Collection[str], what: str) -> list[str]:
    """Return, in order, the known names that one of the patterns matches, or all of them without patterns.

    Raises ConfigurationError for a pattern that names none, which would be a `what`.
    """
    ordered = sorted(known)
    for pattern in names:
        if not fnmatch.filter(ordered, pattern):
            raise ConfigurationError(f"names: {pattern!r} names no {what}")
    return [n for n in ordered if not names or any(fnmatch.fnmatchcase(n, pattern) for pattern in names)]
