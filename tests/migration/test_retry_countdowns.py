"""Countdowns of `self.retry` that are worked out from their source, beside what Celery makes of them."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from random import randint
from typing import Any

import pytest
from celery import Task
from celery.exceptions import Retry

from ojs_bridge.migration.plan.planned import Wait
from tests.migration.planning import Body, app_with, only, planned_body, waits_of

DELAYS = [10, 60, 600]
BASE = 5


class Settings:
    """Somebody's settings."""

    DELAY = 45


def standard(self: Task) -> None:
    raise self.retry()


def none_is_not_given(self: Task) -> None:
    raise self.retry(countdown=None, max_retries=None, eta=None, exc=None)


def at_once(self: Task) -> None:
    raise self.retry(countdown=0)


def doubles(self: Task) -> None:
    raise self.retry(countdown=2**self.request.retries)


def arithmetic(self: Task) -> None:
    raise self.retry(countdown=max(-1, min(BASE * (self.request.retries + 1) // 2 % 7, 6)) + 0.5)


def chooses(self: Task) -> None:
    raise self.retry(countdown=DELAYS[min(self.request.retries, len(DELAYS) - 1)])


def off_the_list(self: Task) -> None:
    raise self.retry(countdown=(30, 40, 50)[self.request.retries])


def compares(self: Task) -> None:
    raise self.retry(countdown=5 if self.request.retries < 2 else 300)


def named_first(self: Task) -> None:
    retries = self.request.retries
    delay: float = BASE**retries
    raise self.retry(countdown=int(delay))


def its_own_delay(self: Task) -> None:
    raise self.retry(countdown=self.default_retry_delay * 2)


def a_class_setting(self: Task) -> None:
    raise self.retry(countdown=Settings.DELAY)


def backoff(retries: int, factor: int = 3) -> int:
    """Seconds, ever more."""
    return factor * (retries + 1)


def by_function(self: Task) -> None:
    raise self.retry(countdown=backoff(self.request.retries))


class Base(Task):
    """A base class that knows the delay."""

    abstract = True
    step = 4

    def backoff(self) -> int:
        """Seconds, ever more."""
        return self.step * (self.request.retries + 1)


def by_method(self: Any) -> None:
    raise self.retry(countdown=self.backoff())


#: body -> the waits before the first three retries
READ: list[tuple[Body, list[float]]] = [
    (standard, [180, 180, 180]),
    (none_is_not_given, [180, 180, 180]),
    (at_once, [0, 0, 0]),
    (doubles, [1, 2, 4]),
    (arithmetic, [2.5, 5.5, 0.5]),
    (chooses, [10, 60, 600]),
    (off_the_list, [30, 40, 50]),
    (compares, [5, 5, 300]),
    (named_first, [1, 5, 25]),
    (its_own_delay, [360, 360, 360]),
    (a_class_setting, [45, 45, 45]),
    (by_function, [3, 6, 9]),
    (by_method, [4, 8, 12]),
]


def countdown_of(task: Task, retries: int) -> float:
    """What Celery itself says that a retry of a run with so many retries behind it waits."""
    task.push_request(
        id="x", args=(), kwargs={}, retries=retries, called_directly=False, is_eager=True, delivery_info={}
    )
    try:
        with pytest.raises(Retry) as asked:
            task.run()
    finally:
        task.pop_request()
    return float(asked.value.when)


@pytest.mark.parametrize(("body", "waits"), READ)
def test_a_countdown_that_can_be_read(body: Body, waits: list[float]) -> None:
    """Retry by retry, it is what the running task asks for."""
    app = app_with(body, bind=True, base=Base)
    assert waits_of(only(app)) == [Wait.of(seconds) for seconds in waits]
    assert [countdown_of(app.tasks["job"], retries) for retries in range(3)] == waits


def uniform(self: Task) -> None:
    raise self.retry(countdown=random.uniform(2, 4) ** (self.request.retries + 1))


def whole(self: Task) -> None:
    raise self.retry(countdown=10 + randint(0, 5))


def fraction(self: Task) -> None:
    raise self.retry(countdown=60 * (2 - random.random()))


@pytest.mark.parametrize("body", [uniform, whole, fraction])
def test_a_countdown_that_is_drawn(body: Body) -> None:
    """It lies in the range that is planned, and is as long on average."""
    app = app_with(body, bind=True)
    for retries, wait in enumerate(waits_of(only(app))):
        drawn = [countdown_of(app.tasks["job"], retries) for _ in range(300)]
        assert wait.least <= min(drawn) <= max(drawn) <= wait.most
        assert sum(drawn) / len(drawn) == pytest.approx(wait.mean, rel=0.2)
        assert wait.most - wait.least <= 1.3 * (max(drawn) - min(drawn))


def from_an_argument(self: Task, seconds: float = 60) -> None:
    raise self.retry(countdown=seconds)


def at_a_date(self: Task) -> None:
    raise self.retry(eta=datetime.now(timezone.utc) + timedelta(hours=1))


def from_somewhere(self: Task, **options: Any) -> None:
    raise self.retry(**options)


def changing(self: Task) -> None:
    seconds = 1
    for _ in range(self.request.retries):
        seconds *= 3
    raise self.retry(countdown=seconds)


def by_steps(retries: int) -> int:
    """More than one expression."""
    print(retries)
    return retries


def by_more_than_an_expression(self: Task) -> None:
    raise self.retry(countdown=by_steps(self.request.retries))


def in_a_circle(self: Task) -> None:
    for _ in range(3):
        one = two  # noqa: F821
        two = one  # noqa: F841
    raise self.retry(countdown=one)


def endless(retries: int) -> int:
    """Never comes to anything."""
    return endless(retries + 1)


def by_an_endless_function(self: Task) -> None:
    raise self.retry(countdown=endless(self.request.retries))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (from_an_argument, "countdown of self.retry in line"),
        (at_a_date, "eta of self.retry in line"),
        (from_somewhere, "countdown and max_retries of self.retry in line"),
        (changing, "countdown"),
        (by_more_than_an_expression, "countdown"),
        (in_a_circle, "countdown"),
        (by_an_endless_function, "countdown"),
    ],
)
def test_what_cannot_be_worked_out_is_said(body: Body, told: str) -> None:
    """The runs are known all the same, and the policy leaves room for a day's hint."""
    found = planned_body(body, max_retries=4)
    assert found.native and (found.native.runs, found.native.waits, found.native.span) == (5, (), None)
    (said,) = (text for text in found.differences if told in text)
    assert "computed at run time: the bridge cuts a wait to max_interval, 1 d" in said
    assert found.policy and found.policy["max_interval"] == "P1D"


def as_often_as_asked(self: Task, often: int) -> None:
    raise self.retry(countdown=1, max_retries=often)


def test_what_is_known_of_some_retries_only() -> None:
    """Three delays are enough for three retries, not for four; a limit may be an argument."""
    assert waits_of(planned_body(off_the_list, max_retries=4)) == []
    found = planned_body(as_often_as_asked, max_retries=6)
    assert found.native and (found.native.runs, len(found.native.waits)) == (7, 6)
    assert "max_retries of self.retry" in found.differences[0]


def linear(self: Task) -> None:
    raise self.retry(countdown=60 * (self.request.retries + 1))


def polynomial(self: Task) -> None:
    raise self.retry(countdown=2 * (self.request.retries + 1) ** 3)


def capped(self: Task) -> None:
    raise self.retry(countdown=min(10 * 3**self.request.retries, 1000))


def from_nothing(self: Task) -> None:
    raise self.retry(countdown=60 * self.request.retries)


def day_by_day(self: Task) -> None:
    raise self.retry(countdown=86_400)


FITS: list[tuple[Body, dict[str, Any]]] = [
    (standard, {"backoff_strategy": "none", "initial_interval": "PT3M", "max_interval": "PT3M"}),
    (day_by_day, {"backoff_strategy": "none", "initial_interval": "P1D", "max_interval": "P1D"}),
    (linear, {"backoff_strategy": "linear", "initial_interval": "PT1M", "max_interval": "PT10M"}),
    (polynomial, {"backoff_strategy": "polynomial", "backoff_coefficient": 3.0,
                  "initial_interval": "PT2S", "max_interval": "PT33M20S"}),
    (capped, {"backoff_coefficient": 3.0, "initial_interval": "PT10S", "max_interval": "PT16M40S"}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "fields"), FITS)
def test_a_strategy_that_fits(body: Body, fields: dict[str, Any]) -> None:
    """The policy waits by itself what the code says."""
    found = planned_body(body, max_retries=10)
    assert found.policy == {"max_attempts": 11, "jitter": False, **fields}
    assert ["without self.retry" in told for told in found.differences] == [True]


@pytest.mark.parametrize("body", [from_nothing, chooses, uniform])
def test_a_strategy_that_does_not_fit(body: Body) -> None:
    """The countdown stays the task's own to say, and the policy's cap leaves room for it."""
    found = planned_body(body, max_retries=10)
    assert any("the bridge waits what self.retry says" in told for told in found.differences)
    assert not any(" waits 0" in told or ", not " in told for told in found.differences)


def doubles_for_ever(self: Task) -> None:
    raise self.retry(countdown=int(2.5**self.request.retries))


@pytest.mark.parametrize("body", [doubles, doubles_for_ever])
def test_a_power_that_nobody_waits_for(body: Body) -> None:
    """It is not worked out."""
    found = planned_body(body, max_retries=10**6 if body is doubles else 100)
    assert found.native and found.native.span and found.native.span.most > 10**11
    assert found.policy and found.policy["max_interval"] == "P365D"
