"""The app of a worker process."""

import faulthandler
import os
import signal
import time
from typing import Any

from celery import signals
from celery.worker.control import control_command
from kombu import Producer

from ojs_bridge.celery import keeping, worker
from ojs_bridge.celery.request import OJSRequest
from ojs_bridge.engine import heartbeat
from tests import faults
from tests.contract.notes import ELSEWHERE, UNACKNOWLEDGED, Settings, client
from tests.on_celery.halting import halt_in_the_end
from tests.on_celery.project import Noting, make_app

#: `Worker.say_where_it_stands` sends this signal; a forked child hears it, too.
faulthandler.register(signal.SIGRTMIN)
settings = Settings.from_env()
keeping.LONGEST_WAIT = settings.longest_wait
worker.LOOK = settings.look
heartbeat._FORGET_AFTER = settings.forget_after
app = make_app(settings)
faults.arm([*faults.STEPS_OF["celery"], *faults.AFTERWARDS, *faults.HELD])
if UNACKNOWLEDGED in os.environ:
    OJSRequest.acknowledge = lambda self: None
if ELSEWHERE in os.environ:
    heartbeat.lives_here = lambda holder: None
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


def publish_and_note(producer: Producer, body: Any, *args: Any, **options: Any) -> Any:
    """Note what the worker publishes.

    Where the message asks for it, die before that, once, or linger afterwards. Celery's signals come earlier,
    when a retry is asked for.
    """
    headers = options.get("headers") or {}
    if "id" not in headers:
        return publish(producer, body, *args, **options)
    noting, redis, job = Noting(settings.backend), client(settings.backend), headers["id"]
    noting.call("before_publish", job)
    if headers.get("deadly") and redis.set(f"died:{job}", 1, nx=True):
        os.kill(os.getpid(), signal.SIGKILL)
    published = publish(producer, body, *args, **options)
    noting.call("after_publish", job)
    if "once" not in headers or redis.set(f"lingered:{job}", 1, nx=True):
        time.sleep(headers.get("linger", 0))
    return published


publish = Producer.publish
Producer.publish = publish_and_note
