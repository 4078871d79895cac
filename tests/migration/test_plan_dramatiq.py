"""The plan of an actor, as `of_dramatiq` reads it, agrees with Dramatiq itself."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import dramatiq
import pytest
from dramatiq.broker import Broker
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import compute_backoff
from dramatiq.middleware import AgeLimit, Middleware, Retries, TimeLimit, default_middleware
from dramatiq.middleware.retries import DEFAULT_MAX_BACKOFF
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from ojs_bridge import Bridge, Jitter, RetryPolicy
from ojs_bridge.dramatiq import install
from ojs_bridge.migration.plan import (
    DRAMATIQ_MAX_BACKOFF,
    ENDLESS,
    NOT_KNOWN,
    NativeRetries,
    Planned,
    Runs,
    WaitRange,
    dramatiq_wait,
)
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq


def never(*_args: Any) -> Any:
    """An actor's function, and a `retry_when`, that no plan may call."""
    raise AssertionError("a plan calls nothing")


def plan_of(broker: Broker | None = None, **options: Any) -> Planned:
    """The plan of one actor with these options."""
    broker = broker or StubBroker()
    dramatiq.actor(never, broker=broker, actor_name="job", **options)
    [found] = of_dramatiq(broker)
    return found


def broker_with(*more: Middleware, retries: Retries | None = None) -> StubBroker:
    """A broker with the default middleware, its Retries replaced, and more."""
    chosen = [retries if retries and cls is Retries else cls() for cls in default_middleware]
    return StubBroker(middleware=[*chosen, *more])


@pytest.mark.parametrize(
    ("first", "longest"),
    [(15_000, 604_800_000), (1_000, 6_000), (5_000, 5_000), (20_000, 10_000), (3, 17), (0, 0), (100, 0)],
)
@pytest.mark.parametrize("n", [1, 2, 3, 16, 40])
def test_waits_are_what_dramatiq_draws(first: int, longest: int, n: int) -> None:
    """Least, mean and most fit 2,000 draws of Dramatiq's function, which cuts each to whole milliseconds."""
    drawn = [compute_backoff(n - 1, factor=first, max_backoff=longest)[1] / 1000 for _ in range(2000)]
    wait = dramatiq_wait(n, first, longest)
    assert wait.least - 0.001 <= min(drawn) <= max(drawn) <= wait.most
    assert min(drawn) == pytest.approx(wait.least, rel=0.05, abs=0.002)
    assert max(drawn) == pytest.approx(wait.most, rel=0.05, abs=0.002)
    assert fmean(drawn) == pytest.approx(wait.mean, rel=0.03, abs=0.001)


def test_the_cap_is_dramatiqs_own() -> None:
    """The plan has the cap in a module that does not import Dramatiq."""
    assert DRAMATIQ_MAX_BACKOFF == DEFAULT_MAX_BACKOFF


# the settings of the broker's Retries, the actor's options -> runs, seconds before the first retry
RUNS: list[tuple[dict[str, Any], dict[str, Any], Runs, tuple[float, float] | None]] = [
    ({}, {}, 21, (15, 30)),
    ({}, {"max_retries": 5, "min_backoff": 1000}, 6, (1, 2)),
    ({}, {"max_retries": 0}, 1, None),
    ({}, {"max_retries": -3}, 1, None),
    ({}, {"max_retries": 2.5}, 4, (15, 30)),
    ({}, {"max_retries": None}, ENDLESS, (15, 30)),
    ({}, {"max_retries": float("inf")}, ENDLESS, (15, 30)),
    ({}, {"max_backoff": 8000}, 21, (4, 8)),
    ({"max_retries": 3, "min_backoff": 500, "max_backoff": 700}, {}, 4, (0.35, 0.7)),
    ({"max_retries": 3}, {"max_retries": 1}, 2, (15, 30)),
    ({"max_retries": None}, {}, ENDLESS, (15, 30)),
    ({"retry_when": never}, {"retry_when": None, "max_retries": 2}, 3, (15, 30)),
    ({}, {"retry_when": never, "max_retries": 2}, NOT_KNOWN, (15, 30)),
]


