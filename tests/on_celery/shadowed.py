"""A Celery app in shadow mode, as the tests' worker processes import it."""

from __future__ import annotations

import os
from pathlib import Path

from celery import Celery

from ojs_bridge.migration import shadow

QUEUE = os.environ["SHADOWED_QUEUE"]

app = Celery("shadowed", broker=os.environ["SHADOWED_BROKER"], set_as_current=False)
app.conf.update(task_default_queue=QUEUE, broker_connection_retry_on_startup=True)
shadow(app, policies={"hopeless": {"max_attempts": 2}})


@app.task(
    name="hopeless", shared=False, autoretry_for=(OSError,), max_retries=2, retry_kwargs={"countdown": 0}
)
def hopeless() -> None:
    """Always fail."""
    with Path(os.environ["SHADOWED_RUNS"]).open("a") as file:
        file.write(f"{os.getpid()}\n")
    raise OSError("down")
