"""`install` puts a whole Celery app under the bridge, and leaves the code of its tasks alone."""

from __future__ import annotations

import functools
from typing import Any

from celery import Celery, Task

from ..bridge import Bridge
from ..config.policy_files import PoliciesOrFile
from ..config.settings import InFlight, begins_afresh, the_policies
from ..engine.canary import Canary, Percentages
from . import compat
from .attach import AFRESH, POLICIES, attach, is_bridged, policies_for, sent_on_commit
from .canary import CANARY, outside_of
from .native_options import AUTORETRYING, native_of
from .task import Bridged, ReplacedMethods, autoretrying_outside


def install(
    app: Celery,
    bridge: Bridge | None = None,
    *,
    policies: PoliciesOrFile | None = None,
    canary: Percentages | None = None,
    in_flight: InFlight = "counted",
) -> Bridge:
    """Put a whole app, or the tasks that `policies` names, under the bridge without touching their code.

    `policies` maps task name patterns to partial policies, or is the path of a TOML or JSON file of them;
    tasks that no pattern names stay as they are. Without it the configured ones count (OJS_BRIDGE_POLICIES);
    without those every task of the app is under the bridge. `canary` is the percentage of their jobs that is,
    or maps task name patterns to percentages (OJS_BRIDGE_CANARY); Celery itself runs the others, but for
    those that bring a policy of their own. `in_flight` is about jobs that were retried natively more often
    than their policy allows: `"counted"`, they end at their next failure, or `"afresh"`, they begin at
    attempt 1. Returns the bridge. Raises InvalidRetryPolicy, and ConfigurationError for an app that already
    has another bridge, for what is not a percentage and for another `in_flight`.
    """
    named, partly, afresh = the_policies(policies), Canary(canary), begins_afresh(in_flight)
    bridge = attach(app, bridge or Bridge())
    setattr(app, POLICIES, named)
    setattr(app, CANARY, partly)
    setattr(app, AFRESH, afresh)
    _adopt_new_tasks(app)
    return bridge


def _adopt_new_tasks(app: Celery) -> None:
    """Adopt the tasks that there are, and each task that is registered later."""
    create, register = compat.task_from_fun(app), app.register_task

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

    compat.task_from_fun.set(app, create_and_adopt)
    app.register_task = register_and_adopt

    def adopt_all(**_: Any) -> None:
        for task in list(compat.tasks(app).values()):
            _adopt(task, app)

    app.on_after_finalize.connect(adopt_all, weak=False)
    if app.finalized:
        adopt_all()


def _adopt(task: Task, app: Celery) -> None:
    """Put a registered task under the bridge if a policy names it; its own class stays its base."""
    if is_bridged(task) or task.name.startswith("celery.") or policies_for(app, task.name) is None:
        return
    native = type(task)
    attributes = {
        "__module__": native.__module__,
        "__doc__": native.__doc__,
        "ojs_native": property(native_of),
        "ojs_outside": outside_of(task),
    }
    if compat.orig_run.is_own(task):
        setattr(task, AUTORETRYING, task.run)
        # The policy retries; autoretry_for says only which errors are retried.
        task.run = autoretrying_outside(task) if attributes["ojs_outside"] else compat.orig_run(task)
    bases = (*sent_on_commit(native), Bridged, native, ReplacedMethods)
    task.__class__ = type(native.__name__, bases, attributes)
