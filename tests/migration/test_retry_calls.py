"""Where a task's code calls `self.retry`, read from its source: nothing here is ever run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from celery import Celery, Task, current_task

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.migration.plan.celery import of_celery
from ojs_bridge.migration.plan.planned import Wait
from tests.migration.planning import Body, app_with, only, planned_body, waits_of

NOT_TASKS = ["x"]


def literal(self: Task) -> None:
    raise self.retry(countdown=60, max_retries=2)


def positional(self: Task) -> None:
    raise self.retry(None, None, None, True, None, 60, 2)


def standard(self: Task) -> None:
    raise self.retry()


def not_a_retry(self: Task) -> None:
    NOT_TASKS.retry()
    print(self.request.retries, self.name)
    self.apply_async()


def fails(self: Task) -> None:
    raise OSError("down")


@pytest.mark.parametrize("body", [literal, positional])
def test_the_arguments(body: Body) -> None:
    """`max_retries` of the call comes before that of the task, and `exc` is what a job ends with."""
    found = only(app_with(body, {"result_backend": "cache+memory://"}, bind=True, max_retries=9))
    assert found.native and (found.native.runs, found.native.waits) == (3, (Wait.of(60),) * 2)
    assert found.policy == {
        "max_attempts": 3, "initial_interval": "PT1M", "max_interval": "PT1M", "jitter": False,
        "backoff_strategy": "none",
    }  # fmt: skip
    assert "MaxRetriesExceededError" in found.native.at_the_end


def test_without_a_retry_it_runs_once() -> None:
    """Whatever else has a method of that name, and whatever `max_retries` says."""
    found = planned_body(not_a_retry, max_retries=9)
    assert found.native and found.native.runs == 1
    assert (found.policy, found.differences) == ({"max_attempts": 1}, ())


def alias(self: Task) -> None:
    task = self
    again = task.retry
    again(countdown=9)


def through_the_current_task() -> None:
    raise current_task.retry(countdown=9)


def test_a_task_that_knows_itself_by_another_way() -> None:
    """`current_task`, another name for `self`, and its own name in its module or around it."""
    app = Celery("planned", broker="memory://", set_as_current=False)

    @app.task(shared=False, name="c")
    def itself() -> None:
        raise itself.retry(countdown=9)

    app.task(shared=False, name="a")(through_the_current_task)
    app.task(shared=False, name="b", bind=True)(alias)
    assert [waits_of(found)[0] for found in of_celery(app)] == [Wait.of(9)] * 3


def helper(task: Task, seconds: float = 30, **_: object) -> None:
    raise task.retry(countdown=seconds)


def helped(self: Task) -> None:
    helper(self)


def helped_by_name(self: Task) -> None:
    helper(seconds=2 * 15, task=self, other=1)


def helped_at_length(self: Task) -> None:
    helped_by_name(self)


in_one_line = lambda task: task.retry(countdown=30)  # noqa: E731


def helped_in_one_line(self: Task) -> None:
    in_one_line(self)


def recursive(self: Task) -> None:
    recursive(self)
    recursive(self)
    self.retry(countdown=30)


@pytest.mark.parametrize("body", [helped, helped_by_name, helped_at_length, helped_in_one_line, recursive])
def test_helpers_are_followed(body: Body) -> None:
    """A function that is given the task, with what else it is given."""
    assert waits_of(planned_body(body)) == [Wait.of(30)] * 3


def one_in_each_branch(self: Task, fast: bool) -> None:
    if fast:
        self.retry(countdown=1)
    elif self.request.retries:
        self.retry(countdown=3)
    nested = lambda: self.retry(countdown=2)  # noqa: E731
    nested()


def helped_twice(self: Task) -> None:
    helper(self, 1)
    helper(self, 3)


def shorter(self: Task) -> None:
    self.retry(countdown=5, max_retries=1)
    self.retry(countdown=5, max_retries=4)


def test_several_calls() -> None:
    """The waits lie between the shortest and the longest, and the policy keeps room for all of the hints."""
    found = planned_body(one_in_each_branch)
    assert waits_of(found) == [Wait(1, 2, 3)] * 3
    assert found.policy and found.policy["max_interval"] == "PT3S"
    assert waits_of(planned_body(helped_twice)) == [Wait(1, 2, 3)] * 3
    limited = planned_body(shorter)
    assert limited.native and limited.native.runs == 5
    assert "ends after 2 runs today" in limited.differences[0]


def test_automatic_retries_beside_a_call() -> None:
    """Their backoff is the policy's, the call's countdown a hint that its cap cuts."""
    options = {"autoretry_for": (OSError,), "retry_backoff": True, "retry_jitter": False}
    found = planned_body(literal, **options, retry_backoff_max=20)
    assert found.native and found.native.runs == 4
    assert found.native.waits == (Wait(1, 30.5, 60), Wait(2, 31, 60), Wait.of(4))
    assert found.policy == {"max_attempts": 4, "max_interval": "PT20S", "jitter": False}
    assert any("retry 1 waits 1 s to 20 s, not 1 s to 1 min" in told for told in found.differences)


class Base(Task):
    """A base class of the user's."""

    abstract = True

    def later(self, seconds: float) -> None:
        """Retry, as a method."""
        self.retry(countdown=seconds)


