"""What to look at before an actor is moved, in its options, its broker and its middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dramatiq
from dramatiq.broker import Broker
from dramatiq.middleware import Retries
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF

from ....dramatiq.caveats import PATIENCE
from ....dramatiq.on_redis import is_broker
from ....duration import spoken
from ..planned import Hazard, Native
from .settings import Settings, beside, ignores_results, max_age, task_policy, time_limit

#: From here on a wait outlives what a worker's memory should hold.
_LONG = PATIENCE.total_seconds()


def hazards(settings: Settings, native: Native, broker: Broker) -> Iterator[Hazard]:
    """Yield what to look at before an actor of a broker is moved."""
    for look in _ALL:
        yield from look(settings, native, broker)


def _already_moved(settings: Settings, _native: Native, broker: Broker) -> Iterator[Hazard]:
    moved = task_policy(broker, settings.actor)
    if moved is not None:
        text = f"it is under the bridge already, with max_attempts={moved.policy.runs}"
        yield Hazard("already-moved", f"{text}: this is what Dramatiq alone would do")


def _no_retries(settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retries is None:
        yield Hazard(
            "no-retries",
            "the broker has no Retries middleware: a job that fails is acknowledged as if it had succeeded, "
            "and nothing keeps it; on_exhaustion=dead_letter would",
        )


def _runs(settings: Settings, native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retries is None or settings.retry_when is not None:
        return
    if native.runs is None:
        yield Hazard(
            "infinite-retries",
            f"max_retries={settings.max_retries} retries a job without end, however long it has failed; a "
            "max_attempts ends it in the dead letters",
        )
    elif native.runs == 1:
        return
    elif settings.sets("max_retries"):
        yield Hazard(
            "counts-retries",
            f"max_retries={settings.max_retries} counts retries, so that a job runs {native.runs} times; "
            f"max_attempts counts runs: {native.runs}, not {settings.max_retries}",
        )
    elif native.span:
        yield Hazard(
            "default-retries",
            f"nobody has set max_retries: Dramatiq's default, {settings.max_retries}, lets a job run "
            f"{native.runs} times over {spoken(native.span.least)} to {spoken(native.span.most)}",
        )


def _retry_when(settings: Settings, _native: Native, _broker: Broker) -> Iterator[Hazard]:
    if settings.retry_when is None or settings.retries is None:
        return
    asked = (
        "the bridge goes on asking it, and max_attempts ends what it does not"
        if settings.is_asked
        else "it is set on the broker's Retries, which the bridge does not ask: set it on the actor"
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
    longest = max((wait.most for wait in native.waits), default=0.0)
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
        late = native.span is None or native.span.most > age / 1000
        but = ", before its retries are through" if late else ""
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


def _others(_settings: Settings, _native: Native, broker: Broker) -> Iterator[Hazard]:
    for middleware in beside(broker):
        name = f"{type(middleware).__module__}.{type(middleware).__qualname__}"
        if isinstance(middleware, Retries):
            yield Hazard(
                "own-retries",
                f"{name} is a Retries of its own: what it overrides cannot be read, and no worker starts "
                "with it and the bridge together",
            )
        else:
            yield Hazard(
                "sends-after-a-run",
                f"{name} sends messages in after_process_message: if it retries by itself, it will do so "
                "beside the policy",
            )


_ALL: tuple[Callable[[Settings, Native, Broker], Iterator[Hazard]], ...] = (
    *(_already_moved, _no_retries, _runs, _retry_when, _throws, _waits),
    *(_limits, _results, _pickle, _others),
)
