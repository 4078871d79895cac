"""What a framework's own options keep of a retry policy, and what they lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...spec.policy import LARGEST, RetryPolicy
from ..plan.comparing import policy_wait
from ..plan.planned import MOST, Wait


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """The options of a task or an actor that come nearest to a retry policy."""

    #: By name, as the framework's decorator takes them.
    options: dict[str, Any]
    #: In words: what of the policy they do not keep.
    lost: tuple[str, ...]


def max_retries_of(policy: RetryPolicy) -> int | None:
    """Return how many retries a policy allows; None without end."""
    return None if policy.max_attempts >= LARGEST else policy.runs - 1


def waits_of(policy: RetryPolicy) -> tuple[Wait, ...]:
    """Return a policy's first waits; raises what a custom strategy raises without a failure."""
    return tuple(policy_wait(policy, n) for n in range(1, min(policy.runs - 1, MOST) + 1))


def readable(policy: RetryPolicy) -> tuple[RetryPolicy, tuple[str, ...]]:
    """Return a policy whose waits can be told, and in words what of it could not be."""
    lost = []
    steady = RetryPolicy.merge(policy, {"jitter": False})
    if error := _fails(steady):
        lost.append(f"backoff_strategy: it fails without a failure ({error}): initial_interval stands for it")
        policy = RetryPolicy.merge(policy, {"backoff_strategy": "none"})
    if error := _fails(policy):
        lost.append(f"jitter: it fails ({error}): the spec's stands for it")
        policy = RetryPolicy.merge(policy, {"jitter": True})
    return policy, tuple(lost)


def _fails(policy: RetryPolicy) -> str:
    try:
        waits_of(policy)
    except Exception as error:  # noqa: BLE001 - a custom strategy or jitter is somebody's code
        return repr(error)
    return ""


def excluded(policy: RetryPolicy) -> tuple[tuple[type[BaseException], ...], tuple[str, ...]]:
    """Return the loaded exception classes that `non_retryable_errors` names, and in words what is lost of it.

    As in a policy's matching, a name is a class's full or bare one.
    """
    loaded = sorted(_subclasses(BaseException), key=_full_name)
    classes: dict[type[BaseException], None] = {}
    lost = []
    for pattern in policy.non_retryable_errors:
        named = [cls for cls in loaded if pattern in (_full_name(cls), cls.__name__)]
        classes.update(dict.fromkeys(named))
        if not named:
            why = "is a prefix" if pattern.endswith(".*") else "names no loaded exception class"
            lost.append(f"non_retryable_errors: {pattern!r} {why}: such errors are retried")
        if wider := [cls.__name__ for cls in named if cls.__subclasses__()]:
            lost.append(f"non_retryable_errors: subclasses of {', '.join(wider)} are not retried either")
    return tuple(classes), tuple(lost)


def _subclasses(cls: type[BaseException]) -> set[type[BaseException]]:
    found, ahead = {cls}, [cls]
    while ahead:
        new = set(type.__subclasses__(ahead.pop())) - found
        found |= new
        ahead.extend(new)
    return found


def _full_name(cls: type[BaseException]) -> str:
    module: object = cls.__module__
    return f"{module}.{cls.__qualname__}" if isinstance(module, str) else cls.__qualname__


def number(seconds: float) -> float:
    """Return a number as people write it: whole ones without a point."""
    return int(seconds) if seconds == int(seconds) else seconds


def longest(waits: Sequence[Wait]) -> float:
    """Return the longest of some waits, in seconds."""
    return max((wait.most for wait in waits), default=0.0)
