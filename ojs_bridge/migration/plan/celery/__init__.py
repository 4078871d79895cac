"""The plan of a Celery app: each task, the policy nearest to it, its hazards, and the check by a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

from celery import Celery, Task, signals
from celery.exceptions import Ignore
from celery.local import Proxy
from kombu.entity import Queue
from kombu.exceptions import SerializerNotInstalled
from kombu.serialization import loads, prepare_accept_content

from ....bridge import Bridge
from ....celery import compat, install
from ....celery.install import why_native
from ....celery.installation import installation, is_bridged, task_policy
from ....celery.native import explicit, options_as_policy
from ....celery.wire import is_fanout
from ....config.policies import EntryFields
from ....engine.events import Event
from ....engine.layers import Layers, in_ojs
from ....errors import ConfigurationError
from ....rules.notations import spoken
from ....rules.policy import RetryPolicy, partial_to_ojs
from .. import (
    ENDLESS,
    LIMIT,
    NOT_KNOWN,
    Hazard,
    Measured,
    Moved,
    Planned,
    WaitRange,
    already_ojs,
    counting,
    differing,
    measure,
    moved_already,
    pickled,
    planned,
    policy_wait,
    raised_for,
    steady,
    unpickles,
)
from ..code import functions_imported
from ..sends import Send, Sending, long_ones, with_delays
from ..storms import libraries_of, with_storms
from .native import Fleet, Reading, autoretries, functions_of, read

#: The policy of a task that runs once, and the attempts of a protected one.
ONCE, ATTEMPTS = {"max_attempts": 1}, 3
PROTECTED = "acks_late: a job whose worker is killed runs again, as often as its policy says, and is not lost"
#: Options that Celery reads for the automatic retries alone.
_OF_AUTORETRY = ("retry_backoff", "retry_backoff_max", "retry_kwargs", "dont_autoretry_for")

#: The methods that send with a countdown or an ETA, and those that do so if they are of a task's.
_SENDING = frozenset(("apply_async", "apply_async_on_commit", "send_task"))
_MAY_SEND = frozenset(("set", "signature", "subtask"))


def plans(app: Celery, names: Collection[str] = (), *, protect: bool = False) -> list[Planned]:
    """Return the plans of an app's tasks, sorted by name, without Celery's own tasks.

    With `names`, patterns such as `billing.*`, only of the tasks that match one. With `protect` no task loses
    a job whose worker is killed: each has `acks_late`, and attempts left. Options and source are read.
    Nothing is run or sent, and no broker is asked. Raises ConfigurationError for a name that matches no task.
    """
    fleet, delays = Fleet(app), installation(app).delays
    known = (name for name in app.tasks if not name.startswith("celery."))
    plans = planned(known, names, "task", lambda name: _plan(app, fleet, app.tasks[name], protect=protect))

    def is_parked(name: str) -> bool:
        return bool(delays.are_parked(name) if delays else getattr(app.tasks[name], "ojs_park_delays", None))

    def today(name: str, seconds: float) -> str:
        source, queue = installation(app).source, _queue_of(app, app.tasks[name])
        if queue is not None and source.delays(queue):
            return "the broker itself keeps it until then"
        most = app.conf.get("worker_eta_task_limit")
        others = f"at most {most:,} jobs" if most else "any number of others"
        beyond = source.long_wait(seconds)
        perhaps = "" if math.isfinite(seconds) else "perhaps "
        longer = f"; that is {perhaps}{beyond[1]}" if beyond else ""
        return f"a worker holds it in memory, with {others}{' (worker_eta_task_limit)' * bool(most)}{longer}"

    def libraries(name: str) -> Collection[str]:
        task = app.tasks[name]
        classes = task.autoretry_for if autoretries(task) else (Exception,)
        # What its code calls may raise one of these, too.
        is_any = any(cls.__module__ == Exception.__module__ for cls in classes)
        return libraries_of((*classes, *functions_of(task) * is_any))

    own = installation(app).bridge
    stormy = [*with_storms(plans, libraries, own.engine.dependencies if own else None)]
    return [*with_delays(stormy, sends(app), is_parked, today)]


def sends(app: Celery) -> list[Send]:
    """Return the places of the user's code, and the entries of beat, that send jobs with long delays."""

    def name_of(value: object) -> str:
        if issubclass(type(value), Proxy):  # another library's lazy object is not woken
            with suppress(Exception):
                value = compat.get_current_object(value)()
        name = value.name if issubclass(type(value), Task) else value  # type: ignore[attr-defined]
        return name if type(name) is str and name in app.tasks else ""

    functions: dict[FunctionType, tuple[str, ...]] = dict.fromkeys(functions_imported("celery"), ())
    for task in app.tasks.values():
        functions |= {one: (*functions.get(one, ()), task.name) for one in functions_of(task)}
    sending = Sending({"countdown": 1.0, "eta": math.nan}, _SENDING, _MAY_SEND, name_of)
    found = [*sending.sends(functions)]
    for key, entry in (app.conf.beat_schedule or {}).items():
        fields = entry if isinstance(entry, dict) else {}
        if delays := sending.delays(fields.get("options") or {}):
            name = name_of(fields.get("task"))
            found.append(Send(f"beat_schedule[{key!r}]", max(delays), (name,) if name else ()))
    own = installation(app).bridge
    return long_ones(found, own.settings if own else None)


