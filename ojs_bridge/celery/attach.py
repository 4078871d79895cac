"""An app gets its bridge, a task its policy, and a sent job its own policy by the option `ojs_retry`."""

from __future__ import annotations

import functools
import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded

from ..bridge import Bridge
from ..config.policies import MISNAMED, Installed, Policies, misnamed
from ..config.settings import the_retry
from ..engine.engine import Engine
from ..engine.layers import Layers, NativeJitter, RetryOn, TaskPolicy
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..messages import CREATED, HEADER, RETRY_OPTION
from ..rules.backoff import Rng
from ..rules.duration import format_interval
from ..rules.failures import TIMEOUT, WORKER_DEATH, Mapped
from ..rules.job import Job, count_of, decoded, format_time
from ..rules.policy import LARGEST, AnyPartial, check_errors
from . import compat, dead_queues
from .sending import CeleryPublisher

logger = logging.getLogger("ojs_bridge")

FRAMEWORK = dead_queues.FRAMEWORK
#: The options that hold signatures: jobs that are sent after this job.
LATER = ("chain", "link", "link_error", "chord")

#: The errors of the worker itself, and the types that the spec reserves for them.
WORKER_ERRORS: dict[type[BaseException], Mapped] = {
    SoftTimeLimitExceeded: TIMEOUT,
    TimeLimitExceeded: TIMEOUT,
    WorkerLostError: WORKER_DEATH,
}

#: The attributes in which an app keeps its bridge and the policies of `install`, and a task its own settings.
BRIDGE = "_ojs_bridge"
_PREPARED = "_ojs_prepared"
POLICIES = "_ojs_policies"
#: The attribute of an app that says whether jobs in flight begin afresh.
AFRESH = "_ojs_afresh"
_TASK_POLICY = "_ojs_task_policy"
_CHECKED = "_ojs_checked"
#: The attribute of an app that has the function by which `install` adopts a task.
ADOPT = "_ojs_adopt"
#: The attribute of an app that has the policies of its `@ojs_task`: their tasks may be made later.
DECLARED = "_ojs_declared"
#: The attribute of a request that has its run.
RUNNING = "ojs_execution"
_EVERY_NAME = Policies(None)
#: The module of Celery's own task classes.
NATIVE = "celery.app.task"
#: Where a task keeps its `run` with Celery's automatic retries around it, when it runs without them.
AUTORETRYING = "_ojs_autoretrying"
#: Where a task keeps its own `acks_late`, when a policy has another for its jobs under the bridge.
ACKS_NATIVELY = "_ojs_acks_natively"
#: The shortest and the longest interval, in seconds: a policy has none of zero, and a calendar ends.
_SHORTEST = 0.001
LONGEST = 100 * 365 * 86_400
#: The main process raises these for a child that it killed, or that died; no task sees them.
KILLED = (TimeLimitExceeded, WorkerLostError)


def attach(app: Celery, bridge: Bridge | None = None) -> Bridge:
    """Give an app its bridge, once; raises ConfigurationError for a second bridge."""
    own: Bridge | None = app.__dict__.get(BRIDGE)
    if own is not None:
        if bridge is not None and bridge is not own:
            raise ConfigurationError(f"the Celery app {app.main!r} already has a bridge: give it one, once")
        return own
    prepare(app)
    bridge = app.__dict__.setdefault(BRIDGE, bridge or Bridge())
    queues = dead_queues.CeleryDeadQueues(app, bridge, lambda task: task_policy(app, task))
    bridge.engine.register(FRAMEWORK, CeleryPublisher(app, bridge, dead_queues.oldest_in), queues)
    return bridge


def bridge_of(app: Celery) -> Bridge | None:
    """Return an app's bridge, if it has one by now."""
    bridge: Bridge | None = vars(app).get(BRIDGE)
    return bridge


