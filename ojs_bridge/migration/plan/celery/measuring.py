"""Celery's tasks run eagerly, with a failure in place of their bodies: natively, then under the policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from celery import Celery, Task, signals
from celery.exceptions import Ignore

from ....bridge import Bridge
from ....celery import install
from ....celery.attach import POLICIES, task_policy
from ....engine.events import Event
from ....errors import ConfigurationError
from ..measuring import LIMIT, Measured, can_be_measured, judged, raised_for
from ..planned import Planned
from .ways import autoretries


def measured(app: Celery, found: Sequence[Planned]) -> list[Planned]:
    """Return a plan with what each task did that can be measured; raises ConfigurationError.

    Bodies are not run. Hooks such as `on_failure` and receivers of signals are. The app is under a bridge of
    its own afterwards, with a store that is gone.
    """
    if POLICIES in vars(app):
        raise ConfigurationError("verify: the app is under the bridge already: name the app as it was before")
    app.conf.task_eager_propagates = False
    names = [one.name for one in found if can_be_measured(one)]
    native = {name: _native(app.tasks[name]) for name in names}
    with TemporaryDirectory() as folder:
        events: list[Event] = []
        bridge = Bridge(f"sqlite:///{Path(folder) / 'ojs.db'}", listeners=[events.append], retry={})
        policies = {_exactly(one.name): one.entry for one in found if one.name in names}
        install(app, bridge, policies=policies, canary=100)
        moved = {name: _moved(app.tasks[name], bridge, events) for name in names}
        bridge.stop()
    return [
        judged(one, native[one.name], moved[one.name], task_policy(app, app.tasks[one.name]).policy)
        if one.name in names
        else one
        for one in found
    ]


def _exactly(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _native(task: Task) -> Measured:
    waits: list[float] = []

    def heard(sender: Any = None, reason: Any = None, **_: Any) -> None:
        if sender.name == task.name:
            waits.append(float(reason.when or 0))

    signals.task_retry.connect(heard, weak=False)
    try:
        beneath = "_orig_run" if autoretries(task) else "run"
        return replace(_applied(task, beneath), waits=tuple(waits))
    finally:
        signals.task_retry.disconnect(heard)


def _moved(task: Task, bridge: Bridge, events: list[Event]) -> Measured:
    events.clear()
    found = _applied(task, "run")
    bridge.flush(30)
    delays = [event.data["delay_ms"] / 1000 for event in events if event.type == "job.retrying"]
    return replace(found, waits=tuple(delays))


def _applied(task: Task, body: str) -> Measured:
    """Run a task with a failure in the place of its body, which is one of its attributes."""
    runs = [0]
    error = raised_for(task.autoretry_for if autoretries(task) else ())

    def fails(*_: Any, **__: Any) -> None:
        runs[0] += 1
        if runs[0] >= LIMIT:
            raise Ignore
        raise error

    with _replaced(task, body, fails), _replaced(task, "store_eager_result", False):  # noqa: FBT003
        result = task.apply()
    # Celery shows what it cannot pickle in a wrapper.
    name = getattr(result.result, "exc_cls_name", type(result.result).__name__)
    end = "" if runs[0] >= LIMIT else f"{result.state} with {name}"
    return Measured(runs[0], (), end)


@contextmanager
def _replaced(task: Task, name: str, body: Any) -> Iterator[None]:
    """Put something in the place of an attribute of a task."""
    before = vars(task).get(name)
    setattr(task, name, body)
    try:
        yield
    finally:
        if before is None:
            delattr(task, name)
        else:
            setattr(task, name, before)
