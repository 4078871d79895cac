"""What a worker checks, and sets right, when it starts."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task, bootsteps
from celery.worker.request import Request
from kombu.utils.imports import symbol_by_name

from .attach import attach, is_bridged, policies_of, task_policy
from .canary import check_canary
from .caveats import say_caveats
from .request import OJSRequest
from .taking import take_safely


class StartUp(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks an app's bridge when its worker starts, which what cannot work stops; runs its threads."""

    # After the pool, whose processes are better forked before there are threads.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        check(worker.app)
        take_safely(worker.app)

    def start(self, worker: Any) -> None:
        """Begin to publish parked retries."""
        attach(worker.app).start()

    def stop(self, worker: Any) -> None:
        """End the bridge's threads."""
        attach(worker.app).stop()


def check(app: Celery) -> None:
    """Raise ConfigurationError for what cannot work, and say in the log what goes without a store."""
    policies_of(app).check(app.tasks, f"task of the app {app.main!r}")
    for task in app.tasks.values():
        task_policy(app, task).retry_on.resolve()
        if is_bridged(task):
            _keep_request_class(task)
    check_canary(app)
    bridge = attach(app)
    say_caveats(app, bridge)
    bridge.try_store("`<queue>.dead` on the broker")


def _keep_request_class(task: Task) -> None:
    """Mix a request class of the user's own with the bridge's."""
    for cls in type(task).__mro__:
        found = symbol_by_name(vars(cls).get("Request"))
        if found is not None and not issubclass(found, OJSRequest):
            if found is not Request:
                task.Request = type(found.__name__, (OJSRequest, found), {})
            return
