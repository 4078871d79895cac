"""A request class of a task's own, however it is given: its methods are called as without the bridge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task
from celery.worker.request import Request

from ojs_bridge import Bridge
from ojs_bridge.celery import OJSTask, install, ojs_task
from tests.on_celery.by_hand import ByHand, natively

Making = Callable[[Celery, Any], object]
calls: list[tuple[Any, ...]] = []


class Audited(Request):
    """The request class of Celery's own manual."""

    def on_timeout(self, soft: bool, timeout: float) -> None:
        super().on_timeout(soft, timeout)
        calls.append(("timeout", soft, timeout))

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        calls.append(("failure", return_ok))


PATH = f"{__name__}.Audited"


def base_of(given: Any) -> type[Task]:
    return type("Base", (Task,), {"abstract": True, "Request": given})


def by_a_base(app: Celery, given: Any) -> None:
    app.task(shared=False, name="job", base=base_of(given), bind=True, acks_late=True)(run)


def by_a_class(app: Celery, given: Any) -> None:
    app.register_task(type("Job", (Task,), {"name": "job", "run": run, "Request": given})())


def by_a_base_of_a_class(app: Celery, given: Any) -> None:
    app.register_task(type("Job", (base_of(given),), {"name": "job", "run": run})())


def by_an_option(app: Celery, given: Any) -> None:
    app.task(shared=False, name="job", bind=True, Request=given)(run)


def by_the_app(app: Celery, given: Any) -> None:
    app.task_cls = base_of(given)
    app.task(shared=False, name="job", bind=True)(run)


def by_a_task(app: Celery, given: Any) -> None:
    task = app.task(shared=False, name="job", bind=True, lazy=False)(run)
    task.Request = given


def by_an_annotation(app: Celery, given: Any) -> None:
    app.conf.task_annotations = {"job": {"Request": given}}
    app.task(shared=False, name="job", bind=True)(run)


def ours_by_a_base(app: Celery, given: Any) -> None:
    ojs_task(app, shared=False, name="job", base=base_of(given), bind=True)(run)


def ours_by_an_option(app: Celery, given: Any) -> None:
    ojs_task(app, shared=False, name="job", bind=True, Request=given)(run)


def ours_by_a_class(app: Celery, given: Any) -> None:
    app.register_task(type("Job", (OJSTask,), {"name": "job", "run": run, "Request": given})())


def ours_after_a_base(app: Celery, given: Any) -> None:
    app.register_task(type("Job", (base_of(given), OJSTask), {"name": "job", "run": run})())


def ours_by_the_app(app: Celery, given: Any) -> None:
    app.task_cls = base_of(given)
    ojs_task(app, shared=False, name="job", bind=True)(run)


NATIVES: list[Making] = [
    by_a_base, by_a_class, by_a_base_of_a_class, by_an_option, by_the_app, by_a_task, by_an_annotation
]  # fmt: skip
OURS: list[Making] = [
    ours_by_a_base, ours_by_an_option, ours_by_a_class, ours_after_a_base, ours_by_the_app
]  # fmt: skip
#: The end of a run, and the header that causes this end.
ENDS = {"ok": {}, "raises": {}, "killed": {"dies": "killed"}, "time limit": {"dies": "time limit"}}


def run(task: Task, how: str) -> None:
    if how == "raises":
        raise OSError(how)


def installed(app: Celery, canary: float | None = None) -> None:
    install(app, Bridge(retry={"max_attempts": 2, "initial_interval": "PT0.001S"}), canary=canary)


def heard(unique: str, installing: Callable[[Celery], object], make: Making, given: Any) -> dict[str, Any]:
    """The calls of a request class at a job's first run, for each way in which the run can end."""
    hand = ByHand(unique, installing)
    make(hand.app, given)
    told = {}
    for how, headers in ENDS.items():
        calls.clear()
        hand.send("job", how, headers=headers)
        hand.deliver()
        told[how] = list(calls)
        while message := hand.take():
            message.ack()
    return told


@functools.cache
def expected() -> dict[str, Any]:
    """The calls of a request class without the bridge."""
    told = heard("natively", natively, by_a_base, Audited)
    assert [len(told[how]) for how in ENDS] == [0, 1, 1, 2]
    return told


@pytest.mark.parametrize("given", [Audited, PATH, PATH.replace(".Audited", ":Audited")], ids=str)
@pytest.mark.parametrize("make", NATIVES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("canary", [None, 50, 0])
def test_under_install(unique: str, make: Making, given: Any, canary: float | None) -> None:
    assert heard(unique, functools.partial(installed, canary=canary), make, given) == expected()


@pytest.mark.parametrize("given", [Audited, PATH], ids=str)
@pytest.mark.parametrize("make", OURS, ids=lambda make: make.__name__)
def test_under_ojs_task(unique: str, make: Making, given: Any) -> None:
    assert heard(unique, installed, make, given) == expected()
