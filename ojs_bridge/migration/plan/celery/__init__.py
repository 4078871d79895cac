"""What Celery does with each task of an app that fails, and the policies nearest to it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from celery import Celery, Task

from ....celery.attach import POLICIES, is_bridged, task_policy
from ....spec.policy import RetryPolicy
from ..already import already_ojs, attempts_of
from ..planned import Hazard, Planned, chosen, planned
from .hazards import hazards
from .native import read
from .policy import differences_of, policy_of, retry_on_of
from .reading import Fleet


def of_celery(app: Celery, names: Collection[str] = ()) -> list[Planned]:
    """Return the plan of an app's tasks, by name: of all but Celery's own, or of those that `names` matches.

    `names` are patterns such as `billing.*`. Options and source are read; nothing is run or sent, and no
    broker is asked. Raises ConfigurationError for a name that matches none.
    """
    known = (name for name in app.tasks if not name.startswith("celery."))
    chosen_names, fleet = chosen(known, names, "task"), Fleet(app)
    return [planned(name, partial(_plan, app, fleet, app.tasks[name])) for name in chosen_names]


def _plan(app: Celery, fleet: Fleet, task: Task) -> Planned:
    if is_bridged(task) and task.ojs_native is None:
        return already_ojs(task.name, "is an ojs_task", _resolved(app, task), task.ojs_retry)
    reading = read(fleet, task)
    policy = policy_of(reading)
    return Planned(
        task.name,
        reading.native,
        policy,
        () if policy is None else tuple(differences_of(reading, policy)),
        (*_moved(app, task), *hazards(app, reading)),
        retry_on=retry_on_of(reading),
        open=reading.open,
    )


def _moved(app: Celery, task: Task) -> tuple[Hazard, ...]:
    if not is_bridged(task):
        return ()
    attempts = attempts_of(task_policy(app, task).policy)
    text = f"it is under the bridge already, with {attempts}: this is what Celery alone would do"
    return (Hazard("already-moved", text),)


def _resolved(app: Celery, task: Task) -> RetryPolicy:
    """Return an `@ojs_task`'s policy; asking the app itself would give it a bridge that it may not want."""
    if POLICIES in vars(app):
        return task_policy(app, task).policy
    return RetryPolicy.merge(task.ojs_retry)
