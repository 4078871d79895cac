"""`decide` answers every combination, with every reason (spec sections 6.3, 7.2 and 2.2)."""

import itertools
import random
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.backoff import Intervals
from ojs_bridge.rules.decision import (
    Complete,
    DeadLettered,
    Decision,
    Discarded,
    GiveBack,
    RetryAt,
    SnoozeUntil,
    decide,
)
from ojs_bridge.rules.failures import VISIBILITY_TIMEOUT, Failure, Interrupted, Outcome, Snoozed
from ojs_bridge.rules.job import Job
from ojs_bridge.rules.policy import LARGEST, RetryPolicy

NOW = datetime(2026, 11, 21, 10, 0, 0, tzinfo=timezone.utc)
END_OF_TIME = datetime.max.replace(microsecond=0, tzinfo=timezone.utc)
POLICY = {"max_attempts": 3, "jitter": False, "non_retryable_errors": ["validation.*"]}


class Middle:
    """Draws the middle: a factor of 1."""

    def random(self) -> float:
        return 0.5


class Never:
    """Must not be asked."""

    def random(self) -> float:
        raise AssertionError("a random number was drawn")


def job(attempt: int = 1, **fields: Any) -> Job:
    """Return a job at an attempt."""
    return Job(id="j-1", type="billing.charge", queue="default", attempt=attempt, **fields)


def decided(
    outcome: Outcome, attempt: int = 1, policy: dict[str, Any] | None = None, **fields: Any
) -> Decision:
    """Return the decision on an outcome of an attempt."""
    merged = RetryPolicy.merge(POLICY, policy)
    return decide(merged, job(attempt, **fields), outcome, now=NOW, rng=Middle())


# Section 7.2 as a table. `*` is anything; the first line that fits decides.
PRECEDENCE = [
    # code         matches  left   on_exhaustion   decision    cause
    ("DISCARD",     "*",    "*",   "*",            Discarded,    "handler"),
    ("FAIL",        "*",    "*",   "*",            Discarded,    "handler"),
    ("DEAD_LETTER", "*",    "*",   "*",            DeadLettered, "handler"),
    ("RETRY",       True,   "*",   "discard",      Discarded,    "non_retryable"),
    ("RETRY",       True,   "*",   "dead_letter",  DeadLettered, "non_retryable"),
    ("RETRY",       False,  False, "discard",      Discarded,    "exhausted"),
    ("RETRY",       False,  False, "dead_letter",  DeadLettered, "exhausted"),
    ("RETRY",       False,  True,  "*",            RetryAt,    None),
]  # fmt: skip
CODES = ["RETRY", "DISCARD", "DEAD_LETTER", "FAIL"]
EVERYTHING = list(itertools.product(CODES, [True, False], [True, False], ["discard", "dead_letter"]))


def wanted(*situation: object) -> tuple[type, str | None]:
    """Look a situation up in the table."""
    for *pattern, decision, cause in PRECEDENCE:
        if all(said in ("*", found) for said, found in zip(pattern, situation, strict=True)):
            return decision, cause  # type: ignore[return-value]
    raise LookupError(situation)


@pytest.mark.requirement("RET-01", "RET-07", "RET-08", "RET-17")
@pytest.mark.parametrize(("code", "matches", "left", "on_exhaustion"), EVERYTHING)
@pytest.mark.parametrize("hint", [None, timedelta(seconds=9)])
def test_every_combination(
    code: Any, matches: bool, left: bool, on_exhaustion: str, hint: timedelta | None
) -> None:
    """Response code, non-retryable match, attempts left and on_exhaustion decide; a hint changes nothing."""
    failure = Failure("validation.amount" if matches else "external.timeout", code=code, retry_after=hint)
    decision = decided(failure, 2 if left else 3, {"on_exhaustion": on_exhaustion})
    expected, cause = wanted(code, matches, left, on_exhaustion)
    assert type(decision) is expected
    assert getattr(decision, "cause", None) == cause
    assert decision.failure is failure  # type: ignore[union-attr]


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize(
    ("max_attempts", "retried"), [(0, []), (1, []), (2, [1]), (3, [1, 2]), (5, [1, 2, 3, 4])]
)
def test_an_exact_upper_bound(max_attempts: int, retried: list[int]) -> None:
    """Sections 2.2 and 12.6 say which failed attempts are followed by another."""
    failure = Failure("external.timeout")
    outcomes = {n: decided(failure, n, {"max_attempts": max_attempts}) for n in range(1, 10)}
    assert [n for n, decision in outcomes.items() if isinstance(decision, RetryAt)] == retried


