"""The app of a worker process."""

import faulthandler
import os
import signal
import time
from typing import Any

from celery import signals

from ojs_bridge.celery import holding
from tests.on_celery.project import Noting, Settings, client, make_app

#: What `Worker.say_where_it_stands` sends; a forked child hears it too.
faulthandler.register(signal.SIGRTMIN)
settings = Settings.from_env()
holding.LONGEST_WAIT = settings.longest_wait
app = make_app(settings)
app.set_current()


@signals.before_task_publish.connect
def note_publishing(headers: dict[str, Any], **_: Any) -> None:
    """Note what the worker publishes, and die, once, where the message asks for it."""
    Noting(settings.backend).call("before_publish", headers["id"])
    if headers.get("deadly") and client(settings.backend).set(f"died:{headers['id']}", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)


@signals.after_task_publish.connect
def note_published(headers: dict[str, Any], **_: Any) -> None:
    """Note what the worker has published, and linger where the message asks for it."""
    Noting(settings.backend).call("after_publish", headers["id"])
    if "once" not in headers or client(settings.backend).set(f"lingered:{headers['id']}", 1, nx=True):
        time.sleep(headers.get("linger", 0))
