"""The canary: jobs of an installed task that Celery runs as it does without the bridge."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Celery, Task
from celery.app.task import Context

from ..engine.canary import Canary
from ..spec.job import Job, decoded
from . import compat

logger = logging.getLogger("ojs_bridge")

#: Where an app keeps `install`'s canary, and a request that Celery itself runs its job.
CANARY = "_ojs_canary"
_NATIVE = "ojs_native_run"
#: No message's header of that name is this.
_SAID_SO = object()
# Celery takes what its class does not know for a header, and copies it when a task calls itself.
setattr(Context, _NATIVE, None)

_handling_native: ContextVar[bool] = ContextVar("ojs_handling_native", default=False)


def partial_canary(app: Celery, task: Task) -> Canary | None:
    """Return the canary of a task that has not all of its jobs under the bridge."""
    canary: Canary = getattr(app, CANARY)
    return None if canary.covers_all(task.name) else canary


def check_canary(app: Celery) -> None:
    """Say in the log which jobs are under the bridge already; ConfigurationError for what names no task."""
    canary: Canary | None = getattr(app, CANARY, None)
    if canary is None:
        return
    installed = [task for task in app.tasks.values() if "ojs_canary" in vars(type(task))]
    canary.check([task.name for task in installed], f"installed task of the app {app.main!r}")
    if any(task.ojs_canary for task in installed):
        logger.warning("canary: under the bridge are %s; Celery itself runs the other jobs", canary)


def is_outside(task: Any, job_id: str, state: object) -> bool:
    """Return whether a job, by its id and the `ojs` header it came with, is left to Celery.

    A job that brings its own policy is not. Nor is a job with an unreadable header, which may hold a policy.
    """
    if task.ojs_canary is None or task.ojs_canary.covers(task.name, job_id):
        return False
    found = decoded(state, Job(str(job_id), task.name, ""))
    return isinstance(found, Job) and not found.retry


def begin_natively(request: Any) -> None:
    """Note that Celery itself runs a request's job."""
    setattr(request, _NATIVE, _SAID_SO)


def runs_natively(request: Any) -> bool:
    """Return whether Celery itself runs a request's job."""
    return vars(request).get(_NATIVE) is _SAID_SO


def autoretry_outside(task: Task) -> Callable[..., Any]:
    """Return a task's `run`, whose `autoretry_for` works for the jobs that Celery itself runs."""
    plain, autoretrying = compat.orig_run(task), task.run

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (autoretrying if runs_natively(task.request) else plain)(*args, **kwargs)

    return run


@contextmanager
def handled_natively() -> Iterator[None]:
    """Have a task's acknowledgement options be its own while Celery handles a job outside the bridge."""
    token = _handling_native.set(True)
    try:
        yield
    finally:
        _handling_native.reset(token)


class UnderTheBridge:
    """A task option that has one value under the bridge, and the task's own for a job outside it."""

    def __init__(self, *, value: bool) -> None:
        self._value = value
        self._name = ""
        self._owner: type = object

    def __set_name__(self, owner: type, name: str) -> None:
        """Take note of the class that sets the option."""
        self._owner, self._name = owner, name

    def __get__(self, task: Any, cls: type) -> Any:
        """Return the option's value; the task class of an older Celery may not have the option."""
        if task is None or not _handling_native.get():
            return self._value
        return getattr(super(self._owner, task), self._name, self._value)
