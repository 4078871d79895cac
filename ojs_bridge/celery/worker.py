"""A worker: it is checked as it starts, its runs are watched, and it is ended if it takes no more messages.

After some reconnects Celery's consumer never reads messages again (celery#8030, #8091, #8384, #10302): the
process lives, and its queues fill. A thread beside the consumer notices that.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from celery import Celery, bootsteps, signals
from celery.apps.worker import Worker
from celery.utils.functional import maybe_list
from celery.worker import state
from celery.worker.control import Panel

from ..engine.threads import keep_going
from . import compat
from .installation import attach, check_task, installation, is_bridged, task_policy
from .keeping import note_stop
from .native import of, unreadable
from .receiving import check_canary
from .run import settle_success
from .task import leave_native
from .wire import NAME

logger = logging.getLogger("ojs_bridge")

#: The most tasks that a log line names.
_NAMED = 5
#: Seconds between two looks. After so many silent looks in a row the worker says so, is asked to end, and
#: ends at once, because its main thread does not react.
LOOK = 30.0
#: Seconds between two looks for runs that have broken off in this worker's own threads or greenlets.
LOOK_AT_RUNS = 1.0
SAID, ASKED, FORCED = 2, 4, 6
#: The seconds for which a look waits for the broker at most.
_PATIENCE = 10.0
#: The exit status of a worker that ended itself: a temporary failure, so that supervisors start it anew.
_STATUS = os.EX_TEMPFAIL
#: Arguments of queues whose messages the broker may keep from a free worker.
_UNEVEN = ("x-single-active-consumer", "x-priority")


class StartUp(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks an app when its worker starts, and stops a worker that cannot work; runs the threads."""

    # After the pool, whose processes are better forked before there are threads.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        check_app(worker.app, is_program=isinstance(worker, Worker))
        fit_frameworks(worker.app)
        if attach(worker.app).store:
            hear_of_revoked()
            signals.task_postrun.connect(settle_success, weak=False)
            # The first to be called: another receiver may end the process.
            compat.receivers(signals.task_postrun).sort(key=lambda each: each[1] is not settle_success)

    def start(self, worker: Any) -> None:
        """Begin to publish parked jobs."""
        app = worker.app
        bridge = attach(app)
        bridge.start(NAME, lambda: [*app.amqp.queues.consume_from])
        if isinstance(worker, Worker) and (heart := bridge.engine.reservations.heart):
            note_stop(worker, heart)

    def stop(self, worker: Any) -> None:
        """End the bridge's threads."""
        attach(worker.app).stop()


def hear_of_revoked() -> None:
    """Let workers end what waits in the store when they hear that it is revoked, by whomever; works once."""
    revoke = Panel.data["revoke"]
    if hasattr(revoke, "ojs_revokes"):
        return

    @functools.wraps(revoke)
    def revoke_what_waits(state: Any, task_id: Any, *args: Any, **options: Any) -> Any:
        answer = revoke(state, task_id, *args, **options)
        if delays := installation(state.app).delays:
            delays.revoke(maybe_list(task_id) or ())
        return answer

    revoke_what_waits.ojs_revokes = True  # type: ignore[attr-defined]
    Panel.data["revoke"] = revoke_what_waits


def watch_runs(pool: Any) -> None:
    """Watch over the runs in threads and greenlets: Celery does not hear of one that breaks off."""
    apply = pool.on_apply

    def on_apply(*args: Any, callback: Any = None, **options: Any) -> Any:
        request: Any = getattr(callback, "__self__", None)
        if not hasattr(request, "ojs"):
            return apply(*args, callback=callback, **options)
        request.ojs.is_told = False
        result = apply(*args, callback=request.ojs_end, **options)
        # A job that does little may have ended by now, and then nobody takes it out.
        if result is not None and not request.ojs.is_told:
            installation(request.app).running[request] = result
        return result

    pool.on_apply = on_apply


def check_app(app: Celery, *, is_program: bool = False) -> None:
    """Raise ConfigurationError for settings that cannot work, and log the promises that others weaken.

    The worker of `celery worker` is a program; that of a test is not.
    """
    installation(app).terms.policies.check(app.tasks, f"task of the app {app.main!r}")
    for task in app.tasks.values():
        # Options may have been set since the task was taken over.
        if of(task).taken_from and (why := unreadable(task)):
            leave_native(task, why)
        check_task(app, task.name)
        task_policy(app, task).layers.retries.resolve()
    check_canary(app)
    bridge = attach(app)
    bridge.engine.tell_unused(app.tasks, f"task of the app {app.main!r}")
    _check_acknowledgements(app)
    for caveat in installation(app).source.caveats(bridge):
        logger.warning("%s", caveat)
    dead_queue = "`<queue>.dead` on the broker, where `Bridge.broker_letters` finds them"
    bridge.engine.try_store(dead_queue, is_program=is_program)


def fit_frameworks(app: Celery) -> None:
    """Check the frameworks' private names, and let the worker take messages from Redis in the bridge's way.

    Raises ConfigurationError for a missing name without which jobs may be lost.
    """
    source = installation(app).source
    on_redis = str(app.conf.result_backend or "").startswith(("redis", "sentinel"))
    compat.check_names(source.needs | ({compat.RESULTS} if on_redis else set()))
    source.take_safely()


