"""Jitters of Python code: callables, and the jitter that the job seeds."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
import sys
from datetime import datetime, timezone
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import InvalidRetryPolicy, Jitter, NotExpressible, RetryPolicy, Seeded
from ojs_bridge.rules.backoff import SPEC_JITTER, Rng
from ojs_bridge.rules.decision import RetryAt, decide
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job

NOW = datetime(2026, 11, 21, 10, 0, 0, tzinfo=timezone.utc)
TEN = {"initial_interval": "PT10S", "max_interval": "PT1M", "backoff_strategy": "none"}


class Always:
    """A source of randomness that always draws the same number."""

    def __init__(self, number: float = 0.5) -> None:
        self.number = number

    def random(self) -> float:
        """Return that number."""
        return self.number


def added(n: int, seconds: float, rng: Rng) -> float:
    """Add up to n seconds."""
    return seconds + n * rng.random()


def policy(jitter: Any, **fields: Any) -> RetryPolicy:
    """Return a policy of ten seconds before each retry, a minute at most, with a jitter."""
    return RetryPolicy(jitter=jitter, **{**TEN, **fields})


def decided(jitter: Any, job_id: str = "j-1", attempt: int = 1, rng: Rng | None = None) -> RetryAt:
    """Return the decision about a job that has failed."""
    job = Job(job_id, "billing.charge", "default", attempt)
    failed = decide(policy(jitter, max_attempts=99), job, Failure("a.b"), now=NOW, rng=rng or Always())
    assert isinstance(failed, RetryAt)
    return failed


def test_a_callable_is_given_the_retry_the_delay_and_the_randomness() -> None:
    """The job waits as long as the callable says."""
    assert [policy(added).delay(n, rng=Always(0.25)) for n in (1, 2, 4)] == [10.25, 10.5, 11.0]


def test_the_cap_comes_before_and_after_it() -> None:
    """The callable gets `max_interval` at most, and so does the job."""
    given: list[float] = []

    def doubles(_n: int, seconds: float, _rng: Rng) -> float:
        given.append(seconds)
        return 2 * seconds

    growing = policy(doubles, backoff_strategy="linear")
    assert [growing.delay(n, rng=Always()) for n in (2, 4, 9)] == [40, 60, 60]
    assert given == [20, 40, 60]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (-1, "-1"),
        (-math.inf, "-Infinity"),
        (math.nan, "NaN"),
        (None, "None"),
        ("soon", '"soon"'),
        pytest.param(10**5000, "<int>", id="huge"),
    ],
)
def test_what_is_no_delay(answer: Any, shown: str) -> None:
    """The value is an error that shows it; a job waits `max_interval`, and its reason says why."""
    jitter = partial(answering, answer)
    with pytest.raises(ValueError) as error:
        policy(jitter).delay(3, rng=Always())
    assert str(error.value) == f"the custom jitter returned {shown} for the 10.0 s before retry 3"
    decision = decided(jitter)
    assert decision.delay == 60
    assert "max_interval, because the custom backoff failed: ValueError(" in decision.reason


def answering(answer: Any, _n: int, _seconds: float, _rng: Rng) -> Any:
    """Make a callable that always gives the same answer."""
    return answer


@pytest.mark.parametrize(("answer", "seconds"), [(0, 0), (math.inf, 60), (7, 7), ("7.5", 7.5)])
def test_what_is_a_delay(answer: Any, seconds: float) -> None:
    """A delay may be zero or endless: the cap brings it back."""
    assert policy(partial(answering, answer)).delay(1, rng=Always()) == seconds


def test_one_that_raises_loses_no_job() -> None:
    """The job waits `max_interval`."""

    def raises(_n: int, _seconds: float, _rng: Rng) -> float:
        raise LookupError("no luck")

    assert decided(raises).delay == 60
    assert decided(raises).reason.endswith("because the custom backoff failed: LookupError('no luck')")


@pytest.mark.parametrize("jitter", ["full", 0.5, 1, {}, Jitter, object, [0.5, 1.5]])
def test_what_is_no_jitter(jitter: Any) -> None:
    """A jitter is a boolean or callable; a class is refused, because its call would make another one."""
    with pytest.raises(
        InvalidRetryPolicy, match="must be a boolean, or in Python a Jitter or another callable"
    ):
        policy(jitter)


@pytest.mark.parametrize("jitter", [added, Seeded(), Seeded(added), Jitter(0, 1), partial(answering, 1)])
def test_it_has_no_wire_form_and_is_a_value_all_the_same(jitter: Any) -> None:
    """A policy with it refuses `to_ojs`, is equal to itself, is hashed, and is merged."""
    jittered = policy(jitter)
    with pytest.raises(NotExpressible, match=r"^jitter: .* exists only in Python code; "):
        jittered.to_ojs()
    assert jittered.to_ojs(only={"max_attempts": 3}) == {"max_attempts": 3}
    assert jittered == policy(jitter)
    assert len({jittered, policy(jitter), policy(False)}) == 2
    assert RetryPolicy.merge(jittered, {"max_attempts": 9}).jitter == jitter
    assert RetryPolicy.merge(jittered, {"jitter": True}).jitter is True


@pytest.mark.parametrize("jitter", [added, Seeded(), Seeded(added), Jitter(0, 1)])
def test_it_is_pickled(jitter: Any) -> None:
    """Python finds its function by its name."""
    assert pickle.loads(pickle.dumps(policy(jitter))) == policy(jitter)


def test_the_schema_knows_booleans_alone() -> None:
    """The schema has no word for a callable."""
    assert RetryPolicy.json_schema()["properties"]["jitter"]["type"] == "boolean"


@pytest.mark.parametrize("jitter", [True, None, 0.5, Jitter])
def test_what_cannot_be_seeded(jitter: Any) -> None:
    """A value that is no jitter by itself is refused."""
    with pytest.raises(TypeError, match=r"^Seeded\(.*\): must be a Jitter or another callable$"):
        Seeded(jitter)


@given(st.text(), st.integers(1, 2**63 - 1), st.floats(0, 1e6), st.floats(0, 1e6))
def test_two_workers_compute_the_same_delay(job_id: str, n: int, one: float, other: float) -> None:
    """The delay of an attempt is the same, whatever each worker would have drawn, and within the jitter."""
    seeded = Seeded(Jitter(min(one, other), max(one, other)))
    first = decide_at(seeded, job_id, n, random.Random(1))
    again = decide_at(pickle.loads(pickle.dumps(seeded)), job_id, n, random.Random(2))
    assert first == again
    assert min(10 * min(one, other), 60) <= first.delay <= min(10 * max(one, other), 60)


def decide_at(jitter: Seeded, job_id: str, attempt: int, rng: Rng) -> RetryAt:
    """Return the decision about an attempt that is not the last one."""
    job = Job(job_id, "t", "q", attempt)
    endless = RetryPolicy(jitter=jitter, max_attempts=2**63 - 1, **TEN)
    if attempt == endless.max_attempts:
        job = Job(job_id, "t", "q", attempt - 1)
    decision = decide(endless, job, Failure("a.b"), now=NOW, rng=rng)
    assert isinstance(decision, RetryAt)
    return decision


def test_another_process_computes_the_same_delay() -> None:
    """The salts of a process's hashes do not matter."""
    code = "from ojs_bridge import Seeded; print([Seeded().rng(f'j-{n}', 3).random() for n in range(5)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([Seeded().rng(f"j-{n}", 3).random() for n in range(5)])


