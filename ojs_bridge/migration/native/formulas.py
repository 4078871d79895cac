"""How long the two frameworks themselves wait before retry n: their formulas, without their packages."""

from __future__ import annotations

from ..plan.planned import Wait

#: Dramatiq's own defaults, in milliseconds; it cuts any longer `max_backoff` to this one.
DRAMATIQ_MIN_BACKOFF = 15_000
DRAMATIQ_MAX_BACKOFF = 7 * 86_400_000
#: The mean of the factor in [1, 2) by which its jitter stretches a wait, and of that in [0.5, 1) at the cap.
DRAMATIQ_MEAN = 1.5
DRAMATIQ_MEAN_AT_CAP = 0.75

_LARGEST_EXPONENT = 32
_LARGEST_SHIFT = 1_000


def dramatiq_wait(n: int, min_backoff: float, max_backoff: float) -> Wait:
    """Return Dramatiq's wait before retry n, from milliseconds to seconds.

    It draws from once to twice `min_backoff * 2**(n-1)`; what lies above the cap is drawn again, from half
    the cap to all of it.
    """
    cap = max(min(max_backoff, DRAMATIQ_MAX_BACKOFF), 0.0) / 1000
    base = max(min_backoff, 0.0) / 1000 * 2.0 ** min(n - 1, _LARGEST_EXPONENT)
    if 2 * base <= cap:
        return Wait(base, DRAMATIQ_MEAN * base, 2 * base)
    kept = max(cap - base, 0.0) / base
    mean = kept * (base + cap) / 2 + (1 - kept) * DRAMATIQ_MEAN_AT_CAP * cap
    return Wait(min(base, cap / 2), mean, cap)


def celery_wait(n: int, factor: int, maximum: int, *, jitter: bool) -> Wait:
    """Return Celery's wait before retry n under `retry_backoff`, in whole seconds.

    With jitter it draws from 0 to `factor * 2**(n-1)`, both of them included.
    """
    longest = float(max(min(maximum, factor * 2 ** min(n - 1, _LARGEST_SHIFT)), 0))
    return Wait(0.0, longest / 2, longest) if jitter else Wait.of(longest)