def _check_acknowledgements(app: Celery) -> None:
    early = sorted(name for name, task in app.tasks.items() if is_bridged(task) and not task.acks_late)
    if early:
        more = f" and {len(early) - _NAMED} more" if len(early) > _NAMED else ""
        logger.warning(
            "acks_late is off for %s%s: a job whose worker dies is lost, and one whose outcome finds neither "
            "broker nor store",
            ", ".join(early[:_NAMED]),
            more,
        )


class ConsumerWatch(bootsteps.StartStopStep):  # type: ignore[misc]
    """Looks, from its own threads, whether a free worker takes messages, and whether runs have broken off.

    It also keeps the messages that a worker has from other workers, where the broker gives them out again.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        reservations = attach(consumer.app).engine.reservations
        self._visibility = installation(consumer.app).source.visibility(consumer, reservations)
        self._over: threading.Event | None = None
        self._takes, self._silent = True, 0
        if not consumer.pool.uses_semaphore:
            watch_runs(consumer.pool)
        create = compat.create_task_handler(consumer, None)
        self._hears = create is not None
        if self._hears:
            compat.create_task_handler.set(consumer, self._noting(create))

    def _noting(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `create_task_handler` whose handlers note that a message has come."""

        @functools.wraps(create)
        def create_noting(*args: Any, **kwargs: Any) -> Any:
            handle = create(*args, **kwargs)

            def on_task_received(message: Any) -> Any:
                self._takes = True
                return handle(message)

            return on_task_received

        return create_noting

    def start(self, consumer: Any) -> None:
        """Begin, once; the silence is watched if the broker can say how many messages a queue has."""
        if self._visibility is not None:
            self._visibility.connected(consumer.task_consumer.channel)
        if self._over is not None:
            return
        self._over = threading.Event()
        if not consumer.pool.uses_semaphore:
            keep_going("ojs-runs", functools.partial(self._look, consumer, self._over))
        if self._hears and installation(consumer.app).source.timeouts:
            keep_going("ojs-watch", functools.partial(self._watch, consumer, self._over))

    def stop(self, consumer: Any) -> None:
        """Go on: the worker connects anew, or a warm shutdown waits for running jobs."""

    def shutdown(self, _: Any) -> None:
        """End with the worker."""
        if self._visibility is not None:
            self._visibility.end()
        if self._over is not None:
            self._over.set()

    terminate = shutdown

    def _look(self, consumer: Any, over: threading.Event) -> bool:
        """End each run that has left its thread or greenlet without an end, as if its process had died."""
        if over.wait(LOOK_AT_RUNS):
            return False
        own = installation(consumer.app)
        for request, result in tuple(own.running.items()):
            future = compat.future(result, None)
            is_over = result.dead if future is None else future.done()
            if is_over and any(keeper.take_left(request, result) for keeper in tuple(own.keepers)):
                request.ojs_left(result.exception if future is None else future.exception())
        return True

    def _watch(self, consumer: Any, over: threading.Event) -> bool:
        if over.wait(LOOK):
            return False
        try:
            queue = self._neglected(consumer)
        except Exception as error:  # noqa: BLE001 - Celery itself says that the broker is away
            logger.info("whether this worker takes what its queues have is not known: %r", error)
            queue = None
        self._silent = self._silent + 1 if queue else 0
        if queue:
            _act(self._silent, queue)
        return True

    def _neglected(self, consumer: Any) -> str | None:
        """Return a queue with messages, if this free worker has taken none since the last look."""
        takes, self._takes = self._takes, False
        if takes or not _is_free(consumer):
            return None
        return _filled(consumer.app)


def _is_free(consumer: Any) -> bool:
    """Return whether a worker would run a message at once."""
    if consumer.blueprint.state != bootsteps.RUN or consumer.connection is None:
        return False
    limited = any(bucket and bucket.contents for bucket in compat.task_buckets(consumer).values())
    kept_until_due = consumer.app.conf.get("worker_eta_task_limit")
    full = kept_until_due and consumer.qos.value >= kept_until_due
    jobs, places = len(compat.reserved_requests(state)), compat.num_processes(consumer.pool)
    return not limited and not full and jobs < places


def _filled(app: Celery) -> str | None:
    """Return a queue that has messages for this worker; a new connection asks the broker."""
    timeouts = dict.fromkeys(installation(app).source.timeouts, _PATIENCE)
    with app.connection_for_read(connect_timeout=_PATIENCE, transport_options=timeouts) as connection:
        for queue in app.amqp.queues.consume_from.values():
            arguments = {**(queue.queue_arguments or {}), **(queue.consumer_arguments or {})}
            if arguments.get("x-queue-type") == "stream" or any(map(arguments.get, _UNEVEN)):
                continue
            try:
                if connection.channel().queue_declare(queue.name, passive=True).message_count:
                    return str(queue.name)
            except connection.channel_errors:  # there is none, or nobody else may ask for it
                continue
    return None


def _act(silent: int, queue: str) -> None:
    if silent == SAID:
        logger.error("this worker is free and takes nothing, though the queue %r has messages", queue)
    elif silent == ASKED:
        logger.critical("this worker still takes nothing, and ends; its supervisor is to start it anew")
        # Celery's signal handlers do this, too, but with a status of 0.
        compat.should_stop.set(state, _STATUS)
    elif silent >= FORCED:
        logger.critical("this worker does not hear that it is to end, and ends at once")
        os._exit(_STATUS)
