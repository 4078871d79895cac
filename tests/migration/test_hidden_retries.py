"""Retries that a task's code does not ask for by `self.retry(...)`: followed, or said to be unknown."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, current_task

from ojs_bridge.migration.plan.planned import Wait
from tests.migration.planning import Body, app_with, only, planned_body, waits_of

ERROR = OSError("down")


def ambient() -> None:
    raise current_task.retry(exc=ERROR, countdown=7)


def through_a_helper(self: Task) -> None:
    ambient()


def through_the_object(self: Task) -> None:
    task = current_task._get_current_object()
    raise task.retry(exc=ERROR, countdown=7)


def by_its_name(self: Task) -> None:
    getattr(self, "retry")(exc=ERROR, countdown=7)  # noqa: B009


@pytest.mark.parametrize("body", [through_a_helper, through_the_object, by_its_name])
def test_ways_that_are_followed(body: Body) -> None:
    """A helper that asks Celery for the task, the task behind its proxy, and `getattr`."""
    found = planned_body(body)
    assert waits_of(found) == [Wait.of(7)] * 3
    assert found.native and found.native.runs == 4 == runs_of(body)


def call_with(on_error: Any) -> None:
    on_error(exc=ERROR, countdown=6)


def given_away(self: Task) -> None:
    call_with(self.retry)


def in_part(self: Task) -> None:
    again = functools.partial(self.retry, countdown=5)
    again(exc=ERROR)


def in_an_object(self: Task) -> None:
    box = SimpleNamespace()
    box.task = self
    box.task.retry(exc=ERROR, countdown=3)


def in_a_pair(self: Task) -> None:
    me, seconds = self, 3
    me.retry(exc=ERROR, countdown=seconds)


def from_the_registry(self: Task) -> None:
    self.app.tasks["job"].retry(exc=ERROR, countdown=3)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (given_away, "call_with"),
        (in_part, "functools.partial"),
        (in_an_object, "box.task.retry"),
        (in_a_pair, "me.retry"),
        (from_the_registry, "self.app.tasks['job'].retry"),
    ],
)
def test_ways_that_are_not_followed(body: Body, name: str) -> None:
    """They retry, so that a plan which finds no retry is not exact, and says where to look."""
    assert runs_of(body) == 4
    [told] = planned_body(body).differences
    assert told.startswith(f"{name} is not followed in line ")
    assert told.endswith("whether self.retry is called there is not known")


class Polite(Task):  # type: ignore[misc]
    """A base class with a backoff of its own in `retry`."""

    abstract = True

    def retry(self, *args: Any, **options: Any) -> Any:
        options.setdefault("countdown", 10 * 2**self.request.retries)
        return super().retry(*args, **options)


def fails() -> None:
    raise ERROR


def test_a_retry_of_its_own_is_what_autoretry_calls() -> None:
    """Its countdown is a hint that the plan does not know, not `default_retry_delay`."""
    found = only(app_with(fails, base=Polite, autoretry_for=(OSError,)))
    assert any(text.startswith("countdown and max_retries of self.retry") for text in found.differences)
    assert found.policy and found.policy["max_interval"] == "P1D"


def test_an_annotation_that_comes_too_late() -> None:
    """Celery reads the backoff of a task's own options when it wraps the task, and so do plan and policy."""
    conf = {"task_annotations": {"job": {"retry_backoff": 20, "retry_jitter": False, "max_retries": 2}}}
    found = only(app_with(fails, conf, autoretry_for=(OSError,), retry_backoff=5, retry_jitter=True))
    assert waits_of(found) == [Wait(0, 2.5, 5), Wait(0, 5, 10)]
    assert found.policy and found.policy["initial_interval"] == "PT2.5S"


def runs_of(body: Body) -> int:
    """How often Celery itself runs a task that is bound to a body."""
    ran: list[int] = []

    @functools.wraps(body)
    def counted(self: Task) -> None:
        ran.append(self.request.retries)
        body(self)

    app = Celery("running", broker="memory://", set_as_current=False)
    app.task(shared=False, name="job", bind=True)(counted)
    app.tasks["job"].apply()
    return len(ran)