REASONS = [
    (None, 1, {}, "succeeded"),
    (
        Snoozed(timedelta(seconds=10)),
        1,
        {},
        "the handler asked for a pause of 10.000 s",
    ),
    (
        Snoozed(timedelta(days=30)),
        1,
        {},
        "the handler asked for a pause of 2592000.000 s",
    ),
    (
        Failure("payment.card_declined", code="DISCARD"),
        1,
        {},
        "attempt 1 of 3 failed with payment.card_declined, and the handler said DISCARD",
    ),
    (
        Failure("validation.amount", code="FAIL"),
        1,
        {},
        "attempt 1 of 3 failed with validation.amount, and the handler said FAIL",
    ),
    (
        Failure("payment.card_stolen", code="DEAD_LETTER"),
        3,
        {},
        "attempt 3 of 3 failed with payment.card_stolen, and the handler said DEAD_LETTER",
    ),
    (
        Failure("validation.amount"),
        1,
        {},
        "attempt 1 of 3 failed with validation.amount, which matches validation.*",
    ),
    (
        Failure("builtins.KeyError", final="which the actor's `throws` lists"),
        1,
        {},
        "attempt 1 of 3 failed with builtins.KeyError, which the actor's `throws` lists",
    ),
    (
        Failure("external.timeout"),
        3,
        {},
        "attempt 3 of 3 failed with external.timeout, and no attempt is left",
    ),
    (
        Failure("external.timeout"),
        7,
        {"max_attempts": LARGEST},
        "attempt 7 (no limit) failed with external.timeout; retry 7 in 64.000 s",
    ),
    (
        Failure("external.timeout"),
        1,
        {"max_attempts": 0},
        "attempt 1 of 1 failed with external.timeout, and no attempt is left",
    ),
    (
        Failure("external.timeout"),
        2,
        {},
        "attempt 2 of 3 failed with external.timeout; retry 2 in 2.000 s",
    ),
    (
        Failure("external.rate_limited", retry_after=timedelta(seconds=30)),
        1,
        {},
        "attempt 1 of 3 failed with external.rate_limited; retry 1 in 30.000 s, as the handler asked",
    ),
    (
        Failure("external.timeout"),
        1,
        {"backoff_strategy": lambda _n, _failure: 1 / 0},
        "attempt 1 of 3 failed with external.timeout; retry 1 in 300.000 s, max_interval, because the custom "
        "backoff failed: ZeroDivisionError('division by zero')",
    ),
]


@pytest.mark.parametrize(("outcome", "attempt", "policy", "reason"), REASONS)
def test_reasons_as_a_person_reads_them(
    outcome: Outcome, attempt: int, policy: dict[str, Any], reason: str
) -> None:
    """A reason names the rule that decided."""
    assert decided(outcome, attempt, policy).reason == reason


@pytest.mark.requirement("RET-11")
@pytest.mark.parametrize("microsecond", [0, 1, 999, 1000, 1001, 999_001, 999_999])
def test_a_due_time_is_rounded_up_to_the_millisecond(microsecond: int) -> None:
    """The wire form has milliseconds: rounding down would be early."""
    now = NOW.replace(microsecond=microsecond)
    decision = decide(RetryPolicy(jitter=False), job(), Failure("a.b"), now=now, rng=Never())
    assert isinstance(decision, RetryAt)
    early = decision.at - (now + timedelta(seconds=1))
    assert decision.at.microsecond % 1000 == 0
    assert timedelta(0) <= early < timedelta(milliseconds=1)


@pytest.mark.requirement("RET-04")
@pytest.mark.parametrize(
    ("hint", "delay"), [(0, 0.0), (30, 30.0), (300, 300.0), (301, 300.0), (86_400, 300.0)]
)
def test_a_hint_is_capped_and_not_jittered(hint: float, delay: float) -> None:
    """The handler knows better than chance, and not better than the operator (section 2.2)."""
    failure = Failure("external.rate_limited", retry_after=timedelta(seconds=hint))
    decision = decide(RetryPolicy(jitter=True), job(), failure, now=NOW, rng=Never())
    assert isinstance(decision, RetryAt)
    assert (decision.delay, decision.at) == (delay, NOW + timedelta(seconds=delay))


