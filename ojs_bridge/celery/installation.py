"""An app has an installation, a task its settings, and a sent job its policy by the option `ojs_retry`."""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.functional import maybe_list
from celery.utils.imports import symbol_by_name
from kombu.connection import Connection

from ..adapters.terms import Canary, Terms, misnamed
from ..bridge import Bridge
from ..config.policies import MISNAMED, Installed, Policies
from ..config.settings import the_retry
from ..engine.engine import Engine
from ..engine.layers import Layers, TaskPolicy
from ..engine.threads import cached
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..messages import CREATED, DEPENDS_OPTION, HEADER, IN_OPTION, RETRY_OPTION
from ..rules.failures import TIMEOUT, WORKER_DEATH, Mapped
from ..rules.job import Job, count_of, decoded, format_time
from ..rules.policy import AnyPartial, check_errors
from . import compat, dead_queues
from .brokers import Broker, CeleryPublisher, RabbitMQ
from .delays import Delays
from .on_redis import Lists, Redis
from .wire import NAME
from .wish import Running

logger = logging.getLogger("ojs_bridge")


#: The options that hold signatures: jobs that are sent after this job.
LATER = ("chain", "link", "link_error", "chord")

#: The errors of the worker itself, and the types that the spec reserves for them.
WORKER_ERRORS: dict[type[BaseException], Mapped] = {
    SoftTimeLimitExceeded: TIMEOUT,
    TimeLimitExceeded: TIMEOUT,
    WorkerLostError: WORKER_DEATH,
}

#: The attribute of an app that has its installation.
_INSTALLATION = "_ojs_installation"


class Settings(NamedTuple):
    """The settings of a task, and the options of Celery's from which they were made."""

    task: Task
    options: tuple[Any, ...]
    policy: TaskPolicy


@dataclass(eq=False)
class Installation:
    """What the bridge keeps of one Celery app in this process."""

    app: Celery
    bridge: Bridge | None = None
    #: Whether the app reads `ojs_retry`, and has the steps of its worker.
    is_prepared: bool = False
    #: Whether `install` was called; its terms, and how it adopts a task.
    is_installed: bool = False
    terms: Terms = Terms(Policies(None), Canary(100))  # noqa: RUF009 - it is immutable
    adopt: Callable[[Task, Celery], None] | None = None
    #: What becomes of its users' delays; it comes with the bridge.
    delays: Delays | None = None
    #: The policies of its `@ojs_task` by name: their tasks may be made later.
    declared: dict[str, AnyPartial | None] = field(default_factory=dict)
    #: The settings of its tasks, and the tasks that are checked, by name.
    settings: dict[str, Settings] = field(default_factory=dict)
    checked: dict[str, Task] = field(default_factory=dict)
    #: What keeps the messages of its workers in this process; mostly there is one.
    keepers: WeakSet[Any] = field(default_factory=WeakSet)
    #: The requests that run in threads or greenlets of this process, each with what tells that it has ended.
    running: dict[Any, Any] = field(default_factory=dict)

    @cached
    def broker(self) -> Broker:
        """The broker that the app writes to."""
        return _broker_of(self.app, self.app.connection_for_write())

    @cached
    def source(self) -> Broker:
        """The broker that the app's workers read from; mostly it is the same."""
        conf = self.app.conf
        if conf.broker_read_url == conf.broker_write_url:
            return self.broker
        return _broker_of(self.app, self.app.connection_for_read())


def _broker_of(app: Celery, connection: Connection) -> Broker:
    """Return the object of a broker. No other place asks for its kind."""
    try:
        transport = connection.get_transport_cls()
    except ImportError:  # its package is missing
        transport = None
    modules = {kind.__module__ for kind in getattr(transport, "__mro__", ())}
    if "kombu.transport.redis" in modules:
        return Redis(app, transport, Lists)
    if getattr(transport, "driver_type", None) == "amqp":
        return RabbitMQ(app, transport, dead_queues.OnRabbitMQ)
    return Broker(app, transport, dead_queues.InQueues)


def installation(app: Celery) -> Installation:
    """Return what the bridge keeps of an app."""
    kept: Installation | None = vars(app).get(_INSTALLATION)
    return kept or vars(app).setdefault(_INSTALLATION, Installation(app))