def test_other_languages_can_compute_it() -> None:
    """The k-th number is the first 53 bits of the SHA-256 of the id, the retry and k, as a fraction."""
    rng = Seeded().rng("j-1", 3)
    digests = [sha256(f"j-1:3:{k}".encode()).hexdigest() for k in (1, 2)]
    assert [rng.random(), rng.random()] == [int(digest[:16], 16) // 2048 / 2**53 for digest in digests]
    assert Seeded().rng("j-1", 3).random() == 0.8832257585466154


def test_jobs_and_retries_draw_apart() -> None:
    """The delays are spread evenly over the range, and differ."""
    delays = [decided(Seeded(), f"j-{n}").delay for n in range(2000)]
    assert all(5 <= delay < 15 for delay in delays)
    assert sum(delays) / len(delays) == pytest.approx(10, rel=0.03)
    for quarter in range(4):
        share = sum(1 for delay in delays if 5 + 2.5 * quarter <= delay < 7.5 + 2.5 * quarter)
        assert share / len(delays) == pytest.approx(0.25, abs=0.05)
    assert len({decided(Seeded(), "j-1", attempt).delay for attempt in range(1, 50)}) == 49


def test_by_itself_it_draws_from_what_it_is_given() -> None:
    """Without a job, the jitter has no seed and draws from the `rng` that `delay` gets."""
    assert policy(Seeded()).delay(1, rng=Always(0.0)) == 5
    assert policy(Seeded(added)).delay(2, rng=Always(0.5)) == 11
    assert Seeded() == Seeded(SPEC_JITTER)
