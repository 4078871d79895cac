"""What to look at before a Celery task is moved: in its options, its code and its app's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from celery import Celery

from ....celery.attach import is_bridged
from ....celery.options import automatic, explicit
from ....celery.sending import visibility_timeout
from ....spec.duration import spoken
from ..planned import ENDLESS, NOT_KNOWN, Hazard, Runs, Wait
from .native import Reading, is_unseen
from .ways import autoretries, backoff_of, retry_kwargs, runs_of

_ON_REDIS = ("redis", "sentinel", "valkey")
#: Seconds for which RabbitMQ waits for an acknowledgement, unless it is told otherwise.
_CONSUMER_TIMEOUT = 1800.0


def hazards(app: Celery, reading: Reading) -> Iterator[Hazard]:
    """Yield what to look at before a task of an app is moved."""
    looks = _ALL if reading.native.runs != NOT_KNOWN else _OF_OPTIONS
    yield from dict.fromkeys(hazard for look in looks for hazard in look(app, reading))


def _runs(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    runs, task = reading.native.runs, reading.task
    limits = [*_limits(reading)]
    if not reading.ways and explicit(task, "max_retries"):
        yield Hazard(
            "unused-max-retries",
            f"max_retries={task.max_retries} is never read: nothing retries, it runs once",
        )
    for text, value in [limit for limit in limits if runs_of(limit[1]) == runs != ENDLESS][:1]:
        yield Hazard(
            "counts-retries",
            f"{text} counts retries, so that a job runs {_times(runs)}; max_attempts counts runs: "
            f"{runs}, not {value}",
        )
    if reading.ways and not limits:
        yield Hazard(
            "default-retries",
            f"max_retries={task.max_retries} is Celery's default: a job runs {runs} times; the Open Job "
            "Spec's default is 3 runs",
        )


def _times(runs: Runs) -> str:
    return "once" if runs == 1 else f"{runs} times"


def _limits(reading: Reading) -> Iterator[tuple[str, float | None]]:
    """Yield what limits the retries, in words, and its value; what counts first comes first."""
    if not reading.ways:
        return
    asked = retry_kwargs(reading.task).get("max_retries") if autoretries(reading.task) else None
    if asked is not None:
        yield f"retry_kwargs={{'max_retries': {asked}}}", asked
    for ask in reading.asks:
        if ask.max_retries is not None:
            where = reading.code.where(ask.line)
            yield f"self.retry(max_retries={ask.max_retries}) in {where}", ask.max_retries
    if explicit(reading.task, "max_retries"):
        yield f"max_retries={reading.task.max_retries}", reading.task.max_retries


def _endless(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    if reading.native.runs == ENDLESS:
        yield Hazard(
            "infinite-retries",
            "max_retries=None retries a job without end, however long it has failed, and so does the bridge: "
            "say a max_attempts; a job in flight that has had as many runs then ends at its next failure, or "
            'begins afresh under install(in_flight="afresh")',
        )


def _backoff(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    task = reading.task
    factor = backoff_of(task) if autoretries(task) else 0
    if not factor:
        return
    asked = automatic(task, "retry_backoff", default=False)
    cap = int(automatic(task, "retry_backoff_max", default=600))
    if asked is not True and float(asked) != factor:
        yield Hazard(
            "truncated-backoff",
            f"retry_backoff={asked!r} is cut to whole seconds, 1 at least: the backoff starts at {factor} s",
        )
    if cap < factor:
        yield Hazard(
            "cap-below-backoff",
            f"retry_backoff_max={cap} is below retry_backoff={asked!r}: no retry waits longer than {cap} s",
        )
    if automatic(task, "retry_jitter", default=True):
        yield Hazard("backoff-from-zero", "retry_jitter draws from 0 s on, so that a retry may come at once")


def _long_waits(app: Celery, reading: Reading) -> Iterator[Hazard]:
    broker = _transport(app)
    longest = _longest(reading)
    if broker.startswith(_ON_REDIS) and longest > visibility_timeout(app):
        yield Hazard(
            "beyond-visibility-timeout",
            f"a retry may wait {spoken(longest)}, longer than Redis keeps a message from other workers "
            f"(visibility_timeout, {spoken(visibility_timeout(app))}): the job is delivered again and runs "
            "more than once",
        )
    if broker.endswith("amqp") and longest > _CONSUMER_TIMEOUT:
        yield Hazard(
            "beyond-consumer-timeout",
            f"a retry may wait {spoken(longest)}, longer than RabbitMQ's consumer_timeout, "
            f"{spoken(_CONSUMER_TIMEOUT)} by default: except on quorum queues it closes the channel, and the "
            "worker ends",
        )


def _longest(reading: Reading) -> float:
    """Return the longest of the waits that are known."""
    waits = [wait for way in reading.ways for wait in way.listed() or ()]
    last = [way.wait(way.runs - 1) for way in reading.ways if way.wait and isinstance(way.runs, int)]
    return max((wait.most for wait in (*waits, *last)), default=0.0)


def _limits_in_time(app: Celery, reading: Reading) -> Iterator[Hazard]:
    limit = reading.task.time_limit or app.conf.task_time_limit
    expires, span = reading.task.expires, reading.native.span
    if limit and reading.ways:
        yield Hazard(
            "time-limit",
            f"time_limit={limit} ends a job at once, whatever is retried; under the bridge it uses an "
            "attempt, of the error type timeout",
        )
    if isinstance(expires, (int, float)) and isinstance(span, Wait) and span.most > expires:
        yield Hazard(
            "expires",
            f"expires={expires} counts from the first sending, and the retries take up to "
            f"{spoken(span.most)}: one that is due later is revoked without a word; the bridge ends such a "
            "job as on_exhaustion says",
        )


def _transport(app: Celery) -> str:
    """Return the scheme of the app's broker; its package need not be there."""
    urls = app.conf.broker_read_url or "amqp://"
    return str(urls if isinstance(urls, str) else urls[0]).split(":")[0]


