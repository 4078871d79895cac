"""An app gets its bridge, a task its policy, and a sent job its own policy by the option `ojs_retry`."""

from __future__ import annotations

import functools
import json
import logging
import sys
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task, current_app, signals
from celery.exceptions import SoftTimeLimitExceeded

from ..bridge import Bridge
from ..config.policies import Policies
from ..engine.engine import Engine
from ..engine.layers import Layers
from ..engine.retry_on import RetryOn
from ..engine.runs import TaskPolicy
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..messages import CREATED, HEADER, RETRY_OPTION
from ..rules.failures import WORKER_DEATH, Mapped
from ..rules.job import Job, count_of, decoded, format_time
from ..rules.policy import AnyPartial
from . import compat, dead_queues
from .publishing import CeleryPublisher

logger = logging.getLogger("ojs_bridge")

FRAMEWORK = dead_queues.FRAMEWORK
#: The options that hold signatures: jobs that are sent after this job.
LATER = ("chain", "link", "link_error", "chord")

#: The errors of the worker itself, and the types that the spec reserves for them.
WORKER_ERRORS: dict[type[BaseException], Mapped] = {
    SoftTimeLimitExceeded: "timeout",
    TimeLimitExceeded: "timeout",
    WorkerLostError: WORKER_DEATH,
}

#: The attributes in which an app keeps its bridge and the policies of `install`, and a task its own settings.
_BRIDGE = "_ojs_bridge"
_PREPARED = "_ojs_prepared"
POLICIES = "_ojs_policies"
#: The attribute of an app that says whether jobs in flight begin afresh.
AFRESH = "_ojs_afresh"
_TASK_POLICY = "_ojs_task_policy"
#: The attribute of a request that has its run.
RUNNING = "ojs_execution"
_EVERY_NAME = Policies(None)
#: Packages whose code is not the user's.
_INSIDE = ("celery", __name__.partition(".")[0])


def attach(app: Celery, bridge: Bridge | None = None) -> Bridge:
    """Give an app its bridge, once; raises ConfigurationError for a second bridge."""
    found: Bridge | None = app.__dict__.get(_BRIDGE)
    if found is not None:
        if bridge is not None and bridge is not found:
            raise ConfigurationError(f"the Celery app {app.main!r} already has a bridge: give it one, once")
        return found
    prepare(app)
    bridge = app.__dict__.setdefault(_BRIDGE, bridge or Bridge())
    bridge.engine.register(FRAMEWORK, CeleryPublisher(app, bridge), _dead_queues_of(app, bridge))
    if bridge.store:
        signals.task_postrun.connect(settle_success, weak=False)
    return bridge


def _dead_queues_of(app: Celery, bridge: Bridge) -> dead_queues.CeleryDeadQueues:
    return dead_queues.CeleryDeadQueues(app, bridge, lambda name: task_policy(app, app.tasks.get(name)))


def prepare(app: Celery) -> None:
    """Have an app read `ojs_retry`, and check itself when its worker starts; its bridge may come later."""
    if not app.__dict__.get(_PREPARED):
        setattr(app, _PREPARED, True)
        app.steps["worker"].add("ojs_bridge.celery.worker:StartUp")
        app.steps["consumer"].add("ojs_bridge.celery.on_redis:Visibility")
        app.steps["consumer"].add("ojs_bridge.celery.holding:RequestHolding")
        app.steps["consumer"].add("ojs_bridge.celery.watch:ConsumerWatch")
        _read_retry_option(app)
        _warn_outside(app)


