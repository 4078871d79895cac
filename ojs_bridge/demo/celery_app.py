"""The demonstration's Celery app: `celery -A ojs_bridge.demo.celery_app worker`."""

from __future__ import annotations

from celery import Celery

from ..celery import install, ojs_task
from .jobs import TASK_POLICY
from .project import VALKEY_URL, bridge, perform

app = Celery("demo", broker=VALKEY_URL)
app.conf.update(
    worker_prefetch_multiplier=4, task_ignore_result=True, broker_connection_retry_on_startup=True
)
install(app, bridge)


@ojs_task(app, name="demo", retry=TASK_POLICY)
def demo(name: str) -> str:
    """Perform one of the demonstration's jobs."""
    return perform("celery", name)
