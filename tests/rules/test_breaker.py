"""The states of a breaker: a pure function of what came before, what has ended since, and the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import Breaker, Dependency
from ojs_bridge.rules.breaker import BUCKETS, Counts, State, after, next_probe, probed, ramp
from ojs_bridge.rules.decision import Complete, DeadLettered, Decision, GiveBack, RetryAt, SnoozeUntil
from ojs_bridge.rules.dependencies import limited, outcomes
from ojs_bridge.rules.failures import Failure
from tests.rules.test_decision import NOW

BREAKER = Breaker(share=0.5, least=4, window="PT1M", cool_down="PT20S", probes=3)
OPEN = State(opened=100.0, runs=4, failed=2, rests_until=120.0, pace=8.0)


def fails(number: int) -> Counts:
    """Return what a process says whose last runs all failed."""
    return Counts(number, number, streak=number)


def works(at: float, then_failed: int = 0) -> Counts:
    """Return what a process says of which a run worked at a time, before others failed."""
    return Counts(1 + then_failed, then_failed, streak=then_failed, worked_at=at)


#: What ended at a time, and whether the breaker is open then.
OPENINGS: dict[str, tuple[list[tuple[float, Counts]], bool]] = {
    "enough of many": ([(100, Counts(4, 2))], True),
    "too few": ([(100, Counts(3, 3))], False),
    "too small a share": ([(100, Counts(100, 49))], False),
    "none failed": ([(100, Counts(100, 0))], False),
    "together over a while": ([(100, Counts(2, 0)), (130, Counts(2, 2))], True),
    "the first is too old": ([(100, Counts(3, 3)), (170, Counts(1, 1))], False),
    "old successes do not count": ([(100, Counts(50, 0)), (170, Counts(4, 4))], True),
    "probes are none of them": ([(100, Counts(0, 0, 9, 9))], False),
}


#: Many have worked, and then all fail: what each write says, and whether the breaker is open after the last.
STREAKS: dict[str, tuple[list[tuple[float, Counts]], bool]] = {
    "enough": ([(100, fails(1)), (100.5, fails(1)), (102, fails(2))], True),
    "too few": ([(100, fails(1)), (101.5, fails(2))], False),
    "not for long since the second": ([(100, fails(1)), (100.5, fails(1)), (101.9, fails(9))], False),
    "not for long": ([(100, fails(20)), (101.4, fails(1))], False),
    "slowly": ([(100, fails(1)), (130, fails(1)), (160, fails(1)), (190, fails(1))], True),
    "one has worked since": ([(100, fails(3)), (101.5, works(101)), (102, fails(3))], False),
    "it says so with its own failures": ([(100, fails(3)), (103, works(101, then_failed=3))], False),
    "one had worked before": ([(100, fails(2)), (101.5, works(99, then_failed=2))], True),
    "and failed before that": ([(100, fails(2)), (101.5, Counts(9, 8, streak=1, worked_at=99))], False),
    "a success opens none": ([(100, fails(9)), (101.5, works(99))], False),
}


@pytest.mark.parametrize(("ended", "is_open"), STREAKS.values(), ids=STREAKS)
def test_it_opens_when_the_last_runs_all_failed(ended: list[tuple[float, Counts]], is_open: bool) -> None:
    """Whatever the share of the window."""
    state, now = after(BREAKER, State(), Counts(1000, worked_at=90.0), 99.0), 0.0
    for now, counts in ended:
        state = after(BREAKER, state, counts, now)
    assert (state.opened == now) is is_open
    if is_open:
        assert (state.runs, state.failed, state.streak, state.rests_until) == (4, 4, 4, now + 20)
        assert after(BREAKER, replace(state, probes=(now + 40,) * 3), Counts(probes=3), now + 20).streak == 0


@given(st.lists(st.booleans(), max_size=50), st.integers(0, 50))
def test_a_process_knows_how_many_of_its_last_runs_failed(failed: list[bool], cut: int) -> None:
    """Wherever it has cut what it says."""
    parts = [Counts(), Counts()]
    for at, has_failed in enumerate(failed):
        part = at >= cut
        parts[part] = parts[part].plus(fails(1) if has_failed else works(at + 1))
    both = parts[0].plus(parts[1])
    last = next((n for n, has_failed in enumerate(reversed(failed)) if not has_failed), len(failed))
    assert (both.runs, both.failed, both.streak) == (len(failed), sum(failed), last)
    assert both.worked_at == (len(failed) - last if last < len(failed) else 0)


@pytest.mark.parametrize(
    ("counts", "waited", "failing", "are_due"),
    [
        (works(100), 4.9, State(), False),
        (works(100), 5.0, State(), True),
        (works(100).plus(fails(1)), 0.9, State(), False),
        (works(100).plus(fails(1)), 1.0, State(), True),
        (works(100).plus(fails(2)), 0.2, State(), True),
        (fails(2), 0.1, State(), False),
        (works(100), 0.0, State(streak=2, since=99.0), True),
        (works(100), 0.0, State(streak=2, since=101.0), False),
        (works(100), 0.0, State(streak=1, since=99.0), False),
    ],
)
def test_when_a_process_says_how_its_runs_ended(
    counts: Counts, waited: float, failing: State, are_due: bool
) -> None:
    """At once, where all others fail and it works."""
    assert counts.are_due(waited, failing) is are_due


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.floats(0.01, 0.2), st.integers(0, 5)), min_size=20, max_size=300),
)
def test_a_fleet_of_which_one_process_works_opens_by_no_streak(
    number: int, ends: list[tuple[float, int]]
) -> None:
    """Each reads the state once a second, and writes when it is time; one works, and the others fail."""
    breaker = Breaker(share=1, least=3)
    shared, now = State(), 1e9
    mine, wrote, read = [Counts()] * number, [0.0] * number, [(0.0, State())] * number
    for seconds, process in ends:
        for one in (process % number, 0):
            now += seconds
            if now - read[one][0] >= 1:
                read[one] = now, shared
            mine[one] = mine[one].plus(fails(1) if one else works(now))
            if mine[one].are_due(now - wrote[one], read[one][1]):
                shared = after(breaker, shared, mine[one], now)
                mine[one], wrote[one], read[one] = Counts(), now, (read[one][0], shared)
        assert shared.opened is None


@pytest.mark.parametrize(("ended", "is_open"), OPENINGS.values(), ids=OPENINGS)
def test_when_it_opens(ended: list[tuple[float, Counts]], is_open: bool) -> None:
    state, now = State(), 0.0
    for now, counts in ended:
        state = after(BREAKER, state, counts, now)
    assert (state.opened is not None) is is_open
    if is_open:
        assert (state.opened, state.rests_until) == (now, now + 20)
        assert next_probe(BREAKER, state) == (now + 20, 3)


def test_it_lets_so_many_probes_through_after_its_cool_down() -> None:
    assert probed(BREAKER, State(), 1e9) is None, "a closed one has no probes"
    assert probed(BREAKER, OPEN, 119.9) is None
    state: State | None = OPEN
    for _ in range(3):
        assert state
        state = probed(BREAKER, state, 120.0)
    assert state
    assert (state.probes, state.is_probed(120.0)) == ((140.0,) * 3, True)
    assert probed(BREAKER, state, 139.9) is None
    assert next_probe(BREAKER, state) == (140.0, 1)
    lost = probed(BREAKER, state, 140.0)
    assert lost
    assert lost.probes == (160.0,), "those that did not come back count as lost"


def test_it_closes_when_all_its_probes_have_come_back() -> None:
    state = replace(OPEN, probes=(140.0,) * 3)
    state = after(BREAKER, state, Counts(50, 50, 2), 125.0)
    assert (state.opened, state.worked, state.probes) == (100.0, 2, (140.0,))
    assert after(BREAKER, state, Counts(probes=1), 126.0) == State(pace=8.0)


def test_one_that_fails_keeps_it_open_for_another_cool_down() -> None:
    state = replace(OPEN, probes=(140.0,), worked=2)
    failed = after(BREAKER, state, Counts(probes=2, probes_failed=1), 130.0)
    assert (failed.opened, failed.rests_until, failed.probes, failed.worked) == (100.0, 150.0, (), 0)
    late = after(BREAKER, failed, Counts(probes=1, probes_failed=1), 131.0)
    assert late == failed, "those that began before it do not count any more"
    assert (failed.runs, failed.failed) == (4, 2), "the reason stays"


def test_how_fast_the_held_jobs_go_on() -> None:
    assert ramp(BREAKER, OPEN, 200.0) == 2.0, "a quarter of the runs before"
    assert ramp(BREAKER, replace(OPEN, pace=0.1), 200.0) == 1.0
    assert ramp(Breaker(ramp="90/m"), OPEN, 200.0) == 1.5
    state = after(BREAKER, State(), Counts(60, 0), 61.0)
    assert ramp(BREAKER, replace(state, pace=99.0), 70.0) == 1.5, "of a closed one, those that there are"
    state = after(BREAKER, state, Counts(60, 60), 90.0)
    assert state.pace == 4.0, "120 runs in the 30 s since the first bucket began"


AMOUNT = st.integers(0, 30)
STEPS = st.lists(
    st.tuples(st.floats(0, 100), st.one_of(st.none(), st.tuples(AMOUNT, AMOUNT, AMOUNT, AMOUNT))),
    max_size=60,
)


@given(st.floats(0.01, 1), st.integers(1, 20), st.integers(1, 5), STEPS)
def test_it_never_lets_more_probes_through_than_it_may(
    share: float, least: int, probes: int, steps: list[Any]
) -> None:
    """However runs end, and whenever probes are asked for; and its state is small, and survives JSON."""
    breaker = Breaker(share=share, least=least, window="PT1M", cool_down="PT10S", probes=probes)
    state, now, taken = State(), 1e9, list[float]()
    for seconds, ended in steps:
        now += seconds
        if ended is None:
            if (probing := probed(breaker, state, now)) is not None:
                state = probing
                taken = [at for at in taken if at > now - 10] + [now]
                assert len(taken) <= probes
                assert now >= state.rests_until
        else:
            runs, failed, came, bad = ended
            came = min(came, len(state.probes))
            before = state
            counts = Counts(runs, min(failed, runs), came, min(bad, came))
            state = after(breaker, before, counts, now)
            taken = taken[came:]
            if state.opened is None and before.opened is not None:
                assert before.worked + came >= probes
            if state.opened is not None and before.opened is None:
                assert state.runs >= least
                assert state.failed >= share * state.runs
            if state.opened is None or not state.probes:
                taken = []
        assert len(state.buckets) <= BUCKETS + 2
        assert len(state.probes) <= probes
        assert State.from_json(state.to_json()) == state


BANK = Dependency("bank", ["external.*"], ["*"])
OTHER = Dependency("mail", ["mail.*"], ["*"])


def ended(failure: Failure) -> Decision:
    return RetryAt(NOW, 1.0, failure, "")


#: How a run ended, and what that says of the bank and of mail.
SAID: dict[str, tuple[Decision, list[tuple[Dependency, bool]]]] = {
    "a success": (Complete(), [(BANK, False), (OTHER, False)]),
    "the bank's error": (ended(Failure("external.timeout")), [(BANK, True)]),
    "mail's error": (ended(Failure("mail.down")), [(OTHER, True)]),
    "an end": (DeadLettered("exhausted", Failure("external.timeout"), ""), [(BANK, True)]),
    "an answer": (ended(Failure("external.rate_limited")), [(BANK, False)]),
    "a refusal": (ended(Failure("external.unauthorized")), [(BANK, False)]),
    "a rejection": (ended(Failure("external.rejected")), [(BANK, False)]),
    "another error": (ended(Failure("builtins.ValueError")), [(BANK, False), (OTHER, False)]),
    "a time limit": (ended(Failure("timeout")), []),
    "a worker that died": (ended(Failure("worker_death")), []),
    "a job that cannot be read": (DeadLettered("invalid", Failure("validation.x"), ""), []),
    "a pause": (SnoozeUntil(NOW, 1.0, ""), []),
    "a shutdown": (GiveBack(), []),
}


@pytest.mark.parametrize(("decision", "says"), SAID.values(), ids=SAID)
def test_what_the_end_of_a_run_says(decision: Decision, says: list[tuple[Dependency, bool]]) -> None:
    assert [*outcomes([BANK, OTHER], decision)] == says


def test_who_has_asked_for_fewer_calls() -> None:
    many = Failure("external.rate_limited")
    assert limited([OTHER, BANK], many) == BANK
    assert limited([OTHER], many) == OTHER, "a job's only dependency"
    assert limited([OTHER, Dependency("x", ["y"])], many) is None
    assert limited([BANK], Failure("external.timeout")) is None