@pytest.mark.parametrize(("settings", "options", "runs", "first"), RUNS)
def test_how_often_and_when(
    settings: dict[str, Any], options: dict[str, Any], runs: Runs, first: tuple[float, float] | None
) -> None:
    """An actor's options stand over those of its broker's Retries."""
    found = plan_of(broker_with(retries=Retries(**settings)), **options)
    assert found.native is not None and found.policy is not None
    assert found.native.runs == runs
    waits = found.native.waits
    assert waits != NOT_KNOWN
    assert (len(waits), (waits[0].least, waits[0].most) if waits else None) == (
        min(runs - 1, 20) if isinstance(runs, int) else 20,
        first,
    )
    assert found.policy.get("max_attempts") == (runs if isinstance(runs, int) else None)
    assert found.policy["on_exhaustion"] == "dead_letter"
    assert bool(found.differences) == (runs != 1)


def test_the_span_of_the_default() -> None:
    """Twenty retries take more than a month, on average."""
    found = plan_of()
    assert found.native is not None and isinstance(found.native.span, WaitRange)
    assert found.native.span.mean == pytest.approx(35 * 86_400, rel=0.01)


def test_the_policy_waits_as_long_on_average() -> None:
    """The average is the same until the cap is near; the plan tells each difference."""
    found = plan_of(max_retries=3, min_backoff=1000, max_backoff=6000)
    assert found.policy == {
        "max_attempts": 4,
        "initial_interval": "PT1.5S",
        "backoff_coefficient": 2.0,
        "max_interval": "PT6S",
        "jitter": True,
        "on_exhaustion": "dead_letter",
        "backoff_strategy": "exponential",
    }
    assert found.differences == (
        "retry 3 waits 3 s to 6 s as before, but 5.25 s on average, not 4.75 s",
        "the first 3 waits together are on average 9.75 s, not 9.25 s",
        "retry 1 waits 0.75 s to 2.25 s, not 1 s to 2 s",
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_retries", "5"), ("min_backoff", None), ("max_backoff", None), ("throws", "OSError"),
     ("throws", ["OSError"]), ("min_backoff", float("inf"))],
)  # fmt: skip
def test_options_with_which_dramatiq_itself_fails(option: str, value: Any) -> None:
    """A failed job is lost over them; there is nothing to read."""
    found = plan_of(**{option: value})
    assert (found.native, found.policy) == (None, None)
    assert found.unreadable.startswith(f"{option}={value!r}: ")
    assert ("; the bridge leaves the actor to Dramatiq" in found.unreadable) == (value is not None)


def test_a_backoff_that_nobody_needs() -> None:
    """An actor that is never retried needs no backoff."""
    found = plan_of(max_retries=0, min_backoff=None)
    assert found.native is not None
    assert (found.native.runs, found.native.retries, found.native.final) == (1, "nothing", "every error")


class Louder(Retries):
    """A Retries of somebody's own."""


class Again(Middleware):
    """A middleware that sends each message again."""

    def after_process_message(self, broker: Broker, message: Any, **_: Any) -> None:
        broker.enqueue(message)


class Writing(Middleware):
    """A middleware that sets the number of retries of each message."""

    def before_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        message.options.setdefault("max_retries", len(message.args))


class Tracing(Middleware):
    """A middleware that puts an option of its own into each message."""

    def before_enqueue(self, broker: Broker, message: Any, delay: int | None) -> None:
        message.options["trace_id"] = 7


def bridged() -> StubBroker:
    broker = StubBroker()
    install(broker, Bridge(), policies={"job": {"max_attempts": 7}})
    return broker


def on_rabbitmq(**options: Any) -> RabbitmqBroker:
    chosen = [cls() for cls in default_middleware if cls is not TimeLimit]
    return RabbitmqBroker(url="amqp://127.0.0.1:1", middleware=[*chosen, TimeLimit(**options)])


class Foreign(Broker):
    """A broker of somebody's own."""

    def declare_queue(self, queue_name: str) -> None:
        self.queues[queue_name] = None


