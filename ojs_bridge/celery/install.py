"""A whole Celery app under the bridge, its task code untouched."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task

from ..bridge import Bridge
from ..patterns import Policies
from ..policy import PartialPolicy
from .attach import POLICIES, attach, is_bridged, policies_for
from .options import native_partial
from .task import Bridged


def install(
    app: Celery, bridge: Bridge | None = None, *, policies: Mapping[str, PartialPolicy] | None = None
) -> Bridge:
    """Put a whole app, or the tasks that `policies` names, under the bridge without touching their code.

    `policies` maps task name patterns to partial policies; tasks that no pattern names stay as they are.
    Without it every task of the app is under the bridge. Returns the bridge. Raises InvalidRetryPolicy, and
    ConfigurationError for an app that already has another bridge.
    """
    named = Policies(policies)
    bridge = attach(app, bridge or Bridge())
    setattr(app, POLICIES, named)
    _adopt_new_tasks(app)
    return bridge


def _adopt_new_tasks(app: Celery) -> None:
    """Adopt the tasks there are, and each one that is registered later."""
    create, register = app._task_from_fun, app.register_task

    @functools.wraps(create)
    def create_and_adopt(fun: Any, name: str | None = None, *args: Any, **options: Any) -> Task:
        task = create(fun, name, *args, **options)
        _adopt(task, app)
        return task

    @functools.wraps(register)
    def register_and_adopt(task: Any, **options: Any) -> Task:
        registered = register(task, **options)
        _adopt(registered, app)
        return registered

    app._task_from_fun, app.register_task = create_and_adopt, register_and_adopt

    def adopt_all(**_: Any) -> None:
        for task in list(app._tasks.values()):
            _adopt(task, app)

    app.on_after_finalize.connect(adopt_all, weak=False)
    if app.finalized:
        adopt_all()


def _adopt(task: Task, app: Celery) -> None:
    """Put a registered task under the bridge when `install` says so; its own class stays its base."""
    if is_bridged(task) or task.name.startswith("celery.") or policies_for(app, task.name) is None:
        return
    native = type(task)
    attributes = {
        "__module__": native.__module__,
        "__doc__": native.__doc__,
        "ojs_native": native_partial(task),
    }
    if "_orig_run" in vars(task):
        # autoretry_for becomes a rule on which errors are final; the policy does the retrying.
        task.run = task._orig_run
    task.__class__ = type(native.__name__, (Bridged, native), attributes)