def _warn_outside(app: Celery) -> None:
    """Have Celery's warning of a taken task name point to the line of the user's code."""
    # Celery 5.7 points to the first line outside Celery, which is the bridge's.
    warn = compat.warn_duplicate_task_name(app, None)
    if warn is None:
        return

    def warn_there(*args: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn(*args)
        for warning in caught:
            warnings.warn(warning.message, stacklevel=_level())

    compat.warn_duplicate_task_name.set(app, warn_there)


def _level() -> int:
    """Return the stack level of the first line of the user's code, as the caller's `stacklevel`."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level


def is_prepared(app: Celery) -> bool:
    """Return whether an app has a bridge, or a task under one."""
    return bool(app.__dict__.get(_PREPARED))


def policies_of(app: Celery) -> Policies:
    """Return the policies that `install` gave an app."""
    found: Policies = getattr(app, POLICIES, _EVERY_NAME)
    return found


def policies_for(app: Celery, name: str) -> list[AnyPartial] | None:
    """Return the partial policies that `install` has for a task; None for a task that stays native."""
    return policies_of(app).of(name)


def is_bridged(task: Task | None) -> bool:
    """Return whether a task's jobs are under the bridge."""
    return getattr(task, "ojs_bridged", False)


def task_policy(app: Celery, task: Task | None) -> TaskPolicy:
    """Return the settings under which a task's jobs are retried.

    They are resolved once, and again when an option that Celery reads at each retry has changed.
    """
    if task is None or not is_bridged(task):
        return attach(app).engine.task(reserved=WORKER_ERRORS)
    options = task.max_retries, task.default_retry_delay
    found: tuple[Any, TaskPolicy] | None = vars(task).get(_TASK_POLICY)
    if found is None or found[0] != options:
        found = options, resolved(attach(app).engine, task, policies_of(app), task.ojs_native)
        setattr(task, _TASK_POLICY, found)
    return found[1]


def resolved(engine: Engine, task: Any, policies: Policies, native: Layers | None) -> TaskPolicy:
    """Return a task's settings: the app's, Celery's options, `install`'s and its own, in this order.

    Raises InvalidRetryPolicy and ConfigurationError.
    """
    said = getattr(task, "ojs_retry_on", None)
    own = None if said is None else RetryOn(said, f"task {task.name}: ojs_retry_on")
    native = native or Layers()
    layers = replace(
        native,
        install=policies.of(task.name) or (),
        task=getattr(task, "ojs_retry", None),
        retry_on=own or policies.retry_on(task.name) or native.retry_on,
    )
    try:
        return engine.task(
            layers,
            errors=getattr(task, "ojs_errors", None),
            reserved=WORKER_ERRORS,
            afresh=getattr(task.app, AFRESH, False),
        )
    except InvalidRetryPolicy as error:
        raise error.under(f"task {task.name}") from None


def _read_retry_option(app: Celery) -> None:
    """Have the app's `send_task`, through which everything is published, read `ojs_retry`."""
    own = vars(app).get("send_task")

    @functools.wraps(app.send_task)
    def send_task_with_policy(name: str, *args: Any, **options: Any) -> Any:
        partial = options.pop(RETRY_OPTION, None)
        for later in LATER:
            if options.get(later):
                check_signatures(app, options[later])
        if partial is not None:
            headers = options.get("headers") or {}
            options["headers"] = {**headers, HEADER: _checked(app, name, partial, headers)}
        if options.get("task_id"):
            _tell_apart(app, name, options)
        # The class is asked each time: a user's tests put another method there.
        send_task = own or _bound(type(app).send_task, app)
        bridge: Bridge | None = vars(app).get(_BRIDGE)
        if bridge is None or not bridge.engine.instruments.all:
            return send_task(name, *args, **options)
        options["headers"] = carrier = dict(options.get("headers") or {})
        carrier.setdefault(CREATED, format_time(bridge.engine.now()))
        with bridge.engine.instruments.sending(FRAMEWORK, name, _queue_of(app, name, args, options), carrier):
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
    run = vars(request).get(RUNNING)
    running: Job | None = getattr(run, "job", None)
    is_native = run is not None and running is None
    is_replacement = (options.get("replaced_task_nesting") or 0) != (request.replaced_task_nesting or 0)
    if engine.store is None or is_native or is_replacement:
        return
    sent = Job(str(request.id), name, "", 1 + (count_of(options.get("retries")) or 0))
    if HEADER in headers:
        job = decoded(headers[HEADER], sent)
    else:
        job = running._replace(attempt=sent.attempt) if running and name == task.name else sent
    if isinstance(job, Job):
        header = engine.keeping.header(job._replace(next_retry_at=None, chain=uuid.uuid4().hex))
        options["headers"] = {**headers, HEADER: header.text}


def _queue_of(app: Celery, name: str, args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the queue to which a job will go; "" if the router cannot say it."""
    with suppress(Exception):
        told = dict(zip(("args", "kwargs"), args, strict=False)) | dict(options)
        route = {key: value for key, value in options.items() if key in ("queue", "exchange", "routing_key")}
        queue = app.amqp.router.route(route, name, told.get("args") or (), told.get("kwargs") or {})["queue"]
        return str(getattr(queue, "name", queue))
    return ""


def _bound(found: Any, app: Celery) -> Any:
    """Return an attribute of an app's class, bound to the app."""
    bind = getattr(found, "__get__", None)
    return bind(app, type(app)) if bind else found


def header_for(app: Celery, name: str, partial: AnyPartial) -> str:
    """Return the `ojs` header of a job that brings a partial policy; raises InvalidRetryPolicy."""
    engine = attach(app).engine
    task = compat.tasks(app).get(name)
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
        if RETRY_OPTION in options:
            _write_policy(app, str(signature.get("task")), options)
        for nested in (*map(options.get, LATER), *map(kwargs.get, ("tasks", "header", "body"))):
            if nested:
                check_signatures(app, nested)


def _write_policy(app: Celery, name: str, options: dict[str, Any]) -> None:
    """Write a policy in plain JSON types, and as a header, which a worker without the bridge sends, too."""
    given = options.get("headers") or {}
    headers = {key: value for key, value in given.items() if key != HEADER}
    if options[RETRY_OPTION] is not None:
        headers[HEADER] = _checked(app, name, options[RETRY_OPTION], given)
        options[RETRY_OPTION] = json.loads(headers[HEADER]).get("retry", {})
    if headers != given:
        options["headers"] = headers


class SentOnCommit:
    """Refuses an invalid policy where the job is sent: after the commit it is too late."""

    def apply_async_on_commit(self: Any, *args: Any, **options: Any) -> None:
        """Send the job after the commit, as Celery's own does; raises InvalidRetryPolicy at once."""
        if options.get(RETRY_OPTION) is not None:
            header_for(self.app, self.name, options[RETRY_OPTION])
        for later in ("link", "link_error"):
            if options.get(later):
                check_signatures(self.app, options[later])
        super().apply_async_on_commit(*args, **options)  # type: ignore[misc]


def sent_on_commit(native: type[Task]) -> tuple[type, ...]:
    """Return the extra base that a subclass of Django's task class needs."""
    return (SentOnCommit,) if hasattr(native, "apply_async_on_commit") else ()


def settle_success(task: Task | None = None, **_: Any) -> None:
    """Settle a success after its result is stored and its chain and links are sent."""
    ended = vars(task.request).pop("ojs_ended", None) if task else None
    if ended is not None:
        ended.settle()


def _let_listeners_finish(**_: Any) -> None:
    bridge: Bridge | None = vars(compat.get_current_object(current_app)()).get(_BRIDGE)
    if bridge is not None:
        bridge.flush()


signals.worker_process_shutdown.connect(_let_listeners_finish, weak=False)
signals.worker_shutdown.connect(_let_listeners_finish, weak=False)
