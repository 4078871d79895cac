"""A Celery project whose tasks do what their arguments say, and note each of their runs."""

from __future__ import annotations

import functools
import os
import time
from typing import Any, ClassVar

from celery import Celery, Task
from celery.exceptions import MaxRetriesExceededError
from kombu import Exchange, Queue

from ojs_bridge.celery import OJSTask, install, ojs_task
from tests.contract import notes
from tests.contract.notes import MASTER, Settings, bridge_of
from tests.contract.steps import ERRORS, KEEP, Run, Step


class Odd(BaseException):
    pass


class SlowToSay(Exception):
    def __str__(self) -> str:
        time.sleep(6)
        return "at last"


class Unpicklable(Exception):
    def __init__(self, what: str, handle: object = None) -> None:
        super().__init__(what)
        self.handle = lambda: what


class Noting(notes.Noting):
    """Notes runs and handlers of Celery's tasks."""

    def run(self, task: Task) -> int:
        """Note a run of a job and return how many there were."""
        request = task.request
        run = {
            "at": time.time(),
            "pid": os.getpid(),
            "retries": request.retries,
            "state": getattr(request, "ojs", None),
            "headers": repr(request.headers),
            "properties": repr(request.properties),
            "delivery": request.delivery_info,
            "parent": request.parent_id,
            "root": request.root_id,
            "expires": request.expires,
            "timelimit": request.timelimit,
            "shadow": request.shadow,
            "stamps": request.stamps,
            "args": repr(request.args),
        }
        return self.note("runs", request.id, run)

    def call(self, name: str, job_id: str, *what: Any) -> None:
        self.note("calls", job_id, [name, *what])


def make_app(settings: Settings, results: str = "") -> Celery:
    """Build the project's app; `results` names another class for its result backend."""
    app = Celery(
        f"project-{settings.queue}",
        broker=settings.broker,
        backend=settings.results or results + settings.backend,
        set_as_current=False,
    )
    app.conf.update(
        accept_content=["json", "pickle", "yaml"],
        result_accept_content=["json", "pickle"],
        broker_connection_retry_on_startup=True,
        result_extended=True,
        task_acks_late=settings.acks_late,
        task_default_queue=settings.queue,
        worker_prefetch_multiplier=4,
        # On a loaded machine a child starts slowly: after the usual 4 s Celery 5.4 fails an assertion.
        worker_proc_alive_timeout=60,
        task_queues=queues_of(settings),
        worker_cancel_long_running_tasks_on_connection_loss=settings.cancels,
    )
    if settings.soft_shutdown:
        app.conf.worker_soft_shutdown_timeout = settings.soft_shutdown
    if settings.broker.startswith(("redis", "sentinel")):
        # A worker killed while it looks for lost deliveries would keep the others from it for five minutes.
        app.conf.broker_transport_options = {"unacked_mutex_expire": 3, "master_name": MASTER}
        app.conf.broker_channel_error_retry = settings.broker.startswith("sentinel")
    if settings.visibility:
        app.conf.broker_transport_options = {
            **app.conf.broker_transport_options,
            "visibility_timeout": settings.visibility,
        }
    noting = Noting(settings.backend)
    install(app, bridge_of(settings), policies={"native.*": {}, "native.two": {"max_attempts": 2}})
    define_tasks(app, noting, acks_late=settings.acks_late)
    define_odd_tasks(app, noting)
    define_plain_tasks(app, noting)
    define_native_tasks(app, noting)
    define_class_based_tasks(app, noting)
    return app


def queues_of(settings: Settings) -> list[Queue]:
    topic = Exchange(f"{settings.queue}-topic", type="topic")
    arguments = {"x-queue-type": "quorum"} if settings.quorum else None
    queues = [
        Queue(
            f"{settings.queue}-topic", topic, routing_key=f"{settings.queue}.*.new", queue_arguments=arguments
        )
    ]
    if not settings.quorum:
        direct = Exchange(settings.queue, type="direct")
        rest = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{settings.queue}.rest"}
        limited = settings.limit and {"x-max-length": settings.limit, "x-overflow": "reject-publish", **rest}
        if settings.deliveries:
            limited = {"x-queue-type": "quorum", "x-delivery-limit": settings.deliveries}
        queues += [
            Queue(settings.queue, direct, routing_key=settings.queue, queue_arguments=limited),
            Queue(f"{settings.queue}-other", Exchange(f"{settings.queue}-x"), routing_key="strange.key"),
        ]
    return queues


def base_with_handlers(noting: Noting) -> type[Task]:
    class Handlers(Task):
        abstract = True

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            noting.call("on_retry", task_id, repr(exc))

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            noting.call("on_failure", task_id, repr(exc))

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            noting.call("on_success", task_id)

        def after_return(self, status: str, *rest: Any) -> None:
            noting.call("after_return", rest[1], status)

    return Handlers


