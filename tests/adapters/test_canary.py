"""A canary decides for each job whether it is under the bridge."""

from __future__ import annotations

import math
import re
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import ConfigurationError
from ojs_bridge.adapters.terms import VARIABLE, Canary

percentages = st.one_of(st.integers(0, 100), st.floats(0, 100))
job_ids = st.one_of(st.uuids().map(str), st.text())
JOBS = [str(UUID(int=number)) for number in range(20_000)]


def share(canary: Canary, name: str = "billing.charge") -> float:
    """Return how many of a hundred jobs of a name are under the bridge."""
    return 100 * sum(canary.covers(name, job) for job in JOBS) / len(JOBS)


@given(job_ids, percentages, percentages)
def test_a_larger_percentage_keeps_those_that_were_in(job: str, one: float, other: float) -> None:
    """Raising the percentage moves no job back, and lowering it moves none in."""
    small, large = sorted((one, other))
    assert Canary(small).covers("task", job) <= Canary(large).covers("task", job)


@given(job_ids, percentages)
def test_a_job_is_in_or_out_wherever_it_is_asked(job: str, percentage: float) -> None:
    """Two workers, each with a canary of its own, decide alike."""
    assert Canary(percentage).covers("task", job) is Canary({"t*": percentage}).covers("task", job)


@given(job_ids)
def test_none_and_all(job: str) -> None:
    """At 0 no job is in, and at 100 each one is."""
    assert [Canary(percentage).covers("task", job) for percentage in (0, 100)] == [False, True]


@pytest.mark.parametrize("percentage", [0, 0.5, 1, 10, 33.3, 50, 90, 99.9, 100])
def test_the_share_is_the_percentage(percentage: float) -> None:
    """The share of the jobs under the bridge is the percentage, except for chance."""
    deviation = math.sqrt(percentage * (100 - percentage) / len(JOBS))
    assert abs(share(Canary(percentage)) - percentage) <= 4 * deviation


def test_the_hash_is_the_same_for_ever() -> None:
    """Workers of two releases, and of two Pythons, agree."""
    assert [job for job in ("a", "b", "c", "d", "é", "\ud800") if Canary(50).covers("t", job)] == [
        "a",
        "c",
        "\ud800",
    ]


@pytest.mark.parametrize(
    ("percentages", "name", "expected"),
    [
        (None, "billing.charge", 100),
        (10, "billing.charge", 10),
        (0, "billing.charge", 0),
        ({"billing.*": 5}, "billing.charge", 5),
        ({"billing.*": 5}, "mail.send", 0),
        ({"billing.*": 5}, "Billing.charge", 0),
        ({"*": 100, "billing.*": 5}, "billing.charge", 5),
        ({"*": 100, "billing.*": 5}, "mail.send", 100),
        ({"billing.*": 5, "*": 100}, "billing.charge", 100),
        ({}, "billing.charge", 0),
    ],
)
def test_the_last_pattern_that_matches_counts(percentages: Any, name: str, expected: float) -> None:
    """The last matching pattern wins, as with policies; a task without a pattern stays with its framework."""
    assert Canary(percentages).percentage(name) == expected


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [("25", "mail.send", 25), ("0.5", "mail.send", 0.5), ("", "mail.send", 100)]
    + [('{"billing.*": 5}', name, percentage) for name, percentage in (("billing.a", 5), ("mail.send", 0))],
)
def test_what_is_not_given_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str, expected: float
) -> None:
    """The variable is a number or a JSON object; an argument wins over it."""
    monkeypatch.setenv(VARIABLE, text)
    assert Canary().percentage(name) == expected
    assert Canary(70).percentage(name) == 70


@pytest.mark.parametrize(
    ("percentages", "problem"),
    [
        (120, "canary: 120 must be between 0 and 100"),
        (-0.1, "canary: -0.1 must be between 0 and 100"),
        (math.nan, "canary: nan must be between 0 and 100"),
        (True, "canary: True must be a percentage, a number from 0 to 100"),
        ("10", "canary: '10' must be a percentage, a number from 0 to 100"),
        ({"billing.*": 101}, "canary['billing.*']: 101 must be between 0 and 100"),
        ({"billing.*": None}, "canary['billing.*']: None must be a percentage, a number from 0 to 100"),
    ],
)
def test_what_is_no_percentage_is_refused(percentages: Any, problem: str) -> None:
    """The error comes where the app is set up, and names the value and the rule."""
    with pytest.raises(ConfigurationError, match=f"^{re.escape(problem)}$"):
        Canary(percentages)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ten", "OJS_BRIDGE_CANARY: 'ten' is neither a number nor a JSON object"),
        ("true", "OJS_BRIDGE_CANARY: 'true' is neither a number nor a JSON object"),
        ("[10]", "OJS_BRIDGE_CANARY: '[10]' is neither a number nor a JSON object"),
        ("120", "OJS_BRIDGE_CANARY: 120 must be between 0 and 100"),
        ("NaN", "OJS_BRIDGE_CANARY: nan must be between 0 and 100"),
        ('{"a": "b"}', "OJS_BRIDGE_CANARY['a']: 'b' must be a percentage, a number from 0 to 100"),
    ],
)
def test_what_the_environment_says_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    """The error names the variable."""
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(problem)}$"):
        Canary()


def test_a_pattern_that_names_nothing_is_refused() -> None:
    """A typing error would otherwise be a canary that never begins."""
    Canary({"*": 100, "billing.*": 10}).check(["billing.charge"], "task")
    Canary(10).check([], "task")
    with pytest.raises(ConfigurationError, match=re.escape("canary['biling.*'] names no task")):
        Canary({"*": 100, "biling.*": 10}).check(["billing.charge"], "task")


def test_it_says_what_it_is() -> None:
    """The canary describes itself for a worker's log."""
    assert str(Canary({"*": 100, "billing.*": 0.5})) == "100 % of *, 0.5 % of billing.*"
