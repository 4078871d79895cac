"""The plan of a Celery app: each task under Celery alone, the policy nearest to it, and its hazards."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from celery import Celery, Task

from ....celery.attach import POLICIES, is_bridged, task_policy
from ....celery.install import why_native
from ....celery.native_options import explicit
from ....celery.sending import visibility_timeout
from ....celery.wire import is_fanout
from ....rules.duration import spoken
from ....rules.policy import RetryPolicy
from .. import NOT_KNOWN, Hazard, Planned, already_ojs, counting, moved_already, pickled, planned
from ..waits import Wait
from .native import (
    Reading,
    autoretries,
    differences_of,
    policy_of,
    read,
)
from .reading import Fleet

_ON_REDIS = ("redis", "sentinel", "valkey")
#: RabbitMQ's default wait for an acknowledgement, in seconds.
_CONSUMER_TIMEOUT = 1800.0
#: Options that Celery reads for the automatic retries alone.
_OF_AUTORETRY = ("retry_backoff", "retry_backoff_max", "retry_kwargs", "dont_autoretry_for")


def of_celery(app: Celery, names: Collection[str] = ()) -> list[Planned]:
    """Return the plans of an app's tasks, sorted by name, without Celery's own tasks.

    With `names`, patterns such as `billing.*`, only of the tasks that match one. Options and source are read.
    Nothing is run or sent, and no broker is asked. Raises ConfigurationError for a name that matches no task.
    """
    fleet = Fleet(app)
    known = (name for name in app.tasks if not name.startswith("celery."))
    return planned(known, names, "task", lambda name: _plan(app, fleet, app.tasks[name]))


def _plan(app: Celery, fleet: Fleet, task: Task) -> Planned:
    if is_bridged(task) and task.ojs_native is None:
        return already_ojs(task.name, "is an ojs_task", _resolved(app, task), task.ojs_retry)
    reading = read(fleet, task)
    policy = policy_of(reading)
    asked = bool(policy) and reading.is_retried and reading.native.runs != 1 and not autoretries(task)
    return Planned(
        task.name,
        reading.native,
        policy,
        () if policy is None else tuple(differences_of(reading, policy)),
        tuple(dict.fromkeys(_hazards(app, reading))),
        retry_on="asked" if asked else None,
        open=reading.open,
    )


def _resolved(app: Celery, task: Task) -> RetryPolicy:
    """Return the policy of an `@ojs_task`, without giving the app a bridge."""
    if POLICIES in vars(app):
        return task_policy(app, task).policy
    return RetryPolicy.merge(task.ojs_retry)


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
    if reading.native.runs != NOT_KNOWN:
        yield from _of_limits(reading)
        yield from _of_long_waits(app, reading)
        yield from _of_time(app, reading)
    yield from _of_options(app, task)


def _is_broadcast(app: Celery, task: Task) -> bool:
    """Return whether a task's jobs go to a fanout, as far as the app's routes tell."""
    own = {name: value for name in ("queue", "exchange") if (value := getattr(task, name, None))}
    with suppress(Exception):
        return is_fanout(app.amqp.router.route(own, task.name)["queue"])
    return False


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


def _of_long_waits(app: Celery, reading: Reading) -> Iterator[Hazard]:
    broker, longest, until = _transport(app), _longest(reading), visibility_timeout(app)
    if broker.startswith(_ON_REDIS) and longest > until:
        yield Hazard(
            "beyond-visibility-timeout",
            f"a retry may wait {spoken(longest)}, longer than Redis keeps a message from other workers "
            f"(visibility_timeout, {spoken(until)}): the job is delivered again and runs more than once",
        )
    if broker.endswith("amqp") and longest > _CONSUMER_TIMEOUT:
        yield Hazard(
            "beyond-consumer-timeout",
            f"a retry may wait {spoken(longest)}, longer than RabbitMQ's consumer_timeout, "
            f"{spoken(_CONSUMER_TIMEOUT)} by default: before RabbitMQ 4.3 it closes the channel, and "
            "the worker ends; on quorum queues Celery 5.5 and newer has RabbitMQ wait instead",
        )


def _transport(app: Celery) -> str:
    """Return the scheme of the app's broker, whose package may be missing."""
    urls = app.conf.broker_read_url or "amqp://"
    return str(urls if isinstance(urls, str) else urls[0]).split(":")[0]


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
        )
    if isinstance(expires, (int, float)) and isinstance(span, Wait) and span.most > expires:
        yield Hazard(
            "expires",
            f"expires={expires} counts from the first sending, and the retries take up to "
            f"{spoken(span.most)}: Celery silently revokes a retry that is due later; the bridge ends such a "
            "job as on_exhaustion says",
        )


def _of_lost_workers(task: Task) -> Iterator[Hazard]:
    uses = "under the bridge a lost worker uses an attempt"
    if getattr(task, "retry_on_worker_lost", False):
        text = f"retry_on_worker_lost=True retries a job that kills its worker; {uses}"
        yield Hazard("retry-on-worker-lost", f"{text}, and the policy's waits count")
    elif task.acks_late and task.reject_on_worker_lost:
        yield Hazard(
            "poison-job",
            "reject_on_worker_lost=True requeues a job that kills its worker, uncounted and without end; "
            f"{uses}",
        )
    elif task.acks_late:
        yield Hazard(
            "acks-late-alone",
            "acks_late=True without reject_on_worker_lost: a job whose pool process is killed is not run "
            f"again; {uses}",
        )
    elif task.reject_on_worker_lost:
        yield Hazard(
            "reject-without-acks-late",
            "reject_on_worker_lost=True has no effect without acks_late: the message is gone before the task "
            "runs, and a killed worker loses it",
        )


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
    if "pickle" in str(task.serializer or app.conf.task_serializer):
        yield pickled("the task's serializer is pickle")
    elif any("pickle" in str(kind) for kind in app.conf.accept_content or ()):
        yield pickled("accept_content takes pickle")
