"""A plan that checks itself: tasks run in memory with injected failures, natively and under the policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import TypeAlias

from ...config.policies import EntryFields
from ...spec.policy import RetryPolicy
from . import NOT_KNOWN, Native, NotKnown, Open, Planned
from .waits import Wait, policy_wait

#: How many runs of a task are measured at most; a longer task is stopped there, and stays as it was read.
LIMIT = 50
_SLACK = 0.002


class Injected(Exception):
    """The failure that is injected into a task that names none of its own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A job whose every run failed: its runs, the seconds between them, and its end."""

    runs: int
    waits: tuple[float, ...]
    end: str


#: A task's name, with what was measured of it under a policy.
Moved: TypeAlias = tuple[str, tuple[Measured, RetryPolicy]]
#: Moves tasks, by their entries, to a bridge with a store's URL.
Moving: TypeAlias = Callable[[str, Mapping[str, EntryFields]], Iterator[Moved]]


def measure(found: Sequence[Planned], native: Callable[[str], Measured], move: Moving) -> list[Planned]:
    """Return a plan with what was measured of each task, natively and then under its policy."""
    names = measurable(found)
    today = {name: native(name) for name in names}
    with TemporaryDirectory() as folder:
        entries = {one.name: one.entry for one in found if one.name in names}
        then = dict(move(f"sqlite:///{folder}/ojs.db", entries))
    return [_judged(one, today[one.name], *then[one.name]) if one.name in names else one for one in found]


def measurable(found: Iterable[Planned]) -> list[str]:
    """Return the names of the tasks of which an injected failure tells something.

    A task whose code asks for retries itself never reaches that code then.
    """
    return [one.name for one in found if one.policy is not None and not (one.retry_on or one.open)]


def exactly(entries: Mapping[str, EntryFields]) -> dict[str, EntryFields]:
    """Return entries as the `policies` of an `install`, each for the very task that it names."""
    return {"".join(f"[{c}]" if c in "*?[" else c for c in name): entry for name, entry in entries.items()}


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
    """Return in words the first measure that is not as expected."""
    if measured.runs != (min(runs, LIMIT) if isinstance(runs, int) else LIMIT):
        return f"it ran {measured.runs:,} times"
    if waits == NOT_KNOWN:
        return ""
    for n, (seconds, wait) in enumerate(zip(measured.waits, waits, strict=False), 1):
        if not wait.least - _SLACK <= seconds <= wait.most + _SLACK:
            return f"retry {n} waited {seconds:g} s"
    return ""


def raised_for(classes: Iterable[type[BaseException]]) -> BaseException:
    """Return an error of the first of some classes, whatever its constructor wants."""
    cls = next(iter(classes), Injected)
    return cls.__new__(cls, "injected by ojs-bridge plan --verify")
