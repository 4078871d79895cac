"""The demonstration's Celery app: `celery -A celery_app worker`."""

from __future__ import annotations

from celery import Celery
from jobs import TASK_POLICY
from project import VALKEY_URL, bridge, perform

from ojs_bridge.celery import install, ojs_task

app = Celery("demo", broker=VALKEY_URL)
app.conf.update(
    worker_prefetch_multiplier=4, task_ignore_result=True, broker_connection_retry_on_startup=True
)
install(app, bridge)


@ojs_task(app, name="demo", retry=TASK_POLICY)
def demo(name: str) -> str:
    """Perform one of the demonstration's jobs."""
    return perform("celery", name)
