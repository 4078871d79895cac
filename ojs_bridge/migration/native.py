"""The way back: from a retry policy to a framework's own options, and a list of what they lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..rules.failures import name_of
from ..rules.notations import spoken
from ..rules.policy import LARGEST, PartialPolicy, RetryPolicy
from .plan import (
    DRAMATIQ_MAX_BACKOFF,
    DRAMATIQ_MEAN,
    DRAMATIQ_MEAN_AT_CAP,
    WaitRange,
    celery_wait,
    differing,
    dramatiq_wait,
    policy_wait,
)

__all__ = ["NativeOptions", "to_celery_options", "to_dramatiq_options"]

#: At most so many waits are compared.
_MOST = 20
#: Seconds after which Celery's Redis transport, by default, delivers an unacknowledged message again.
_VISIBILITY_TIMEOUT = 3_600
_DOUBLING = 2.0


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """The options of a task or an actor that are nearest to a retry policy."""

    #: The arguments of the framework's decorator.
    options: dict[str, Any]
    #: The parts of the policy that they do not keep, in words.
    lost: tuple[str, ...]


#: The options of a backoff, and its wait before retry n.
_Backoff: TypeAlias = tuple[dict[str, Any], Callable[[int], WaitRange]]


@dataclass(frozen=True, slots=True)
class _WayBack:
    """The options of a framework, and the words for what they lose."""

    name: str
    nearest: Callable[[RetryPolicy], _Backoff]
    #: Options that each retried task needs.
    needed: dict[str, Any]
    #: The option for errors that are not retried.
    excluding: str
    #: Returns the words about the policy's longest wait and the framework's own, if one is too long.
    too_long: Callable[[float, float], str]
    #: The end of a job that the policy keeps, and of one that it discards.
    kept: str
    discarded: str
    #: The end of a run whose worker died.
    lost: str


def to_celery_options(policy: PartialPolicy) -> NativeOptions:
    """Return the options of `app.task` that are nearest to a policy, laid over the spec's default.

    They mean the same in every version since 5.4. Raises InvalidRetryPolicy, and the errors of a custom
    strategy or jitter that is called without a failure.
    """
    return _options(_CELERY, policy)


def to_dramatiq_options(policy: PartialPolicy) -> NativeOptions:
    """Return the options of `dramatiq.actor` that are nearest to a policy, laid over the spec's default.

    They mean the same in every version since 2.0. Raises InvalidRetryPolicy, and the errors of a custom
    strategy or jitter that is called without a failure.
    """
    return _options(_DRAMATIQ, policy)


def _options(framework: _WayBack, policy: PartialPolicy) -> NativeOptions:
    whole = RetryPolicy.merge(policy)
    ending = framework.kept if whole.on_exhaustion == "dead_letter" else framework.discarded
    codes = (
        f"response codes: for {framework.name} Discard, Fail, DeadLetter and Snooze are errors like any other"
    )
    never_kept = (ending and f"on_exhaustion: {ending}", codes, f"lost attempts: {framework.lost}")
    if whole.runs == 1:
        return NativeOptions({"max_retries": 0}, tuple(filter(None, never_kept)))
    classes, unnamed = _excluded(whole)
    waits, (backoff, wait) = _waits_of(whole), framework.nearest(whole)
    native = [wait(n) for n in range(1, len(waits) + 1)]
    max_retries = None if whole.max_attempts >= LARGEST else whole.runs - 1
    options = {**framework.needed, "max_retries": max_retries, **backoff}
    if classes:
        options[framework.excluding] = classes
    too_long = framework.too_long(*(max(wait.most for wait in listed) for listed in (waits, native)))
    lost = (*differing(waits, native), too_long, *unnamed, *never_kept)
    return NativeOptions(options, tuple(filter(None, lost)))


def _waits_of(policy: RetryPolicy) -> list[WaitRange]:
    """Return a policy's first waits."""
    return [policy_wait(policy, n) for n in range(1, min(policy.runs - 1, _MOST) + 1)]


