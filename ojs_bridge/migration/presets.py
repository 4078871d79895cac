"""The retries of other systems as policies: schedule, jitter, cap and count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from ..errors import ConfigurationError, NotExpressible
from ..rules.backoff import Jitter, Rng, Seeded
from ..rules.failures import Failure
from ..rules.policy import LARGEST, RetryPolicy

#: The cap for a system without one: a century. Every language can hold it.
NO_CAP = timedelta(days=36_500)
#: Dramatiq's longest delay, in seconds.
_WEEK = timedelta(days=7).total_seconds()
_OBAN_MAX_POWER = 100
_DOUBLING = RetryPolicy()
_FOURTH_POWER = RetryPolicy(backoff_strategy="polynomial", backoff_coefficient=4.0)


@dataclass(frozen=True, slots=True)
class Preset:
    """The retries of another system. `notes` say where the `policy` differs from them."""

    name: str
    policy: RetryPolicy
    notes: str

    @property
    def expressible(self) -> bool:
        """Whether the Open Job Spec can express this schedule, so that `policy.to_ojs()` works."""
        try:
            self.policy.to_ojs()
        except NotExpressible:
            return False
        return True


def _fourth_power(n: int, _failure: Failure | None = None) -> float:
    """Return 15 + (n - 1)^4, the seconds of Sidekiq and Faktory, which count retries from 0."""
    return 15 + _FOURTH_POWER.backoff(n - 1)


def _oban_seconds(n: int, _failure: Failure | None = None) -> float:
    """Return 15 + 2^n, where n counts up to 100."""
    return 15 + 2 * _DOUBLING.backoff(min(n, _OBAN_MAX_POWER))


@dataclass(frozen=True, slots=True)
class Doubling:
    """`first` seconds, doubled for each next retry, up to `most`; jitter comes on top of it."""

    first: float
    most: float

    def __call__(self, n: int, _failure: Failure | None = None) -> float:
        """Return the seconds before retry n."""
        return min(self.first * _DOUBLING.backoff(n), self.most)


def _celery_jitter(_n: int, seconds: float, rng: Rng) -> float:
    """Draw whole seconds from 0 to the delay, both included, as Celery's full jitter does."""
    return int(rng.random() * (seconds + 1))


def _dramatiq_jitter(_n: int, seconds: float, rng: Rng) -> float:
    """Draw between once and twice the delay; a draw beyond a week becomes half a week to a week."""
    drawn = seconds * (1 + rng.random())
    return drawn if drawn < _WEEK else _WEEK * (1 + rng.random()) / 2


def _sidekiq_jitter(n: int, seconds: float, rng: Rng) -> float:
    """Add whole seconds, fewer than ten times n."""
    return seconds + int(rng.random() * 10 * n)


def _faktory_jitter(n: int, seconds: float, rng: Rng) -> float:
    """Add n times whole seconds, fewer than thirty."""
    return seconds + int(rng.random() * 30) * n


def _oban_jitter(_n: int, seconds: float, rng: Rng) -> float:
    """Add whole seconds, up to a tenth of the delay."""
    return seconds + int(rng.random() * 0.1 * seconds)


def _kept(runs: int, **fields: Any) -> RetryPolicy:
    """Return a policy that keeps exhausted jobs."""
    return RetryPolicy(max_attempts=runs, on_exhaustion="dead_letter", **fields)


_ALL = (
    Preset(
        "bullmq",
        _kept(3, initial_interval="PT1S", max_interval=NO_CAP, jitter=False),
        "by itself BullMQ retries nothing: the numbers are its manual's; its jitter j is Jitter(1 - j, 1)",
    ),
    Preset(
        "celery",
        RetryPolicy(max_attempts=4, initial_interval="PT1S", max_interval="PT10M", jitter=_celery_jitter),
        "autoretry_for with retry_backoff=True; without it, and after self.retry(), a flat 180 s",
    ),
    Preset(
        "dramatiq",
        _kept(21, initial_interval="PT15S", max_interval="P7D", jitter=_dramatiq_jitter),
        "its dead letters are kept for a week: Retention('P7D')",
    ),
    Preset(
        "faktory",
        _kept(26, backoff_strategy=_fourth_power, max_interval=NO_CAP, jitter=_faktory_jitter),
        "its retry=25 counts retries, and 0 means that nothing is kept either",
    ),
    Preset(
        "kathikon",
        _kept(20, backoff_strategy="polynomial", initial_interval="PT5S", max_interval="P1D", jitter=False),
        "discarded jobs are kept for a week: Retention('P7D')",
    ),
    Preset(
        "oban",
        _kept(20, backoff_strategy=_oban_seconds, max_interval=NO_CAP, jitter=_oban_jitter),
        "with more than 20 attempts Oban stretches the curve over all of them; this policy goes on doubling",
    ),
    Preset(
        "sidekiq",
        _kept(26, backoff_strategy=_fourth_power, max_interval=NO_CAP, jitter=_sidekiq_jitter),
        "its retry: 25 counts retries; a sidekiq_retry_in block is a callable strategy",
    ),
    Preset(
        "simple-durable-jobs",
        _kept(5, backoff_strategy=Doubling(0.1, 5.0), max_interval="PT5.5S", jitter=Jitter(0.9, 1.1)),
        "its RetryConfig, for storage, is our StorageRetry(); its jobs wait 2 s, doubling to 1 min",
    ),
    Preset(
        "temporal",
        RetryPolicy(max_attempts=LARGEST, initial_interval="PT1S", max_interval="PT100S", jitter=False),
        "its attempts have no limit; its workflow handles an activity that has failed for good",
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
            backoff_strategy=Doubling(15.0, 3600.0),
            max_interval="PT1H15M",
            jitter=Seeded(Jitter(1.0, 1.25)),
        ),
        "its manual does not say how its jitter is computed; ours depends on the job's id and the retry",
    ),
    Preset(
        "zzz_jobs.linear",
        _kept(20, backoff_strategy="linear", initial_interval="PT1M", max_interval=NO_CAP, jitter=False),
        "its discarded jobs are never deleted",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({one.name: one for one in _ALL})
"""All presets by their names."""


def preset(name: str) -> Preset:
    """Return the retries of another system; raises ConfigurationError for a name that has none."""
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ConfigurationError(f"preset: {name!r} must be one of {', '.join(PRESETS)}") from None