@pytest.mark.requirement("RET-17")
@pytest.mark.parametrize(
    ("on_exhaustion", "expected"), [("discard", Discarded), ("dead_letter", DeadLettered)]
)
def test_final_by_the_frameworks_own_word(on_exhaustion: str, expected: type) -> None:
    """A failure that the framework's options rule out follows on_exhaustion, before any matching."""
    failure = Failure("validation.amount", final="which `throws` lists")
    decision = decided(failure, 1, {"on_exhaustion": on_exhaustion})
    assert type(decision) is expected
    assert decision.cause == "non_retryable"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("code", "expected"), [("DISCARD", Discarded), ("FAIL", Discarded), ("DEAD_LETTER", DeadLettered)]
)
def test_a_response_code_comes_before_final(code: Any, expected: type) -> None:
    """The handler has the last word on its own failure."""
    decision = decided(Failure("a.b", code=code, final="which `throws` lists"))
    assert type(decision) is expected
    assert decision.cause == "handler"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("expires_in", "expected"), [(0.5, "expired"), (1, "expired"), (1.001, None), (60, None)]
)
@pytest.mark.parametrize(("on_exhaustion", "ending"), [("discard", Discarded), ("dead_letter", DeadLettered)])
def test_a_job_that_expires_before_its_retry(
    expires_in: float, expected: str | None, on_exhaustion: str, ending: type
) -> None:
    """A retry that the framework would drop unrun is an exhausted job (decisions.md)."""
    expires = NOW + timedelta(seconds=expires_in)
    decision = decided(Failure("a.b"), 1, {"on_exhaustion": on_exhaustion}, expires=expires)
    assert getattr(decision, "cause", None) == expected
    assert type(decision) is (ending if expected else RetryAt)
    if expected:
        assert decision.reason == (
            "attempt 1 of 3 failed with a.b, and the job expires before a retry in 1.000 s"
        )


def test_an_exhausted_job_does_not_expire() -> None:
    """The earlier rule gives the cause."""
    assert decided(Failure("a.b"), 3, expires=NOW).cause == "exhausted"  # type: ignore[union-attr]


@pytest.mark.parametrize("attempt", [1, 3, 99])
def test_snoozing_uses_no_attempt(attempt: int) -> None:
    """A snooze is no failure: neither attempts nor max_interval nor jitter apply."""
    decision = decide(RetryPolicy(), job(attempt), Snoozed(timedelta(hours=1)), now=NOW, rng=Never())
    assert decision == SnoozeUntil(
        NOW + timedelta(hours=1), 3600.0, "the handler asked for a pause of 3600.000 s"
    )


class Hostile(Exception):
    """Says nothing about itself."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def raise_hostile(_n: int, _failure: Failure | None) -> float:
    """A strategy that fails, and whose error fails."""
    raise Hostile


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (raise_hostile, "<Hostile whose repr() raises>"),
        (lambda _n, _failure: "soon", "ValueError(\"could not convert string to float: 'soon'\")"),
        (lambda _n, _failure: -1, "ValueError('the custom backoff strategy returned -1.0 for retry 1')"),
        (lambda _n, _failure: 10**400, "OverflowError('int too large to convert to float')"),
        (lambda: 1, "TypeError("),
    ],
)
def test_a_custom_strategy_that_fails_waits_as_long_as_it_may(strategy: Any, error: str) -> None:
    """The user's code loses no job: max_interval, and the reason says so."""
    decision = decided(Failure("a.b"), 1, {"backoff_strategy": strategy})
    assert isinstance(decision, RetryAt)
    assert decision.delay == 300
    assert f"max_interval, because the custom backoff failed: {error}" in decision.reason


@pytest.mark.parametrize("cut", [True, False])
def test_a_custom_strategy_that_is_cut_is_told_so(cut: bool) -> None:
    """Without its own max_interval a policy has five minutes."""
    policy = {"backoff_strategy": lambda _n, _failure: 720 if cut else 300}
    decision = decided(Failure("a.b"), 1, policy)
    assert isinstance(decision, RetryAt)
    assert decision.reason.endswith(": max_interval cuts the 720.000 s of its strategy") is cut


def test_an_error_of_a_strategy_is_shown_in_part() -> None:
    """A reason stays a sentence."""
    decision = decided(Failure("a.b"), 1, {"backoff_strategy": lambda _n, _failure: float("x" * 10_000)})
    assert len(decision.reason) < 400
    assert decision.reason.endswith("…[cut]")


@pytest.mark.parametrize("outcome", [Failure("a.b"), Snoozed(timedelta.max)])
def test_the_end_of_time(outcome: Failure | Snoozed) -> None:
    """A time that no datetime holds becomes the last one."""
    policy = RetryPolicy(max_interval=timedelta.max, initial_interval=timedelta.max, jitter=False)
    decision = decide(policy, job(), outcome, now=NOW, rng=Never())
    assert isinstance(decision, RetryAt | SnoozeUntil)
    assert decision.at == END_OF_TIME