def prepare(app: Celery) -> None:
    """Let an app read `ojs_retry`, and check itself when its worker starts; its bridge may come later."""
    if not app.__dict__.get(_PREPARED):
        setattr(app, _PREPARED, True)
        app.steps["worker"].add("ojs_bridge.celery.worker:StartUp")
        app.steps["consumer"].add("ojs_bridge.celery.on_redis:Visibility")
        app.steps["consumer"].add("ojs_bridge.celery.holding:RequestHolding")
        app.steps["consumer"].add("ojs_bridge.celery.worker:ConsumerWatch")
        _read_retry_option(app)
        compat.warn_outside(app)


def is_prepared(app: Celery) -> bool:
    """Return whether an app has a bridge, or a task under one."""
    return bool(app.__dict__.get(_PREPARED))


def policies_of(app: Celery) -> Policies:
    """Return the policies that `install` gave an app."""
    policies: Policies = getattr(app, POLICIES, _EVERY_NAME)
    return policies


def is_bridged(task: Task | None) -> bool:
    """Return whether a task's jobs are under the bridge."""
    return getattr(task, "ojs_bridged", False)


def task_policy(app: Celery, task: Task | None) -> TaskPolicy:
    """Return the settings under which a task's jobs are retried.

    They are resolved once, and again when an option that Celery reads at each retry has changed.
    """
    if not getattr(task, "ojs_bridged", False) or task is None:
        return attach(app).engine.task(reserved=WORKER_ERRORS)
    options = task.max_retries, task.default_retry_delay
    kept: tuple[Any, TaskPolicy] | None = vars(task).get(_TASK_POLICY)
    if kept is None or kept[0] != options:
        try:
            policy = resolved(attach(app).engine, task, policies_of(app), task.ojs_native)
        except TypeError as error:
            if kept is None:
                raise
            logger.warning("task %s: its retries stay as they were: %r: %s", task.name, options, error)
            policy = kept[1]
        kept = options, policy
        setattr(task, _TASK_POLICY, kept)
    return kept[1]