def _lost_workers(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    task = reading.task
    if is_bridged(task):
        return
    if getattr(task, "retry_on_worker_lost", False):
        yield Hazard(
            "retry-on-worker-lost",
            "retry_on_worker_lost=True retries a job that kills its worker; under the bridge a lost worker "
            "uses an attempt, and the policy's waits count",
        )
    elif task.acks_late and task.reject_on_worker_lost:
        yield Hazard(
            "poison-job",
            "reject_on_worker_lost=True requeues a job that kills its worker, without counting and without "
            "end; under the bridge a lost worker uses an attempt",
        )
    elif task.acks_late:
        yield Hazard(
            "acks-late-alone",
            "acks_late=True without reject_on_worker_lost: a job whose pool process is killed is not run "
            "again; under the bridge a lost worker uses an attempt",
        )
    elif task.reject_on_worker_lost:
        yield Hazard(
            "reject-without-acks-late",
            "reject_on_worker_lost=True has no effect without acks_late: the message is gone before the task "
            "runs, and a killed worker loses it",
        )


def _results(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    if is_unseen(reading.task):
        yield Hazard(
            "ignored-results",
            "ignore_result=True stores no failure either: nobody can list the jobs that gave up; "
            "on_exhaustion=dead_letter would keep them",
        )


def _pickle(app: Celery, reading: Reading) -> Iterator[Hazard]:
    used = "pickle" in str(reading.task.serializer or app.conf.task_serializer)
    accepted = any("pickle" in str(kind) for kind in app.conf.accept_content or ())
    if used or accepted:
        name = "the task's serializer is pickle" if used else "accept_content takes pickle"
        yield Hazard(
            "pickle",
            f"{name}: who can write to the broker or the dead letters runs code in the workers",
        )


def _calls(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    for ask in reading.asks:
        where = reading.code.where(ask.line)
        hint = "its countdown is a hint, which max_interval caps"
        wait = "the policy's own wait that of default_retry_delay" if ask.countdown is None else hint
        yield Hazard(
            "retry-in-body",
            f"self.retry in {where} is a failure to the bridge: max_attempts takes the place of max_retries, "
            f"and {wait}",
        )


def _throws(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    names = ", ".join(cls.__name__ for cls in reading.task.throws or ())
    if names:
        yield Hazard(
            "throws",
            f"throws={names} only lowers the log level: it stops no retry; non_retryable_errors would",
        )


def _unused(_app: Celery, reading: Reading) -> Iterator[Hazard]:
    task = reading.task
    if getattr(task, "autoretry_for", ()) and not autoretries(task):
        yield Hazard(
            "unused-autoretry",
            "autoretry_for was set after the task was registered: Celery does not read it, nothing retries",
        )
    countdown = retry_kwargs(task).get("countdown")
    if countdown is not None and autoretries(task) and backoff_of(task):
        yield Hazard(
            "unused-countdown",
            f"retry_kwargs={{'countdown': {countdown}}} is never read: retry_backoff says the wait",
        )
    if explicit(task, "default_retry_delay") and not _is_delay_read(reading):
        yield Hazard(
            "unused-retry-delay",
            f"default_retry_delay={task.default_retry_delay} is never read: {_why_not(reading)}",
        )


def _is_delay_read(reading: Reading) -> bool:
    if any(ask.countdown is None for ask in reading.asks):
        return True
    given = retry_kwargs(reading.task)
    automatic = autoretries(reading.task) and not backoff_of(reading.task)
    return automatic and given.get("countdown") is None and not given.get("eta")


def _why_not(reading: Reading) -> str:
    if autoretries(reading.task) and backoff_of(reading.task):
        return "retry_backoff says the wait"
    return "each retry says its own countdown" if reading.ways else "nothing retries"


#: What the options say alone, whatever the code does.
_OF_OPTIONS: tuple[Callable[[Celery, Reading], Iterator[Hazard]], ...] = (
    *(_backoff, _lost_workers, _results, _throws, _pickle),
)
_ALL = (_endless, _runs, _long_waits, _limits_in_time, _calls, *_OF_OPTIONS, _unused)