names = st.text(max_size=10) | st.sampled_from(["a.b", "validation.x", "auth"])
failures = st.builds(
    Failure,
    type=names,
    code=st.sampled_from(CODES),  # type: ignore[arg-type]
    retry_after=st.none() | st.timedeltas(timedelta(0)),
    alias=st.none() | names,
    final=st.none() | st.text(max_size=5),
)
outcomes: st.SearchStrategy[Outcome] = (
    st.none() | failures | st.builds(Snoozed, after=st.timedeltas(timedelta(0)))
)
times = st.datetimes(timezones=st.just(timezone.utc))
strategies = st.sampled_from(
    ["exponential", "linear", "polynomial", "none", raise_hostile, Intervals("PT0S"), lambda _n, _f: -5]
)


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    """Any policy, valid by construction."""
    initial = draw(st.timedeltas(timedelta(microseconds=1), timedelta.max))
    return RetryPolicy(
        max_attempts=draw(st.integers(0, 10) | st.just(LARGEST)),
        initial_interval=initial,
        max_interval=draw(st.timedeltas(initial, timedelta.max)),
        backoff_coefficient=draw(st.floats(1.0, allow_infinity=False)),
        backoff_strategy=draw(strategies),
        jitter=draw(st.booleans()),
        non_retryable_errors=draw(st.lists(st.sampled_from(["a.b", "validation.*", "auth"]), max_size=3)),
        on_exhaustion=draw(st.sampled_from(["discard", "dead_letter"])),
    )


@pytest.mark.requirement("RET-01", "RET-04", "RET-07", "RET-11")
@given(policies(), st.integers(1, 12) | st.integers(1), outcomes, times, times | st.none(), st.randoms())
def test_whatever_happens_is_decided(
    policy: RetryPolicy, attempt: int, outcome: Outcome, now: datetime, expires: datetime | None, rng: Any
) -> None:
    """The decision is no error, and never a run too many, early, beyond the cap or without a reason."""
    decision = decide(policy, job(attempt, expires=expires), outcome, now=now, rng=rng)
    assert decision.reason
    if isinstance(decision, RetryAt):
        assert attempt < policy.runs
        assert 0 <= decision.delay <= policy.max_interval.total_seconds()
        assert not policy.non_retryable_pattern(decision.failure)
        assert decision.failure.code == "RETRY"
        assert expires is None or decision.at < expires
    if isinstance(decision, RetryAt | SnoozeUntil):
        assert decision.at == END_OF_TIME or decision.at >= now + timedelta(seconds=decision.delay)
    assert isinstance(decision, Complete) == (outcome is None)
    if isinstance(outcome, Snoozed):
        assert isinstance(decision, SnoozeUntil | Discarded | DeadLettered)
        assert not isinstance(decision, SnoozeUntil) or expires is None or decision.at < expires


@pytest.mark.parametrize(("on_exhaustion", "ending"), [("discard", Discarded), ("dead_letter", DeadLettered)])
def test_a_snooze_past_its_expiry_is_no_way_to_vanish(on_exhaustion: Any, ending: type) -> None:
    """The framework would drop the message unrun: the policy ends the job instead."""
    policy = RetryPolicy(on_exhaustion=on_exhaustion)
    expiring = job(1, expires=NOW + timedelta(seconds=5))
    decision = decide(policy, expiring, Snoozed(timedelta(seconds=10)), now=NOW, rng=random.Random(1))
    assert isinstance(decision, ending)
    assert (decision.cause, decision.failure.type) == ("expired", "expired")
    assert decision.reason == (
        "attempt 1 of 3: the handler asked for a pause of 10.000 s, and the job expires before it ends"
    )


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("attempt", "expected"), [(1, RetryAt), (2, RetryAt), (3, Discarded)])
def test_a_lost_attempt_is_one_that_no_pattern_ends(attempt: int, expected: type) -> None:
    """Spec section 9.2: patterns do not apply to a stall; the count does."""
    policy = RetryPolicy.merge({"max_attempts": 3, "non_retryable_errors": [VISIBILITY_TIMEOUT]})
    decision = decide(
        policy, job(attempt), Failure(VISIBILITY_TIMEOUT, "gone"), now=NOW, rng=random.Random(1)
    )
    assert isinstance(decision, expected)


@pytest.mark.parametrize("attempt", [1, 3, 99])
def test_an_interrupted_attempt_is_given_back(attempt: int) -> None:
    """A graceful shutdown is no failure, also of the last attempt."""
    decision = decide(RetryPolicy(), job(attempt), Interrupted(), now=NOW, rng=random.Random(1))
    assert decision == GiveBack()