def resolved(engine: Engine, task: Any, policies: Policies, native: Layers | None) -> TaskPolicy:
    """Return a task's settings: the app's, Celery's options, `install`'s and its own, in this order.

    Raises InvalidRetryPolicy and ConfigurationError.
    """
    said = getattr(task, "ojs_retry_on", None)
    own = None if said is None else RetryOn(said, f"task {task.name}: ojs_retry_on")
    native, installed = native or Layers(), policies.of(task.name) or Installed()
    layers = replace(
        native,
        install=installed.policies,
        task=getattr(task, "ojs_retry", None),
        retry_on=own or installed.retry_on or native.retry_on,
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


def explicit(task: Task, option: str) -> bool:
    """Return whether a task, or a class of the user's that it inherits from, sets an option itself."""
    classes = (cls for cls in type(task).__mro__ if cls.__module__ != NATIVE)
    return option in vars(task) or any(option in vars(cls) for cls in classes)


def automatic(task: Task, option: str, *, default: Any) -> Any:
    """Return an option of the automatic retries as Celery has read it, when it made the task.

    Celery does not read a later annotation or assignment.
    """
    if compat.orig_run.name in vars(task):
        run = vars(task).get(AUTORETRYING, vars(task).get("run"))
        return compat.kept_option(run, option, getattr(task, option, default))
    return getattr(task, option, default)


def native_of(task: Task) -> Layers:
    """Return how Celery alone retries a task: by the task's options, or else by Celery's defaults."""
    delay = task.default_retry_delay or 0
    framework = {"max_attempts": attempts(task.max_retries), **_schedule("none", delay, delay, jitter=False)}
    return Layers(framework, options=options_as_policy(task), retry_on=_native_rule(task))


def _native_rule(task: Task) -> RetryOn | None:
    """Return which failures Celery retries: those in `autoretry_for`; None for what code asks for."""
    named = autoretry_for(task)
    if not named:
        return None
    excluded = tuple(automatic(task, "dont_autoretry_for", default=()))
    return RetryOn(named, f"task {task.name}: autoretry_for", never=(*excluded, *KILLED))


def autoretry_for(task: Task) -> tuple[type[BaseException], ...]:
    """Return the errors for which Celery itself retries a task."""
    return tuple(automatic(task, "autoretry_for", default=())) if compat.orig_run.name in vars(task) else ()


def options_as_policy(task: Task) -> dict[str, Any]:
    """Return a task's native options as a partial policy; without options it has no fields."""
    named = bool(autoretry_for(task))
    given = dict(automatic(task, "retry_kwargs", default=None) or {}) if named else {}
    asked = given.get("max_retries")
    partial: dict[str, Any] = {}
    if asked is not None or explicit(task, "max_retries"):
        partial["max_attempts"] = attempts(task.max_retries if asked is None else asked)
    if not named and not explicit(task, "default_retry_delay"):
        return partial
    factor = float(automatic(task, "retry_backoff", default=False)) if named else 0
    if factor:
        longest = int(automatic(task, "retry_backoff_max", default=600))
        first = min(int(max(1.0, factor)), longest)
        jitter = bool(automatic(task, "retry_jitter", default=True))
        schedule = _schedule("exponential", first, longest, jitter=jitter)
        if jitter:
            # Half of a delay is the mean of Celery's draws.
            schedule["jitter"] = NativeJitter(_full_jitter, _interval(first / 2), said=True)
        return {**partial, **schedule}
    countdown = given.get("countdown")
    delay = task.default_retry_delay if countdown is None else countdown
    return {**partial, **_schedule("none", delay or 0, delay or 0, jitter=False)}


def attempts(max_retries: float | None) -> int:
    """Return the number of runs for `max_retries`; Celery reads None as no limit, -1 as 0 and 2.5 as 2."""
    if max_retries is None or not max_retries < LARGEST:
        return LARGEST
    return max(math.floor(max_retries), 0) + 1


def _schedule(strategy: str, first: float, longest: float, *, jitter: bool) -> dict[str, Any]:
    return {
        "backoff_strategy": strategy,
        "backoff_coefficient": 2.0,
        "initial_interval": _interval(first),
        "max_interval": _interval(longest),
        "jitter": jitter,
    }


def _full_jitter(_n: int, seconds: float, rng: Rng) -> float:
    """Draw as Celery does: whole seconds, from none to all of a delay, each as likely as another."""
    return float(int(rng.random() * (int(seconds) + 1)))


def _interval(seconds: float) -> str:
    return format_interval(timedelta(seconds=min(max(seconds, _SHORTEST), LONGEST)))


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
        wish = getattr(task and vars(task.request).get(RUNNING), "wish", None)
        if wish is not None and wish.sending == options["task_id"]:
            return wish.catch(send_task, name, *args, **options)
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
        if (bridge := bridge_of(app)) is None or not bridge.engine.instruments.all:
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
    bridge, installed = bridge_of(app), policies_of(app).of(name) or Installed()
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
    task = compat.task_in(compat.tasks(app), name)
    if task is None and name in (declared := vars(app).get(DECLARED, {})):
        check_whole(app, name, declared[name])
    if task is None or _CHECKED in vars(task):
        return
    # A task that was declared before `install` may be made before its app is finalized.
    vars(app).get(ADOPT, lambda *_: None)(task, app)
    own = getattr(task, RETRY_OPTION, None)
    if not is_bridged(task):
        if own is not None:
            raise ConfigurationError(f"task {name}: {RETRY_OPTION} is not read without install or @ojs_task")
    elif bridge_of(app) is not None:
        with suppress(TypeError):  # an option that its worker cannot read either leaves it native
            task_policy(app, task)
    else:
        check_whole(app, name, own)
    setattr(task, _CHECKED, True)


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
