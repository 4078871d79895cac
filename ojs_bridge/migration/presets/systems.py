"""The systems that there are presets for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from ...errors import ConfigurationError
from ...spec.backoff import Jitter, Seeded
from ...spec.policy import LARGEST, RetryPolicy
from . import formulas, jitters
from .preset import Preset

#: The cap of what has none: a century, which every language can hold.
NO_CAP = timedelta(days=36_500)


def _kept(runs: int, **fields: Any) -> RetryPolicy:
    """Return a policy of so many runs whose exhausted jobs are kept."""
    return RetryPolicy(max_attempts=runs, on_exhaustion="dead_letter", **fields)


_ALL = (
    Preset(
        "bullmq",
        _kept(3, initial_interval="PT1S", max_interval=NO_CAP, jitter=False),
        "by itself BullMQ retries nothing: these are its manual's numbers; its jitter j is Jitter(1 - j, 1)",
    ),
    Preset(
        "celery",
        RetryPolicy(max_attempts=4, initial_interval="PT1S", max_interval="PT10M", jitter=jitters.celery),
        "autoretry_for with retry_backoff=True; without it, and after self.retry(), a flat 180 s",
    ),
    Preset(
        "dramatiq",
        _kept(21, initial_interval="PT15S", max_interval="P7D", jitter=jitters.dramatiq),
        "its dead letters are kept for a week: Retention('P7D')",
    ),
    Preset(
        "faktory",
        _kept(26, backoff_strategy=formulas.fourth_power, max_interval=NO_CAP, jitter=jitters.faktory),
        "its retry=25 counts retries, and 0 means that nothing is kept either",
    ),
    Preset(
        "kathikon",
        _kept(
            20,
            backoff_strategy="polynomial",
            initial_interval="PT5S",
            max_interval="P1D",
            jitter=False,
        ),
        "discarded jobs are kept for a week: Retention('P7D')",
    ),
    Preset(
        "oban",
        _kept(20, backoff_strategy=formulas.oban, max_interval=NO_CAP, jitter=jitters.oban),
        "with more than 20 attempts Oban stretches the curve over all of them; this one goes on doubling",
    ),
    Preset(
        "sidekiq",
        _kept(26, backoff_strategy=formulas.fourth_power, max_interval=NO_CAP, jitter=jitters.sidekiq),
        "its retry: 25 counts retries; a sidekiq_retry_in block is a callable strategy",
    ),
    Preset(
        "simple-durable-jobs",
        _kept(
            5,
            backoff_strategy=formulas.Doubling(0.1, 5.0),
            max_interval="PT5.5S",
            jitter=Jitter(0.9, 1.1),
        ),
        "its RetryConfig, for storage, is our StorageRetry(); its jobs wait 2 s, doubling to 1 min",
    ),
    Preset(
        "temporal",
        RetryPolicy(max_attempts=LARGEST, initial_interval="PT1S", max_interval="PT100S", jitter=False),
        "its attempts have no limit; an activity that has failed for good is its workflow's, and not kept",
    ),
    Preset(
        "zzz_jobs.constant",
        _kept(20, backoff_strategy="none", initial_interval="PT30S", jitter=False),
        "its discarded jobs are never deleted",
    ),
    Preset(
        "zzz_jobs.exponential",
        _kept(
            20,
            backoff_strategy=formulas.Doubling(15.0, 3600.0),
            max_interval="PT1H15M",
            jitter=Seeded(Jitter(1.0, 1.25)),
        ),
        "what its deterministic jitter is computed from is not said; ours is the job's id and the retry",
    ),
    Preset(
        "zzz_jobs.linear",
        _kept(20, backoff_strategy="linear", initial_interval="PT1M", max_interval=NO_CAP, jitter=False),
        "its discarded jobs are never deleted",
    ),
)

#: All presets by their names.
PRESETS: Mapping[str, Preset] = MappingProxyType({one.name: one for one in _ALL})


def preset(name: str) -> Preset:
    """Return the retries of another system; raises ConfigurationError for a name that has none."""
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ConfigurationError(f"preset: {name!r} must be one of {', '.join(PRESETS)}") from None
