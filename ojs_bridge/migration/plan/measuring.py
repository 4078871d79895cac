"""A plan that checks itself: what a failure that was injected came to, beside what the plan has read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...spec.policy import RetryPolicy
from .comparing import policy_wait
from .planned import NOT_KNOWN, Native, NotKnown, Open, Planned, Wait

#: How many runs of a task are measured at most; what runs longer is stopped there, and stays as it was read.
LIMIT = 50
_SLACK = 0.002


class Injected(Exception):
    """The failure that is injected into a task that names none of its own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one job came to whose every run failed: its runs, the seconds between them, and its end."""

    runs: int
    waits: tuple[float, ...]
    end: str


def can_be_measured(one: Planned) -> bool:
    """Return whether an injected failure tells what a task does: one whose code asks by itself never runs."""
    return one.policy is not None and one.retry_on is None and not one.open and one.native is not None


def judged(one: Planned, native: Measured, moved: Measured, policy: RetryPolicy) -> Planned:
    """Return a plan with what was measured natively, and then under its policy."""
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
    """Return what was measured that is not among what is expected, in words."""
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
    for cls in classes:
        try:
            return cls("injected by ojs-bridge plan --verify")
        except Exception:  # noqa: BLE001 - somebody's constructor
            return cls.__new__(cls)
    return Injected("by ojs-bridge plan --verify")