def base_with_call(noting: Noting) -> type[Task]:
    class InContext(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            noting.call("enter", self.request.id)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                noting.call("leave", self.request.id)

    return InContext


def define_tasks(app: Celery, noting: Noting, *, acks_late: bool) -> None:
    ojs = functools.partial(ojs_task, app, bind=True, shared=False, errors=ERRORS, acks_late=acks_late)

    def run(self: Task, *steps: Step, **named: Any) -> Any:
        again = lambda: self.signature_from_request().apply_async()  # noqa: E731
        return Run(noting.run(self), self, named, noting.url, again).does(steps)

    ojs(name="act")(run)

    @ojs(name="follow")
    def follow(self: Task, before: Any, *steps: Step) -> Any:
        return run(self, *steps)

    ojs(name="act_kept", retry={"max_attempts": 2, **KEEP})(run)
    ojs(name="interruptible")(run)
    ojs(name="hard", time_limit=4, retry={"max_attempts": 2, **KEEP})(run)
    ojs(name="soft", soft_time_limit=4, retry={"max_attempts": 2, **KEEP})(run)
    ojs(name="handled", base=base_with_handlers(noting))(run)
    ojs(name="in_context", base=base_with_call(noting))(run)

    @ojs_task(app, shared=False, name="typed", acks_late=acks_late)
    def typed(number: int, *, word: str = "") -> str:
        return word * number


def define_odd_tasks(app: Celery, noting: Noting) -> None:
    ojs = functools.partial(ojs_task, app, bind=True, shared=False)

    @ojs(name="calls_itself")
    def calls_itself(self: Task, depth: int) -> int:
        noting.run(self)
        if depth == 0:
            raise self.retry(exc=OSError("deep"), countdown=0.1)
        return self(depth - 1)

    @ojs(name="calls_another")
    def calls_another(self: Task) -> Any:
        noting.run(self)
        return app.tasks["retries_bare"]()

    @app.task(shared=False, name="retries_bare", bind=True)
    def retries_bare(self: Task) -> None:
        self.retry()

    @ojs(name="replaces")
    def replaces(self: Task, *steps: Step, **options: Any) -> Any:
        noting.run(self)
        return self.replace(app.tasks["act"].s(*steps).set(**options))

    @ojs(name="passes_on")
    def passes_on(self: Task) -> str:
        noting.run(self)
        if self.request.retries == 0:
            raise OSError("first")
        return app.tasks["act"].apply_async(("ok",), headers=dict(self.request.headers)).id


def define_plain_tasks(app: Celery, noting: Noting) -> None:
    @app.task(shared=False, name="collect")
    def collect(*args: Any) -> list[Any]:
        return list(args)

    @app.task(shared=False, name="follow_up")
    def follow_up(before: Any, word: str) -> None:
        noting.note("followed", word, before)

    @app.task(shared=False, name="errback", bind=True)
    def errback(self: Task, failed_id: str) -> None:
        noting.call("errback", failed_id)

    @app.task(shared=False, name="ping")
    def ping() -> str:
        return "pong"


def define_native_tasks(app: Celery, noting: Noting) -> None:
    def run(self: Task, *steps: Step) -> Any:
        return Run(noting.run(self), self, url=noting.url).does(steps)

    def native(name: str, **options: Any) -> None:
        app.task(shared=False, name=f"native.{name}", bind=True, **options)(run)

    native("plain")
    native("two")
    native("five", max_retries=4)
    native(
        "auto",
        autoretry_for=(OSError,),
        dont_autoretry_for=(FileNotFoundError,),
        retry_backoff=1,
        retry_jitter=False,
    )
    native("delay", autoretry_for=(OSError,), default_retry_delay=0.4)
    native("throws", throws=(KeyError,))
    app.task(shared=False, name="untouched", bind=True, max_retries=1, default_retry_delay=0)(run)
    app.task(shared=False, name="early", bind=True, acks_late=False)(run)

    @app.task(shared=False, name="native.falls_back", bind=True)
    def falls_back(self: Task) -> str:
        noting.run(self)
        try:
            self.retry(countdown=0.1)
        except MaxRetriesExceededError:
            return "fell back"
        return "not reached"

    @app.task(shared=False, name="native.swallows", bind=True)
    def swallows(self: Task) -> str:
        n = noting.run(self)
        if n < 3:
            try:
                self.retry(countdown=0.2)
            except Exception:
                return f"swallowed {n}"
        return "done"


def define_class_based_tasks(app: Celery, noting: Noting) -> None:
    class ByClass(Task):
        name = "native.by_class"
        max_retries = 1

        def run(self, *steps: Step) -> Any:
            noting.run(self)
            raise OSError("class")

    app.register_task(ByClass())

    class Own(OJSTask):
        name = "own"
        ojs_retry: ClassVar = {"max_attempts": 2}
        ojs_errors: ClassVar = {OSError: "disk.full"}

        def run(self) -> None:
            noting.run(self)
            raise OSError("own")

    app.register_task(Own())
