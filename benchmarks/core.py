"""The pure core, in microseconds a call."""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable
from datetime import datetime, timezone

from benchmarks.work import call_the_other_side
from ojs_bridge.rules.decision import decide
from ojs_bridge.rules.failures import ErrorMap, Failure, outcome_of
from ojs_bridge.rules.job import Job, decode, encode
from ojs_bridge.rules.policy import RetryPolicy

NOW = datetime.now(timezone.utc)
#: How many calls are timed together.
CALLS = 5000


def rows() -> list[tuple[str, float, float | None]]:
    """Return the name of each measurement, its microseconds, and its goal."""
    bare = Job("id", "billing.charge", "default", attempt=11)
    header = _ten_errors()
    failure = _failure()
    policy = RetryPolicy.merge({"max_attempts": 25, "non_retryable_errors": ["auth.*", "validation.payload"]})
    partials = ({"max_attempts": 5}, {"on_exhaustion": "dead_letter"}, {"max_attempts": 10})
    rng = random.Random(7)
    return [
        ("decide", _micros(lambda: decide(policy, bare, failure, now=NOW, rng=rng)), 10.0),
        ("merge of three partial policies", _micros(lambda: RetryPolicy.merge(*partials)), None),
        (
            f"header of ten errors, {len(header)} bytes, both ways",
            _micros(lambda: encode(decode(header, bare))),
            50.0,
        ),
        ("exception to failure, backtrace included", _micros(_failure), None),
    ]


def _failure() -> Failure:
    try:
        call_the_other_side()
    except ValueError as error:
        found = outcome_of(error, ErrorMap())
        assert isinstance(found, Failure)
        return found
    raise AssertionError


def _ten_errors() -> str:
    job = Job("id", "billing.charge", "default")
    for _ in range(10):
        job = job.failed(_failure(), at=NOW, next_at=NOW)
    return encode(job).text


def _micros(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=9)) / CALLS * 1e6