HOUR = 3_600_000
HAZARDS: dict[str, tuple[Callable[[], Broker], dict[str, Any], str]] = {
    "already-moved": (bridged, {}, "under the bridge already, with max_attempts=7"),
    "no-retries": (lambda: StubBroker(middleware=[]), {}, "acknowledged as if it had succeeded"),
    "infinite-retries": (
        StubBroker,
        {"max_retries": None},
        'begins afresh under install(in_flight="afresh")',
    ),
    "lost-worker": (StubBroker, {"max_retries": 0}, "the lost worker has used the only attempt"),
    "counts-retries": (StubBroker, {"max_retries": 5}, "a job runs 6 times"),
    "retry-when": (StubBroker, {"retry_when": never}, "goes on asking it"),
    "throws": (StubBroker, {"throws": (OSError, KeyError)}, "throws=OSError, KeyError"),
    "long-delays": (StubBroker, {"max_retries": 12}, "17 h"),
    "over-run": (on_rabbitmq, {"time_limit": 2 * HOUR}, "30 min"),
    "age-limit": (
        lambda: broker_with(AgeLimit(max_age=HOUR)),
        {"max_age": 9000},
        "9 s old, perhaps before its",
    ),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_hazards(name: str) -> None:
    """Each hazard names its value; a harmless middleware and harmless options have no hazard."""
    make, options, told = HAZARDS[name]
    [text] = [hazard.text for hazard in plan_of(make(), **options).hazards if hazard.name == name]
    assert told in text
    quiet = broker_with(Tracing(), Results(backend=StubBackend(), store_results=True))
    calm = {"max_retries": 0, "time_limit": float("inf")}
    assert [hazard.name for hazard in plan_of(quiet, **calm).hazards] == ["lost-worker"]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: broker_with(retries=Louder()), "Louder: it is another Retries"),
        (lambda: broker_with(Again()), "Again.after_process_message: it may enqueue a message"),
        (
            lambda: broker_with(Writing()),
            "Writing.before_enqueue: it may write options of retries",
        ),
        (lambda: broker_with(retries=Retries(retry_when=never)), "the broker's retry_when decides"),
    ],
)
def test_what_a_broker_leaves_open(make: Callable[[], Broker], told: str) -> None:
    """The plan says nothing of the actors of such a broker, whatever their options, and gives no policy."""
    for options in ({}, {"max_retries": 3}):
        found = plan_of(make(), **options)
        assert (found.native, found.policy) == (NativeRetries.unknown(), None)
        assert told in str(found.open[0])


def test_pickled_messages() -> None:
    """The encoder is the process's."""
    encoder = dramatiq.get_encoder()
    dramatiq.set_encoder(dramatiq.PickleEncoder())
    try:
        assert "pickle" in [hazard.name for hazard in plan_of().hazards]
    finally:
        dramatiq.set_encoder(encoder)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: RedisBroker(url="redis://127.0.0.1:1", dead_message_ttl=3_600_000), "keeps it for 1 h"),
        (on_rabbitmq, "keeps it for 7 d"),
        (StubBroker, "it goes to the dead queue slow.XQ, in this process's memory"),
        (Foreign, "Foreign hears that it has failed"),
    ],
)
def test_what_happens_in_the_end(make: Callable[[], Broker], told: str) -> None:
    """The broker's dead queue, for as long as it keeps anything, and the actor that is told."""
    found = plan_of(make(), queue_name="slow", on_retry_exhausted="clean_up")
    assert found.native is not None
    assert told in found.native.at_the_end
    assert found.native.at_the_end.endswith("; then the actor clean_up is sent it")
    assert ("unknown-broker" in [hazard.name for hazard in found.hazards]) is (make is Foreign)


def test_an_actor_that_speaks_of_policies_already() -> None:
    """The plan shows what the bridge does with the actor; the actor's own fields are its policy."""
    broker = bridged()
    found = plan_of(broker, ojs_retry={"max_attempts": 4, "jitter": False})
    assert found.native is not None
    assert found.native.waits != NOT_KNOWN
    assert ([w.mean for w in found.native.waits], found.differences) == ([1, 2, 4], ())
    assert found.policy == {"max_attempts": 4, "jitter": False}
    assert [hazard.name for hazard in found.hazards] == ["already-moved"]
    other = plan_of(bridged(), ojs_retry=RetryPolicy(max_attempts=2, jitter=Jitter(1, 2)))
    assert (other.policy, len(other.differences)) == ({"max_attempts": 2}, 1)


def test_throws_is_what_the_policy_rules_out() -> None:
    """The policy names the errors of `throws`, so that a reader of the file sees them."""
    found = plan_of(StubBroker(), throws=(OSError, KeyError))
    assert found.policy is not None
    assert found.policy["non_retryable_errors"] == ["builtins.OSError", "builtins.KeyError"]


class Signed(dramatiq.PickleEncoder):
    """An encoder that refuses what it has not signed."""

    def decode(self, data: bytes) -> Any:
        if not data.startswith(b"signed"):
            raise ValueError("not signed")
        return super().decode(data[6:])


def test_messages_that_are_pickled_and_signed() -> None:
    """What counts is what the decoder does, not its class."""
    encoder = dramatiq.get_encoder()
    dramatiq.set_encoder(Signed())
    try:
        assert "pickle" not in [hazard.name for hazard in plan_of().hazards]
    finally:
        dramatiq.set_encoder(encoder)