def _plan(app: Celery, fleet: Fleet, task: Task, *, protect: bool) -> Planned:
    if is_bridged(task) and task.ojs_native is None:
        # The policy of an `@ojs_task` is read without giving the app a bridge.
        is_attached = installation(app).is_installed
        resolved = task_policy(app, task).policy if is_attached else RetryPolicy.merge(task.ojs_retry)
        return already_ojs(task.name, "is an ojs_task", resolved, task.ojs_retry)
    reading = read(fleet, task)
    policy = _policy_of(reading, protect=protect)
    is_late = protect and policy is not None and not task.acks_late
    differences = () if policy is None else tuple(_differences_of(reading, policy))
    if is_late:
        differences = (*differences, PROTECTED)
    if reading.native.runs == 1:
        asks = policy is not None and policy.get("max_attempts") != 1
    else:
        asks = bool(policy) and reading.is_retried and not autoretries(task)
    return Planned(
        task.name,
        reading.native,
        policy,
        differences,
        tuple(dict.fromkeys(_hazards(app, reading))),
        retry_on="asked" if asks else None,
        acks_late=True if is_late else None,
        open=reading.open,
    )


def _policy_of(reading: Reading, *, protect: bool) -> dict[str, Any] | None:
    """Return the partial policy nearest to Celery's retries; None where they are not known.

    A policy without `max_attempts` leaves the limit to the task, and an empty one all numbers. It is empty
    for a task that asks for no retry, but whose job Celery runs again when a worker dies. With `protect` a
    job that runs once is not lost with its worker: it runs again, or it is kept where its task allows one
    run.
    """
    task, runs, waits = reading.task, reading.native.runs, reading.native.waits
    if reading.open:
        return None
    if runs == 1 and protect:
        return {**ONCE, "on_exhaustion": "dead_letter"} if reading.is_retried else {"max_attempts": ATTEMPTS}
    if runs == 1:
        again = task.acks_late or getattr(task, "retry_on_worker_lost", False)
        return {} if again and not reading.is_retried else ONCE
    if waits == NOT_KNOWN or (not autoretries(task) and len({*waits}) > 1):
        return {}  # any number would take the place of those in the code
    beneath = in_ojs(options_as_policy(task))
    backoff = beneath if autoretries(task) else steady(waits[0].most)
    limit = {} if runs == ENDLESS else {"max_attempts": runs}
    fields = partial_to_ojs({**{k: x for k, x in backoff.items() if k != "max_attempts"}, **limit})
    default, given = RetryPolicy().to_ojs(only=fields), partial_to_ojs(beneath)
    # A field with the spec's default is left out: `install` reads it from the task.
    return {k: x for k, x in fields.items() if k in limit or not x == default[k] == given.get(k, x)}


