"""A task that is run here and now, retries included: one run after the other, and not within each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry

#: The option of an eager retry that says how often it was retried before; a snooze does not count.
EAGER_RETRIES = "ojs_eager_retries"
#: How often in a row an eager task may snooze: nothing waits, so what it waits for may never come.
EAGER_SNOOZES = 100


@dataclass(frozen=True, slots=True)
class EagerRetry:
    """What applying the signature of an eager retry returns: what to run next, instead of its result."""

    args: Any
    kwargs: Any
    options: dict[str, Any]


def apply_to_the_end(apply: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """Run a task eagerly, and again as often as it is retried; return its result.

    Raises RuntimeError when it does nothing but snooze.
    """
    outcome = _apply_once(apply, *args, **options)
    retries, snoozes = 0, 0
    while isinstance(outcome, EagerRetry):
        options = {**outcome.options, "retries": outcome.options[EAGER_RETRIES]}
        del options[EAGER_RETRIES]
        snoozes = snoozes + 1 if options["retries"] == retries else 0
        if snoozes > EAGER_SNOOZES:
            raise RuntimeError(f"task {name}: more than {EAGER_SNOOZES} eager snoozes in a row")
        retries = options["retries"]
        outcome = _apply_once(apply, outcome.args, outcome.kwargs, **options)
    return outcome


def _apply_once(apply: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return apply(*args, **options)
    except Retry as signal:
        # With task_eager_propagates Celery would let the first retry out instead of running it, as it does
        # with one of a job outside the bridge.
        if signal.sig is None or EAGER_RETRIES not in signal.sig.options:
            raise
        return signal.sig.apply(throw=True)