def _excluded(policy: RetryPolicy) -> tuple[tuple[type[BaseException], ...], list[str]]:
    """Return the loaded exception classes that `non_retryable_errors` names, and in words what is lost.

    A name is the full or the bare name of a class, as a policy matches it.
    """
    loaded = sorted({*_subclasses(BaseException)}, key=name_of)
    classes: dict[type[BaseException], None] = {}
    lost = []
    for pattern in policy.non_retryable_errors:
        named = [cls for cls in loaded if pattern in (name := name_of(cls), name.rpartition(".")[2])]
        classes.update(dict.fromkeys(named))
        if not named:
            why = "is a prefix" if pattern.endswith(".*") else "names no loaded exception class"
            lost.append(f"non_retryable_errors: {pattern!r} {why}: such errors are retried")
        if wider := [name_of(cls).rpartition(".")[2] for cls in named if type.__subclasses__(cls)]:
            lost.append(f"non_retryable_errors: subclasses of {', '.join(wider)} are not retried either")
    return tuple(classes), lost


def _subclasses(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in type.__subclasses__(cls):
        yield one
        yield from _subclasses(one)


def _spread(policy: RetryPolicy, mean: float, mean_at_cap: float) -> tuple[float, float]:
    """Return the first and the longest delay of a backoff with the average waits of a policy.

    A wait is on average `mean` times its delay, and `mean_at_cap` times its delay at the cap. Both frameworks
    can only double. The cap of a backoff that never grows is its first delay, and the cap of one that grows
    less is its longest wait.
    """
    waits = _waits_of(policy)
    cap = policy.max_interval.total_seconds()
    # Where the cap cuts jitter off, the mean says nothing of the delay beneath.
    measured = waits if waits[0].most < cap else _waits_of(RetryPolicy.merge(policy, {"jitter": False}))
    first, last = measured[0].mean, max(wait.mean for wait in waits)
    doubles = policy.backoff_strategy == "exponential" and policy.backoff_coefficient >= _DOUBLING
    most = cap if doubles else min(last / mean_at_cap, cap)
    grows = first < (cap if doubles else last)
    return min(first / mean, cap) if grows else most, most


def _nearest_of_celery(policy: RetryPolicy) -> _Backoff:
    jitter = bool(policy.jitter)
    mean = 0.5 if jitter else 1.0
    first, most = _spread(policy, mean, mean)
    if first == most and not jitter:
        delay = int(first) if first == int(first) else first
        return {"default_retry_delay": delay}, lambda _n: WaitRange.of(first)
    factor, maximum = (max(round(seconds), 1) for seconds in (first, most))
    options = {"retry_backoff": factor, "retry_backoff_max": maximum, "retry_jitter": jitter}
    return options, lambda n: celery_wait(n, factor, maximum, jitter=jitter)


def _long_on_celery(_policy: float, native: float) -> str:
    if native <= _VISIBILITY_TIMEOUT:
        return ""
    return (
        f"long waits: a retry may wait {spoken(native)} in a worker's memory; Redis delivers a message again "
        f"and again that waits longer than its visibility_timeout, {spoken(_VISIBILITY_TIMEOUT)} by default"
    )


def _nearest_of_dramatiq(policy: RetryPolicy) -> _Backoff:
    spread = _spread(policy, DRAMATIQ_MEAN, DRAMATIQ_MEAN_AT_CAP)
    least, most = (min(max(round(seconds * 1000), 1), DRAMATIQ_MAX_BACKOFF) for seconds in spread)
    return {"min_backoff": least, "max_backoff": most}, lambda n: dramatiq_wait(n, least, most)


def _long_on_dramatiq(policy: float, _native: float) -> str:
    if policy * 1000 <= DRAMATIQ_MAX_BACKOFF:
        return ""
    at = spoken(DRAMATIQ_MAX_BACKOFF / 1000)
    return f"max_interval: a retry may wait {spoken(policy)}, and Dramatiq cuts every wait to {at}"


_CELERY = _WayBack(
    "Celery",
    _nearest_of_celery,
    {"autoretry_for": (Exception,)},
    "dont_autoretry_for",
    _long_on_celery,
    kept="Celery keeps no dead letters: a failed job is gone with its message",
    discarded="",
    lost="a run whose worker is killed uses no attempt, and a hard time limit ends the job",
)
_DRAMATIQ = _WayBack(
    "Dramatiq",
    _nearest_of_dramatiq,
    {},
    "throws",
    _long_on_dramatiq,
    kept="the broker's dead queue keeps a failed job for 7 d, without its history",
    discarded="Dramatiq discards nothing: the broker's dead queue keeps a failed job for 7 d",
    lost="a run whose worker is killed uses no attempt, and the job is delivered again",
)
