"""What to look at before an actor is moved, in its options, its broker and its middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dramatiq
from dramatiq.broker import Broker
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF

from ....dramatiq.brokers import PATIENCE, is_broker
from ....spec.duration import spoken
from ..already import attempts_of
from ..planned import ENDLESS, NOT_KNOWN, Hazard, Native, Wait
from .settings import Settings, ignores_results, max_age, task_policy, time_limit

#: From here on a wait outlives what a worker's memory should hold.
_LONG = PATIENCE.total_seconds()


def hazards(settings: Settings, native: Native, broker: Broker) -> Iterator[Hazard]:
    """Yield what to look at before an actor of a broker is moved."""
    for look in _ALL:
        yield from look(settings, native, broker)


def _already_moved(settings: Settings, _native: Native, broker: Broker) -> Iterator[Hazard]:
    moved = task_policy(broker, settings.actor)
    if moved is not None:
        text = f"it is under the bridge already, with {attempts_of(moved.policy)}"
        yield Hazard("already-moved", f"{text}: this is what Dramatiq alone would do")


def _no_retries(settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retries is None:
        yield Hazard(
            "no-retries",
            "the broker has no Retries middleware: a job that fails is acknowledged as if it had succeeded, "
            "and nothing keeps it; on_exhaustion=dead_letter would",
        )


def _runs(settings: Settings, native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retries is None or native.runs == NOT_KNOWN:
        return
    if native.runs == ENDLESS:
        yield Hazard(
            "infinite-retries",
            f"max_retries={settings.max_retries} retries a job without end, however long it has failed, "
            "and so does the bridge: say a max_attempts; a job in flight that has had as many runs then ends "
            'at its next failure, or begins afresh under install(in_flight="afresh")',
        )
    elif native.runs == 1:
        return
    elif settings.sets("max_retries"):
        yield Hazard(
            "counts-retries",
            f"max_retries={settings.max_retries} counts retries, so that a job runs {native.runs} times; "
            f"max_attempts counts runs: {native.runs}, not {settings.max_retries}",
        )
    elif isinstance(native.span, Wait):
        yield Hazard(
            "default-retries",
            f"max_retries is {settings.max_retries}, as by default: a job runs {native.runs} times over "
            f"{spoken(native.span.least)} to {spoken(native.span.most)}",
        )


def _retry_when(settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retry_when is None or settings.retries is None:
        return
    asked = (
        "the bridge goes on asking it: say a max_attempts for what it never ends"
        if settings.is_asked
        else "it is set on the broker's Retries: a policy that says max_attempts takes its place"
    )
    yield Hazard(
        "retry-when",
        f"retry_when takes the place of max_retries, and what it will say cannot be read; {asked}",
    )


def _throws(settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.thrown:
        names = ", ".join(cls.__name__ for cls in settings.thrown)
        yield Hazard(
            "throws",
            f"throws={names} also rules out subclasses, which non_retryable_errors does not name; the bridge "
            "goes on reading throws, so leave it on the actor",
        )


def _waits(settings: Settings, native: Native, broker: Broker) -> Iterator[Hazard]:
    if settings.retries is not None and settings.max_backoff > DEFAULT_MAX_BACKOFF:
        yield Hazard(
            "cut-backoff",
            f"max_backoff={settings.max_backoff} is {spoken(settings.max_backoff / 1000)}, which Dramatiq "
            f"cuts to {spoken(DEFAULT_MAX_BACKOFF / 1000)}",
        )
    waits = () if native.waits == NOT_KNOWN else native.waits
    longest = max((wait.most for wait in waits), default=0.0)
    if longest > _LONG:
        yield Hazard(
            "long-delays",
            f"a retry may wait {spoken(longest)}, all the time {_in_memory(broker)}; with a store the bridge "
            "parks what waits long",
        )


def _in_memory(broker: Broker) -> str:
    if is_broker(broker, "rabbitmq", "RabbitmqBroker"):
        return (
            "unacknowledged in a worker's memory, and RabbitMQ takes it back after its consumer_timeout, "
            f"{spoken(_LONG)} by default, again and again"
        )
    return "in a worker's memory, where it is delayed or stranded if the broker or that worker goes away"


def _limits(settings: Settings, native: Native, broker: Broker) -> Iterator[Hazard]:
    limit = time_limit(broker, settings.actor)
    if limit is not None and "time_limit" not in settings.actor.options:
        yield Hazard(
            "time-limit",
            f"nobody has set a time_limit on it: a run is interrupted after {spoken(limit / 1000)}, the "
            "broker's; that uses an attempt, of the error type timeout",
        )
    if is_broker(broker, "rabbitmq", "RabbitmqBroker") and (limit is None or limit / 1000 > _LONG):
        yield Hazard(
            "over-run",
            f"a run may take longer than RabbitMQ's consumer_timeout, {spoken(_LONG)} by default: the job is "
            "then delivered again and runs beside itself; with a store the bridge lets the second one wait",
        )
    age = max_age(broker, settings.actor)
    if age:
        late = not isinstance(native.span, Wait) or native.span.most > age / 1000
        but = ", perhaps before its retries are through" if late else ""
        yield Hazard("age-limit", f"max_age drops a job that is {spoken(age / 1000)} old{but}")


def _results(settings: Settings, _native: Native, broker: Broker) -> Iterator[Hazard]:
    if ignores_results(broker, settings.actor):
        yield Hazard(
            "ignored-results",
            "the broker has Results, but store_results is not set: its result or last error is not kept",
        )


def _pickle(_settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if isinstance(dramatiq.get_encoder(), dramatiq.PickleEncoder):
        yield Hazard(
            "pickle",
            "messages are pickled: who can write to the broker or the dead letters runs code in the workers",
        )


_ALL: tuple[Callable[[Settings, Native, Broker], Iterator[Hazard]], ...] = (
    *(_already_moved, _no_retries, _runs, _retry_when, _throws, _waits),
    *(_limits, _results, _pickle),
)
