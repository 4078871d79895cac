"""What a worker checks, and sets right, when it starts."""

from __future__ import annotations

from typing import Any

from celery import Celery, bootsteps

from .attach import attach, policies_of, task_policy
from .canary import check_canary
from .caveats import say_caveats
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
    check_canary(app)
    bridge = attach(app)
    say_caveats(app, bridge)
    bridge.engine.try_store("`<queue>.dead` on the broker")