class Overriding(Base):
    """A class that changes what a retry is."""

    abstract = True

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry after 21 s, whatever is asked for."""
        return super().retry(countdown=21)


class Catching(Base):
    """A class that retries whatever its tasks raise."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the task."""
        try:
            return super().__call__(*args, **kwargs)
        except OSError as error:
            raise self.retry(exc=error, countdown=22) from error


class OverridingThat(Overriding):
    """Another one, in the older way of writing it."""

    abstract = True

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry as below."""
        return super(OverridingThat, self).retry(*args, **kwargs)  # noqa: UP008


class Calling(Base):
    """A class-based task."""

    def run(self) -> None:
        """Retry by its base class."""
        super().later(23)


def retrying(function: Body) -> Body:
    """A decorator."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise args[0].retry(exc=error, countdown=24) from error

    return inner


def unmarked(function: Body) -> Body:
    """A decorator that does not say what it wraps."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def by_method(self: Any) -> None:
    self.later(20)


#: body, base -> seconds
AROUND: dict[str, tuple[Body, type[Task], float]] = {
    "a method of a base class": (by_method, Base, 20),
    "an own `retry`": (standard, Overriding, 21),
    "an own `retry` over another": (standard, OverridingThat, 21),
    "an own `__call__`": (fails, Catching, 22),
    "a decorator": (retrying(fails), Task, 24),
    "a decorated retry": (retrying(literal), Task, 60),
    "a decorator that hides it": (unmarked(standard), Task, 180),
    "two decorators": (unmarked(retrying(fails)), Task, 24),
}


@pytest.mark.parametrize("moved", [False, True], ids=["celery", "installed"])
@pytest.mark.parametrize(("body", "base", "seconds"), AROUND.values(), ids=AROUND)
def test_calls_around_the_body(body: Body, base: type[Task], seconds: float, moved: bool) -> None:
    """Decorators, base classes and their methods are followed, on a task that `install` moved too."""
    app = app_with(body, bind=True, base=base)
    if moved:
        install(app, Bridge())
    assert waits_of(only(app))[0].most == seconds


def test_a_class_based_task() -> None:
    """Its `run`, and what it inherits."""
    app = Celery("planned", broker="memory://", set_as_current=False)
    app.register_task(type("Job", (Calling,), {"name": "job", "__module__": __name__})())
    assert waits_of(only(app)) == [Wait.of(23)] * 3


def not_now(self: Task) -> str:
    self.retry(countdown=5, throw=False)
    return "later"


def test_throw_false() -> None:
    """It is sent at once, whatever follows."""
    assert any("throw=False" in told for told in planned_body(not_now).differences)
    assert not any("throw=False" in told for told in planned_body(literal).differences)


def test_other_errors() -> None:
    """Without `autoretry_for` the bridge retries what Celery does not; with it, it does not either."""
    said = "reaches Celery without self.retry"
    assert any(said in told for told in planned_body(literal).differences)
    once = planned_body(standard, max_retries=0)
    assert (once.policy, once.differences) == ({"max_attempts": 1}, ())
    assert once.native and (once.native.retries, once.native.final) == ("nothing", "every error")
    automatic = planned_body(standard, autoretry_for=(KeyError,))
    assert automatic.differences == ()
    assert automatic.native and automatic.native.final == "every other error"
