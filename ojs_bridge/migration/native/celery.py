"""From a retry policy back to the options of a Celery task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...spec.duration import spoken
from ...spec.policy import PartialPolicy, RetryPolicy
from ..plan.comparing import differing
from ..plan.planned import Wait
from .formulas import celery_wait
from .options import NativeOptions, excluded, longest, max_retries_of, number, readable, waits_of

#: Seconds after which Celery's Redis transport, by default, delivers again what is not acknowledged.
_VISIBILITY_TIMEOUT = 3_600


@dataclass(frozen=True, slots=True)
class _Backoff:
    """One way in which Celery can wait."""

    options: dict[str, Any]
    wait: Callable[[int], Wait]


def to_celery_options(policy: PartialPolicy) -> NativeOptions:
    """Return the options of `app.task` that come nearest to a policy, which stands over the spec's default.

    They mean the same to every version since 5.4. Raises InvalidRetryPolicy.
    """
    whole, unread = readable(RetryPolicy.merge(policy))
    if whole.runs == 1:
        return NativeOptions({"max_retries": 0}, (*unread, *_never_kept(whole)))
    classes, unnamed = excluded(whole)
    waits = waits_of(whole)
    backoff = _nearest(whole)
    options = {"autoretry_for": (Exception,), "max_retries": max_retries_of(whole), **backoff.options}
    if classes:
        options["dont_autoretry_for"] = classes
    native = [backoff.wait(n) for n in range(1, len(waits) + 1)]
    lost = (*unread, *differing(waits, native), *_too_long(native), *unnamed, *_never_kept(whole))
    return NativeOptions(options, lost)


def _nearest(policy: RetryPolicy) -> _Backoff:
    """Return how Celery waits most like a policy: to the second without jitter, on average with it."""
    steady = RetryPolicy.merge(policy, {"jitter": False})
    planned, drawn = ([wait.mean for wait in waits_of(one)] for one in (steady, policy))
    ways = zip(_ways(steady, planned), _ways(policy, drawn), strict=True)
    return min(ways, key=lambda way: _distance(way[0], planned))[1]


def _distance(way: _Backoff, planned: Sequence[float]) -> float:
    return round(sum(abs(way.wait(n).mean - seconds) for n, seconds in enumerate(planned, 1)), 3)


def _ways(policy: RetryPolicy, means: Sequence[float]) -> Iterator[_Backoff]:
    """Yield how Celery can wait, what reads most like the policy first."""
    cap, jitter = policy.max_interval.total_seconds(), bool(policy.jitter)

    def delay(mean: float) -> float:
        """Return the delay whose mean this is: jitter draws from none to all of it."""
        return min(2 * mean, cap) if jitter else mean

    growing = [_growing(delay(means[0]), most, jitter=jitter) for most in (cap, delay(max(means)))]
    same = [delay(mean) for mean in (means[0], sum(means) / len(means))]
    steady = [_growing(x, x, jitter=True) if jitter else _always(x) for x in same]
    yield from steady + growing if policy.backoff_strategy == "none" else growing + steady


def _always(seconds: float) -> _Backoff:
    return _Backoff({"default_retry_delay": number(seconds)}, lambda _n: Wait.of(seconds))


def _growing(first: float, most: float, *, jitter: bool) -> _Backoff:
    factor, maximum = _whole(first), _whole(most)
    options = {"retry_backoff": factor, "retry_backoff_max": maximum, "retry_jitter": jitter}
    return _Backoff(options, lambda n: celery_wait(n, factor, maximum, jitter=jitter))


def _whole(seconds: float) -> int:
    return max(round(seconds), 1)


def _too_long(native: Sequence[Wait]) -> Iterator[str]:
    most = longest(native)
    if most > _VISIBILITY_TIMEOUT:
        yield (
            f"long waits: a retry may wait {spoken(most)} in a worker's memory; what waits longer than "
            f"{spoken(_VISIBILITY_TIMEOUT)}, the default visibility_timeout on Redis, is delivered again and "
            "again"
        )


def _never_kept(policy: RetryPolicy) -> Iterator[str]:
    """Yield what no option of Celery's stands for."""
    if policy.on_exhaustion == "dead_letter":
        yield "on_exhaustion: Celery keeps no dead letters: what has failed is gone with its message"
    yield "response codes: Discard, Fail, DeadLetter and Snooze are errors like any other to Celery"
    yield "lost attempts: a run whose worker is killed uses no attempt, and a hard time limit ends the job"
