"""The app of a worker process."""

import faulthandler
import os
import signal
import time
from typing import Any

from celery import signals
from celery.worker.control import control_command

from ojs_bridge.celery import holding, worker
from ojs_bridge.celery.request import OJSRequest
from ojs_bridge.engine import heartbeat
from tests import faults
from tests.contract.notes import ELSEWHERE, UNACKNOWLEDGED, Settings, client
from tests.on_celery.halting import halt_in_the_end
from tests.on_celery.project import Noting, make_app

#: `Worker.say_where_it_stands` sends this signal; a forked child hears it, too.
faulthandler.register(signal.SIGRTMIN)
settings = Settings.from_env()
holding.LONGEST_WAIT = settings.longest_wait
worker.LOOK = settings.look
heartbeat._FORGET_AFTER = settings.forget_after
app = make_app(settings)
faults.arm([*faults.STEPS_OF["celery"], *faults.AFTERWARDS])
if UNACKNOWLEDGED in os.environ:
    OJSRequest.acknowledge = lambda self: None
if ELSEWHERE in os.environ:
    heartbeat.lives_here = lambda holder: False
app.set_current()
# This handler runs after the bridge's own handler, which settles the job.
signals.task_postrun.connect(halt_in_the_end, weak=False)


@control_command()
def go_silent(state: Any) -> None:
    """Have the worker take no more messages, as after the reconnects of celery#8030."""
    consumer = state.consumer
    if settings.broker.startswith("redis"):
        for asks in [tick for tick in consumer.hub.on_tick if "Transport" in tick.__qualname__]:
            consumer.hub.on_tick.discard(asks)
    else:
        consumer.task_consumer.cancel()


@control_command()
def block(state: Any) -> None:
    """Have the worker's main thread do nothing more."""
    time.sleep(600)


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