def _differences_of(reading: Reading, policy: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between the bridge under a policy and Celery."""
    today = reading.native.waits if policy else ()
    then = Layers(options=options_as_policy(reading.task), task=policy).policy()
    unlike = [*differing(today, [policy_wait(then, n) for n in range(1, len(today) + 1)])]  # type: ignore[arg-type]
    yield from unlike
    if unlike and then.jitter:
        yield (
            "OJS's jitter multiplies the delay by 0.5 to 1.5, Celery's by 0 to 1: initial_interval is half "
            "of Celery's, for the same mean until the cap is near; an entry without waits keeps Celery's own"
        )


def _hazards(app: Celery, reading: Reading) -> Iterator[Hazard]:
    """Yield the hazards of a task's options, and those of its retries where they are known."""
    task = reading.task
    if is_bridged(task):
        yield moved_already(task_policy(app, task).policy, "Celery")
    else:
        yield from _of_lost_workers(task)
        if why := why_native(task):
            yield Hazard("stays-native", f"{why}; `install` leaves the task to Celery")
    if _is_broadcast(app, task):
        yield Hazard("broadcast", "its queue is a fanout: its broadcasts stay native, a copy for each worker")
    if less := installation(app).source.less:
        yield Hazard("unknown-broker", less)
    if reading.native.runs != NOT_KNOWN:
        yield from _of_limits(reading)
        longest = _longest(reading)
        if hazard := installation(app).source.long_wait(longest):
            yield Hazard(hazard[0], f"a retry may wait {spoken(longest)}, {hazard[1]}")
        yield from _of_time(app, reading)
    yield from _of_options(app, task)


def _is_broadcast(app: Celery, task: Task) -> bool:
    """Return whether a task's jobs go to a fanout, as far as the app's routes tell."""
    with suppress(Exception):
        return (queue := _queue_of(app, task)) is not None and is_fanout(queue)
    return False


def _queue_of(app: Celery, task: Task) -> Queue | None:
    """Return the queue of a task's jobs, as far as the app's routes tell."""
    own = {name: value for name in ("queue", "exchange") if (value := getattr(task, name, None))}
    with suppress(Exception):
        queue: Queue | None = app.amqp.router.route(own, task.name)["queue"]
        return queue
    return None


def _of_limits(reading: Reading) -> Iterator[Hazard]:
    task, runs = reading.task, reading.native.runs
    if getattr(task, "autoretry_for", ()) and not autoretries(task):
        yield Hazard(
            "unused-autoretry",
            "autoretry_for was set after the task was registered: Celery does not read it: nothing retries",
        )
    if reading.is_retried and runs != 1:
        yield counting(runs)
    elif not reading.is_retried and explicit(task, "max_retries"):
        text = f"max_retries={task.max_retries} is never read: nothing retries the task, it runs once"
        yield Hazard("unused-max-retries", text)


def _longest(reading: Reading) -> float:
    """Return the longest of the listed waits and of the last wait."""
    waits = [] if reading.native.waits == NOT_KNOWN else [*reading.native.waits]
    runs = reading.native.runs
    if reading.wait and isinstance(runs, int) and runs > 1:
        waits.append(reading.wait(runs - 1))
    return max((wait.most for wait in waits), default=0.0)


def _of_time(app: Celery, reading: Reading) -> Iterator[Hazard]:
    limit = reading.task.time_limit or app.conf.task_time_limit
    expires, span = reading.task.expires, reading.native.span
    if limit and reading.is_retried:
        yield Hazard(
            "time-limit",
            f"time_limit={limit} ends a job at once, without a retry; under the bridge it uses an attempt, "
            "of the error type timeout",
            differs=True,
        )
    if isinstance(expires, (int, float)) and isinstance(span, WaitRange) and span.most > expires:
        yield Hazard(
            "expires",
            f"expires={expires} counts from the first sending, and the retries take up to "
            f"{spoken(span.most)}: Celery silently revokes a retry that is due later; under a policy the "
            "bridge ends such a job at once, as on_exhaustion says",
            differs=True,
        )


def _of_lost_workers(task: Task) -> Iterator[Hazard]:
    uses = "under the bridge a lost worker uses an attempt"
    if getattr(task, "retry_on_worker_lost", False):
        text = f"retry_on_worker_lost=True retries a job that kills its worker; {uses}"
        yield Hazard("retry-on-worker-lost", f"{text}, and the policy's waits count", differs=True)
    elif task.acks_late and task.reject_on_worker_lost:
        yield Hazard(
            "poison-job",
            "reject_on_worker_lost=True requeues a job that kills its worker, uncounted and without end; "
            f"{uses}",
            differs=True,
        )
    elif task.acks_late:
        yield Hazard(
            "acks-late-alone",
            "acks_late=True without reject_on_worker_lost: a job whose pool process is killed is not run "
            f"again; {uses}",
            differs=True,
        )
    elif task.reject_on_worker_lost:
        yield Hazard(
            "reject-without-acks-late",
            "reject_on_worker_lost=True has no effect without acks_late: the message is gone before the task "
            "runs, and a killed worker loses it",
        )
    else:
        yield Hazard("acks-early", "acks_late is off: a job that runs when its worker is killed is lost")


def _of_options(app: Celery, task: Task) -> Iterator[Hazard]:
    unread = [f"{x}={getattr(task, x)!r}" for x in _OF_AUTORETRY if explicit(task, x) and getattr(task, x)]
    if unread and not getattr(task, "autoretry_for", ()):
        yield Hazard(
            "unused-retry-options",
            f"{', '.join(unread)} without autoretry_for: Celery reads it for automatic retries, and there "
            "are none; self.retry waits for its countdown, or for default_retry_delay",
        )
    if names := ", ".join(cls.__name__ for cls in task.throws or ()):
        yield Hazard(
            "throws",
            f"throws={names} only lowers the log level: it stops no retry; non_retryable_errors would",
        )
    serializer = task.serializer or app.conf.task_serializer
    if _unpickles(serializer):
        yield pickled(f"the task's serializer is {serializer}")
    elif kinds := [str(kind) for kind in app.conf.accept_content or () if _unpickles(kind)]:
        yield pickled(f"accept_content takes {', '.join(sorted(kinds))}")


def _unpickles(kind: str) -> bool:
    """Return whether what is registered under a name or a content type runs the code of a pickle."""
    with suppress(SerializerNotInstalled):
        for content_type in prepare_accept_content([kind]):  # type: ignore[no-untyped-call]
            if unpickles(partial(_loaded, content_type)):
                return True
    return False


def _loaded(content_type: str, data: bytes) -> Any:
    return loads(data, content_type, "binary", accept={content_type})  # type: ignore[no-untyped-call]


def measured(app: Celery, planned_tasks: Sequence[Planned]) -> list[Planned]:
    """Return a plan after measuring the tasks that can be measured; raises ConfigurationError.

    Bodies are not run, but hooks such as `on_failure` and receivers of signals are. Afterwards the app is
    under a bridge whose store is gone.
    """
    if installation(app).is_installed:
        raise ConfigurationError("verify: the app is under the bridge already: name the app as it was before")
    app.conf.task_eager_propagates = False
    return measure(planned_tasks, lambda name: _native(app.tasks[name]), partial(_moved, app))


def _native(task: Task) -> Measured:
    waits: list[float] = []

    def heard(sender: Any = None, reason: Any = None, **_: Any) -> None:
        if sender.name == task.name:
            waits.append(float(reason.when or 0))

    signals.task_retry.connect(heard, weak=False)
    try:
        beneath = compat.orig_run.name if autoretries(task) else "run"
        return replace(_applied(task, beneath), waits=tuple(waits))
    finally:
        signals.task_retry.disconnect(heard)


def _moved(app: Celery, url: str, entries: Mapping[str, EntryFields]) -> Iterator[Moved]:
    events: list[Event] = []
    bridge = Bridge(url, listeners=[events.append], retry={})
    install(app, bridge, policies=entries, canary=100)
    for name in entries:
        events.clear()
        applied = _applied(app.tasks[name], "run")
        bridge.flush(30)
        delays = [event.data["delay_ms"] / 1000 for event in events if event.type == "job.retrying"]
        policy = task_policy(app, app.tasks[name]).policy
        yield name, (replace(applied, waits=tuple(delays)), policy)
    bridge.stop()


def _applied(task: Task, body: str) -> Measured:
    """Run a task with a failure in place of the attribute that is its body."""
    runs = 0
    error = raised_for(task.autoretry_for if autoretries(task) else ())

    def fails(*_: Any, **__: Any) -> None:
        nonlocal runs
        runs += 1
        if runs >= LIMIT:
            raise Ignore
        raise error

    with patch.object(task, body, fails), patch.object(task, "store_eager_result", new=False):
        result = task.apply()
    # Celery shows an error that it cannot pickle in a wrapper.
    name = getattr(result.result, "exc_cls_name", type(result.result).__name__)
    return Measured(runs, (), "" if runs >= LIMIT else f"{result.state} with {name}")
