"""Runs Celery's tasks eagerly, with failures in place of their bodies: natively, then under the policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from celery import Celery, Task, signals
from celery.exceptions import Ignore

from ....bridge import Bridge
from ....celery import compat, install
from ....celery.attach import POLICIES, task_policy
from ....config.policies import EntryFields
from ....engine.events import Event
from ....errors import ConfigurationError
from .. import LIMIT, Measured, Moved, Planned, measure, raised_for
from .native import autoretries


def measured(app: Celery, found: Sequence[Planned]) -> list[Planned]:
    """Return a plan after measuring the tasks that can be measured; raises ConfigurationError.

    Bodies are not run, but hooks such as `on_failure` and receivers of signals are. Afterwards the app is
    under a bridge whose store is gone.
    """
    if POLICIES in vars(app):
        raise ConfigurationError("verify: the app is under the bridge already: name the app as it was before")
    app.conf.task_eager_propagates = False
    return measure(found, lambda name: _native(app.tasks[name]), partial(_moved, app))


def _native(task: Task) -> Measured:
    waits: list[float] = []

    def heard(sender: Any = None, reason: Any = None, **_: Any) -> None:
        if sender.name == task.name:
            waits.append(float(reason.when or 0))

    signals.task_retry.connect(heard, weak=False)
    try:
        beneath = compat.orig_run.name if autoretries(task) else "run"
        return replace(_applied(task, beneath), waits=tuple(waits))
    finally:
        signals.task_retry.disconnect(heard)


def _moved(app: Celery, url: str, entries: Mapping[str, EntryFields]) -> Iterator[Moved]:
    events: list[Event] = []
    bridge = Bridge(url, listeners=[events.append], retry={})
    install(app, bridge, policies=entries, canary=100)
    for name in entries:
        events.clear()
        found = _applied(app.tasks[name], "run")
        bridge.flush(30)
        delays = [event.data["delay_ms"] / 1000 for event in events if event.type == "job.retrying"]
        policy = task_policy(app, app.tasks[name]).policy
        yield name, (replace(found, waits=tuple(delays)), policy)
    bridge.stop()


def _applied(task: Task, body: str) -> Measured:
    """Run a task with a failure in place of the attribute that is its body."""
    runs = 0
    error = raised_for(task.autoretry_for if autoretries(task) else ())

    def fails(*_: Any, **__: Any) -> None:
        nonlocal runs
        runs += 1
        if runs >= LIMIT:
            raise Ignore
        raise error

    with patch.object(task, body, fails), patch.object(task, "store_eager_result", new=False):
        result = task.apply()
    # Celery shows an error that it cannot pickle in a wrapper.
    name = getattr(result.result, "exc_cls_name", type(result.result).__name__)
    return Measured(runs, (), "" if runs >= LIMIT else f"{result.state} with {name}")
