"""The words in which a plan is told, on a screen and in a review."""

from __future__ import annotations

from collections.abc import Mapping

from ..migration.plan import NOT_KNOWN, Native
from ..migration.plan.waits import Wait
from ..spec.duration import spoken
from .printing import plain

OVERRIDES = (
    "What a message or a handler says itself (send_with_options, apply_async, Retry) wins over these numbers."
)
NOTHING = "no tasks: perhaps the modules that declare them are not imported (--import MODULE)"


def runs(native: Native) -> str:
    """Return how often a task runs."""
    return f"{native.runs:,}" if isinstance(native.runs, int) else native.runs


def waits(native: Native) -> str:
    """Return the first wait and the last one that is listed."""
    first, last = (waited(native, place) for place in (0, -1))
    return first if first == last else f"{first}; at last {last}"


def waited(native: Native, place: int) -> str:
    """Return one of the waits."""
    if native.waits == NOT_KNOWN:
        return NOT_KNOWN
    return told(native.waits[place]) if native.waits else ""


def span(native: Native) -> str:
    """Return how long all waits are together."""
    if not isinstance(native.span, Wait):
        return native.span
    return told(native.span) if native.waits else ""


def told(wait: Wait) -> str:
    """Return a wait with its ends and its mean."""
    words = [spoken(seconds) for seconds in (wait.least, wait.mean, wait.most)]
    return words[1] if len({*words}) == 1 else f"{words[0]} to {words[2]}, mean {words[1]}"


def fields(policy: Mapping[str, object]) -> str:
    """Return the fields of a policy in a line."""
    return ", ".join(f"{name} {plain(value)}" for name, value in policy.items())