def attach(app: Celery, bridge: Bridge | None = None) -> Bridge:
    """Give an app its bridge, once; raises ConfigurationError for a second bridge."""
    own = installation(app)
    if own.bridge is None:
        prepare(app)
        # Of several threads one gives the bridge. A lock might be held by another one as the process forks.
        made: Bridge = vars(own).setdefault("made", bridge or Bridge())
        publisher = CeleryPublisher(app, made, functools.partial(getattr, own, "broker"))
        queues = dead_queues.CeleryDeadQueues(
            app, made, publisher.reaching, lambda task: task_policy(app, task)
        )
        made.engine.register(NAME, publisher, queues)
        own.delays = Delays(
            app, made, functools.partial(getattr, own, "broker"), lambda task: task_policy(app, task)
        )
        own.bridge = made
    if bridge is not None and bridge is not own.bridge:
        raise ConfigurationError(f"the Celery app {app.main!r} already has a bridge: give it one, once")
    return own.bridge


def bridge_of(app: Celery) -> Bridge | None:
    """Return an app's bridge, if it has one by now."""
    return installation(app).bridge


def prepare(app: Celery) -> Installation:
    """Let an app read `ojs_retry`, and check itself when its worker starts; its bridge may come later."""
    own: Installation = vars(app).setdefault(_INSTALLATION, Installation(app))
    if not own.is_prepared:
        own.is_prepared = True
        app.steps["worker"].add("ojs_bridge.celery.worker:StartUp")
        app.steps["consumer"].add("ojs_bridge.celery.keeping:RequestKeeping")
        app.steps["consumer"].add("ojs_bridge.celery.worker:ConsumerWatch")
        _read_retry_option(app)
        compat.warn_outside(app)
        # Its control is made when it is used first, of its settings.
        app.control_cls = functools.partial(_control_of, app.control_cls)
        if (control := vars(app).get("control")) is not None:
            _let_revoke(app, control)
    return own


def _control_of(cls: Any, app: Celery) -> Any:
    """Return the control of an app, whose `revoke` ends what waits in the store, too."""
    return _let_revoke(app, symbol_by_name(cls)(app=app))


def _let_revoke(app: Celery, control: Any) -> Any:
    revoke = control.revoke

    @functools.wraps(revoke)
    def revoke_what_waits(task_id: Any, destination: Any = None, *args: Any, **options: Any) -> Any:
        try:
            return revoke(task_id, destination, *args, **options)
        finally:
            delays = installation(app).delays
            if delays and not destination:
                delays.revoke(maybe_list(task_id) or ())

    control.revoke = revoke_what_waits
    return control


def is_bridged(task: Task | None) -> bool:
    """Return whether a task's jobs are under the bridge."""
    return getattr(task, "ojs_bridged", False)


def task_policy(app: Celery, task: Task | None) -> TaskPolicy:
    """Return the settings under which a task's jobs are retried.

    They are resolved once, and again when an option that Celery reads at each retry has changed.
    """
    own = installation(app)
    if not getattr(task, "ojs_bridged", False) or task is None:
        return attach(app).engine.task(reserved=WORKER_ERRORS)
    options = task.max_retries, task.default_retry_delay
    kept = own.settings.get(task.name)
    if kept is None or kept.task is not task or kept.options != options:
        try:
            said = getattr(task, RETRY_OPTION, None), getattr(task, "ojs_retry_on", None)
            layers = own.terms.policies.layers("task", task.name, task.ojs_native or Layers(), *said)
            engine = attach(app).engine
            _declare(engine, task)
            policy = engine.task(
                layers,
                errors=getattr(task, "ojs_errors", None),
                reserved=WORKER_ERRORS,
                afresh=own.terms.begins_afresh,
            )
        except InvalidRetryPolicy as error:
            raise error.under(f"task {task.name}") from None
        except TypeError as error:
            if kept is None or kept.task is not task:
                raise
            logger.warning("task %s: its retries stay as they were: %r: %s", task.name, options, error)
            policy = kept.policy
        kept = own.settings[task.name] = Settings(task, options, policy)
    return kept.policy


