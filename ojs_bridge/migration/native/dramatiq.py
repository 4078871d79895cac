"""From a retry policy back to the options of a Dramatiq actor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...spec.duration import spoken
from ...spec.policy import PartialPolicy, RetryPolicy
from ..plan.comparing import differing
from ..plan.planned import Wait
from .formulas import DRAMATIQ_MAX_BACKOFF, DRAMATIQ_MEAN, DRAMATIQ_MEAN_AT_CAP, dramatiq_wait
from .options import NativeOptions, excluded, longest, max_retries_of, readable, waits_of

_DOUBLING = 2.0


def to_dramatiq_options(policy: PartialPolicy) -> NativeOptions:
    """Return the options of `dramatiq.actor` that come nearest to a policy, over the spec's default.

    They mean the same to every version since 2.0. Raises InvalidRetryPolicy.
    """
    whole, unread = readable(RetryPolicy.merge(policy))
    if whole.runs == 1:
        return NativeOptions({"max_retries": 0}, (*unread, *_never_kept(whole)))
    classes, unnamed = excluded(whole)
    waits = waits_of(whole)
    first, most = _backoff(whole, waits)
    options = {"max_retries": max_retries_of(whole), "min_backoff": first, "max_backoff": most}
    native = [dramatiq_wait(n, first, most) for n in range(1, len(waits) + 1)]
    lost = (*unread, *differing(waits, native), *_cut(waits), *unnamed, *_never_kept(whole))
    return NativeOptions(options | ({"throws": classes} if classes else {}), lost)


def _backoff(policy: RetryPolicy, waits: Sequence[Wait]) -> tuple[int, int]:
    """Return `min_backoff` and `max_backoff`, in milliseconds, so that the waits are as long on average.

    Dramatiq always doubles: what never grows is at its cap from the start, and what grows less than twice as
    long is capped at its own longest wait.
    """
    cap = policy.max_interval.total_seconds()
    # Jitter that the cap cuts off is no measure of what is drawn from.
    measured = waits if waits[0].most < cap else waits_of(RetryPolicy.merge(policy, {"jitter": False}))
    first, last = measured[0].mean, max(wait.mean for wait in waits)
    doubles = policy.backoff_strategy == "exponential" and policy.backoff_coefficient >= _DOUBLING
    most = cap if doubles else min(last / DRAMATIQ_MEAN_AT_CAP, cap)
    grows = first < (cap if doubles else last)
    return _milliseconds(first / DRAMATIQ_MEAN if grows else most), _milliseconds(most)


def _milliseconds(seconds: float) -> int:
    return min(max(round(seconds * 1000), 1), DRAMATIQ_MAX_BACKOFF)


def _cut(waits: Sequence[Wait]) -> Iterator[str]:
    most = longest(waits)
    if most * 1000 > DRAMATIQ_MAX_BACKOFF:
        at = spoken(DRAMATIQ_MAX_BACKOFF / 1000)
        yield f"max_interval: a retry may wait {spoken(most)}, and Dramatiq cuts every wait to {at}"


def _never_kept(policy: RetryPolicy) -> Iterator[str]:
    """Yield what no option of Dramatiq's stands for."""
    if policy.on_exhaustion == "dead_letter":
        yield "on_exhaustion: the broker's dead queue keeps what has failed for 7 d, without its history"
    else:
        yield "on_exhaustion: Dramatiq discards nothing: the broker's dead queue keeps it for 7 d"
    yield "response codes: Discard, Fail, DeadLetter and Snooze are errors like any other to Dramatiq"
    yield "lost attempts: a run whose worker is killed uses no attempt, and the job is delivered again"
