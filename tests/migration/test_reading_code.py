"""A task's code is read: it is neither run nor asked, and what cannot be read is said."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from celery import Celery, Task

from ojs_bridge.migration.plan.planned import Wait
from tests.migration.planning import Body, app_with, only, planned_body, waits_of


def fails(self: Task) -> None:
    raise OSError("down")


def test_source_that_is_not_there() -> None:
    """What nobody can read may call anything."""
    names: dict[str, Any] = {"__name__": "elsewhere"}
    exec("def hidden(self):\n    raise self.retry()\n", names)
    assert "source of hidden of elsewhere cannot be read" in planned_body(names["hidden"]).differences[0]
    app = app_with(fails)
    app.tasks["job"].run = functools.partial(fails, None)
    assert "source of job itself cannot be read" in only(app).differences[0]


def limits_itself(self: Task) -> None:
    task = self
    task.max_retries = 1
    self.request.retries += 1
    self.other = self.max_retries
    raise self.retry(countdown=9)


def test_a_task_that_sets_its_own_limit() -> None:
    """The numbers are those of its options; that they may not count is said."""
    first = limits_itself.__code__.co_firstlineno
    assert planned_body(limits_itself).differences[:2] == tuple(
        f"its code sets {name} in line {first + line}: what it retries by from then on is not known; "
        "the policy says it once"
        for name, line in (("self.max_retries", 2), ("self.request.retries", 3))
    )


class Lazy:
    """Somebody's object that does its work when it is first asked for anything."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("it was compared")

    __hash__ = None  # type: ignore[assignment]


LAZY: Any = Lazy()


class Computing(Task):
    """A class whose attribute is code."""

    abstract = True

    @property
    def delay_of_mine(self) -> int:
        """Not to be asked."""
        raise AssertionError("it was asked for")


def with_lazy_things(self: Any) -> None:
    LAZY.helper(self)
    LAZY(self, LAZY)
    self.retry(countdown=LAZY)
    self.retry(countdown=LAZY.delay)
    self.retry(countdown=self.delay_of_mine)
    self.retry(countdown=-LAZY + min(LAZY, 1))
    raise self.retry(countdown=LAZY.delay(3), max_retries=LAZY)


def test_nothing_is_run() -> None:
    """Names are looked up, and what they stand for is not asked for anything."""
    found = planned_body(with_lazy_things, base=Computing)
    assert found.native and (found.native.runs, found.native.waits) == (4, ())
    assert sum("computed at run time" in told for told in found.differences) == 5


def test_a_task_that_is_shared_by_apps() -> None:
    """The one that its module names is another app's, of the same name."""
    other = Celery("other", broker="memory://", set_as_current=False)

    @other.task(shared=False, name="job")
    def job() -> None:
        raise job.retry(countdown=9)

    assert waits_of(only(app_with(job.run))) == [Wait.of(9)] * 3


def wrapping_itself(self: Task) -> None:
    raise self.retry(countdown=9)


wrapping_itself.__wrapped__ = wrapping_itself  # type: ignore[attr-defined]


def test_a_function_that_says_it_wraps_itself() -> None:
    """It is read once."""
    app = app_with(fails, bind=True)
    app.tasks["job"].run = wrapping_itself.__get__(app.tasks["job"])
    assert waits_of(only(app)) == [Wait.of(9)] * 3


class Client:
    """Something that is given a task."""

    def __init__(self, task: Task | None = None) -> None:
        self.task = task

    def handle(self, task: Task) -> None:
        """May do anything."""


CLIENT = Client()


def by_an_object(self: Task) -> None:
    CLIENT.handle(self)


def by_an_object_of_its_own(self: Task) -> None:
    client = Client()
    client.handle(task=self)


def by_a_new_object(self: Task) -> None:
    Client(self)


def by_what_is_known(self: Task) -> None:
    print(self, isinstance(self, Task), self.request.id, CLIENT.handle(None))
    functools.partial(print, self)
    self.apply_async(self)
    str(self)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (by_an_object, "CLIENT.handle is given the task in line"),
        (by_an_object_of_its_own, "client.handle is given the task in line"),
        (by_a_new_object, "Client is given the task in line"),
        (by_what_is_known, ""),
    ],
)
def test_a_task_that_is_handed_on(body: Body, name: str) -> None:
    """To what cannot be followed: that is said, and no more; what cannot retry is no matter."""
    found = planned_body(body)
    assert found.policy == {"max_attempts": 1}
    assert [name in told for told in found.differences] == [True] * bool(name)