def _declare(engine: Engine, task: Task) -> None:
    try:
        engine.dependencies.declare(task.name, getattr(task, DEPENDS_OPTION, None))
    except ConfigurationError as error:
        raise ConfigurationError(f"task {task.name}: {error}") from None


def _read_retry_option(app: Celery) -> None:
    """Let the app's `send_task`, through which everything is published, read `ojs_retry`."""
    own = vars(app).get("send_task")

    @functools.wraps(app.send_task)
    def send_task_with_policy(name: str, *args: Any, **options: Any) -> Any:
        # The class is asked each time: a user's tests put another method there.
        send_task: Any = own or type(app).send_task
        if not own and hasattr(send_task, "__get__"):
            send_task = send_task.__get__(app, type(app))
        task = app.current_worker_task if options.get("task_id") else None
        run = task and task.request.ojs_run
        if isinstance(run, Running) and run.wish and run.wish.sending == options["task_id"]:
            return run.wish.catch(send_task, name, *args, **options)
        partial = options.pop(RETRY_OPTION, None)
        refuse_misnamed(name, options)
        check_task(app, name)
        for later in filter(None, map(options.get, LATER)):
            check_signatures(app, later)
        if partial is not None:
            headers = options.get("headers") or {}
            options["headers"] = {**headers, HEADER: _checked(app, name, partial, headers)}
        if options.get("task_id"):
            _tell_apart(app, name, options)
        if delays := installation(app).delays:
            send_task = delays.way(send_task, name, options)
        elif options.pop(IN_OPTION, None) is not None:
            raise ConfigurationError(
                f"{IN_OPTION} of {name}: no bridge is installed here, which has the store"
            )
        if (bridge := bridge_of(app)) is None or not bridge.engine.instruments.all:
            return send_task(name, *args, **options)
        options["headers"] = carrier = dict(options.get("headers") or {})
        carrier.setdefault(CREATED, format_time(bridge.engine.now()))
        with bridge.engine.instruments.sending(NAME, name, _queue_of(app, name, args, options), carrier):
            return send_task(name, *args, **options)

    app.send_task = send_task_with_policy


def _tell_apart(app: Celery, name: str, options: dict[str, Any]) -> None:
    """Make a job of its own of a job that its own code sends again, under the same id.

    It goes on with the state of the run that sends it. A replacement has a chain of its own already.
    """
    task = app.current_worker_task
    if task is None or task.request.id != options["task_id"] or not is_bridged(task):
        return
    engine, request, headers = attach(app).engine, task.request, options.get("headers") or {}
    is_within = isinstance(request.ojs_run, Running)
    running: Job | None = request.ojs_run.job if is_within else None
    is_native = is_within and running is None
    is_replacement = (options.get("replaced_task_nesting") or 0) != (request.replaced_task_nesting or 0)
    if engine.store is None or is_native or is_replacement:
        return
    sent = Job(str(request.id), name, "", 1 + (count_of(options.get("retries")) or 0))
    if HEADER in headers:
        job = decoded(headers[HEADER], sent)
    else:
        job = running._replace(attempt=sent.attempt) if running and name == task.name else sent
    if isinstance(job, Job):
        header = engine.storing.header(job._replace(next_retry_at=None, chain=uuid.uuid4().hex))
        options["headers"] = {**headers, HEADER: header.text}


def _queue_of(app: Celery, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the queue to which a job will go; "" if the router cannot say it."""
    with suppress(Exception):
        call = dict(zip(("args", "kwargs"), args, strict=False)) | dict(options)
        route = {key: value for key, value in options.items() if key in ("queue", "exchange", "routing_key")}
        queue = app.amqp.router.route(route, name, call.get("args") or (), call.get("kwargs") or {})["queue"]
        return str(getattr(queue, "name", queue))
    return ""


def refuse_misnamed(name: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidRetryPolicy for a job's policy that stands under another name than `ojs_retry`."""
    if not MISNAMED.isdisjoint(options) and (lines := misnamed(options, RETRY_OPTION)):
        raise InvalidRetryPolicy([f"{name}: {line}" for line in lines])


def check_whole(app: Celery, name: str, own: AnyPartial | None) -> None:
    """Check a task's own policy over all that lies beneath it.

    A process whose app has no bridge knows the default policy of the settings only. Raises
    InvalidRetryPolicy.
    """
    bridge, installed = bridge_of(app), installation(app).terms.policies.of(name) or Installed()
    default = bridge.settings.retry if bridge else the_retry()
    try:
        check_errors(Layers(app=default, install=installed.policies, task=own).policy())
    except InvalidRetryPolicy as error:
        problems = [*error.under(f"task {name}").problems]
        if bridge is None:
            problems.append(
                "no bridge is installed here: if the workers' has another default, install it, too"
            )
        raise InvalidRetryPolicy(problems) from None


def check_task(app: Celery, name: str) -> None:
    """Check a task's policy, merged with all that lies beneath it, before its first job is sent.

    Raises InvalidRetryPolicy, and ConfigurationError for a native task that has an `ojs_retry`.
    """
    task, installed = compat.task_in(compat.tasks(app), name), installation(app)
    if task is None and name in installed.declared:
        check_whole(app, name, installed.declared[name])
    if task is None or installed.checked.get(name) is task:
        return
    if installed.adopt is not None:
        # A task that was declared before `install` may be made before its app is finalized.
        installed.adopt(task, app)
    own = getattr(task, RETRY_OPTION, None)
    if not is_bridged(task):
        if own is not None:
            raise ConfigurationError(f"task {name}: {RETRY_OPTION} is not read without install or @ojs_task")
    elif bridge_of(app) is not None:
        with suppress(TypeError):  # an option that its worker cannot read either leaves it native
            task_policy(app, task)
    else:
        check_whole(app, name, own)
    installed.checked[name] = task


def header_for(app: Celery, name: str, partial: AnyPartial) -> str:
    """Return the `ojs` header of a job that brings a partial policy; raises InvalidRetryPolicy."""
    engine = attach(app).engine
    task = compat.task_in(compat.tasks(app), name)
    if task is not None and not is_bridged(task):
        raise InvalidRetryPolicy([f"{RETRY_OPTION} of {name}: this task is not under the bridge"])
    try:
        return engine.initial_header(Job("", name, ""), task_policy(app, task), partial).text
    except InvalidRetryPolicy as error:
        raise error.under(f"{RETRY_OPTION} of {name}") from None


def _checked(app: Celery, name: str, partial: AnyPartial, headers: Mapping[str, Any]) -> str:
    """Return the `ojs` header of a job; a header that was already made of this policy stays as it is.

    A worker sends the next job of a chain or a link. For this worker the job's task may be native, and a
    policy for it an error.
    """
    made = headers.get(HEADER)
    with suppress(TypeError, ValueError, AttributeError):
        if json.loads(made).get("retry") == partial:  # type: ignore[arg-type]
            return str(made)
    return header_for(app, name, partial)


def check_signatures(app: Celery, signatures: Any) -> None:
    """Check the policies of signatures that are sent later, and write them in plain JSON types.

    Raises InvalidRetryPolicy.
    """
    for signature in signatures if isinstance(signatures, (list, tuple)) else [signatures]:
        if not isinstance(signature, Mapping):
            continue
        options, kwargs = signature.get("options") or {}, signature.get("kwargs") or {}
        name = str(signature.get("task"))
        # Celery gives the body of a chord the options of its header.
        options.pop(IN_OPTION, None)
        refuse_misnamed(name, options)
        check_task(app, name)
        if RETRY_OPTION in options:
            _write_policy(app, name, options)
        for each in (*map(options.get, LATER), *map(kwargs.get, ("tasks", "header", "body"))):
            check_signatures(app, each)


def _write_policy(app: Celery, name: str, options: dict[str, Any]) -> None:
    """Write a policy in plain JSON types, and as a header, which a worker without the bridge sends, too."""
    given = options.get("headers") or {}
    headers = {key: value for key, value in given.items() if key != HEADER}
    if options[RETRY_OPTION] is not None:
        headers[HEADER] = _checked(app, name, options[RETRY_OPTION], given)
        options[RETRY_OPTION] = json.loads(headers[HEADER]).get("retry", {})
    if headers != given:
        options["headers"] = headers
