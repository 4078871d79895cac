"""A policy is turned into a framework's own options, and the plan reads them back."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

import dramatiq
import pytest
from celery import Celery
from celery.utils.time import get_exponential_backoff_interval
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Intervals, InvalidRetryPolicy, Jitter, RetryPolicy
from ojs_bridge.migration import NativeOptions, preset, to_celery_options, to_dramatiq_options
from ojs_bridge.migration.plan import ENDLESS, NOT_KNOWN, NativeRetries, Planned, Runs, celery_wait
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from ojs_bridge.rules.policy import LARGEST
from tests.test_package import FRAMEWORKS, modules_after


def idle() -> None:
    """A task."""


def celery_plan(options: dict[str, Any]) -> Planned:
    """The plan of a Celery task with these options."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.task(idle, name="job", shared=False, **options)
    [found] = of_celery(app, ["job"])
    return found


def dramatiq_plan(options: dict[str, Any]) -> Planned:
    """The plan of a Dramatiq actor with these options."""
    broker = StubBroker()
    dramatiq.actor(idle, broker=broker, actor_name="job", **options)
    [found] = of_dramatiq(broker)
    return found


def schedule(found: Planned) -> tuple[Runs, list[float]]:
    """A task's number of runs, and the least, mean and most of each wait, rounded to milliseconds."""
    native = found.native
    assert isinstance(native, NativeRetries) and native.waits != NOT_KNOWN
    return native.runs, [round(x, 3) for w in native.waits for x in (w.least, w.mean, w.most)]


ANY = (Exception,)
ON_CELERY: list[dict[str, Any]] = [
    {},
    {"autoretry_for": ANY},
    {"autoretry_for": ANY, "max_retries": 7, "default_retry_delay": 30},
    {"autoretry_for": ANY, "max_retries": 7, "default_retry_delay": 0.5},
    {"autoretry_for": ANY, "max_retries": None, "default_retry_delay": 5},
    {"autoretry_for": ANY, "max_retries": 0},
    {"autoretry_for": ANY, "max_retries": 12, "retry_backoff": True},
    {"autoretry_for": ANY, "max_retries": 12, "retry_backoff": 3, "retry_jitter": False},
    {"autoretry_for": ANY, "max_retries": 2, "retry_backoff": 3, "retry_jitter": False},
    {"autoretry_for": ANY, "max_retries": 5, "retry_backoff": 10, "retry_backoff_max": 60},
    {"autoretry_for": ANY, "max_retries": 5, "retry_backoff": 60, "retry_backoff_max": 60},
]
ON_DRAMATIQ: list[dict[str, Any]] = [
    {},
    {"max_retries": 0},
    {"max_retries": 1},
    {"max_retries": 5, "min_backoff": 1000, "max_backoff": 6000},
    {"max_retries": 5, "min_backoff": 100, "max_backoff": 600_000},
    {"max_retries": 9, "min_backoff": 5000, "max_backoff": 5000},
    {"max_retries": 9, "max_backoff": 5000},
    {"max_retries": None, "min_backoff": 1},
    {"throws": (OSError, KeyError)},
]


@pytest.mark.parametrize(
    ("plan", "back", "options"),
    [(celery_plan, to_celery_options, options) for options in ON_CELERY]
    + [(dramatiq_plan, to_dramatiq_options, options) for options in ON_DRAMATIQ],
)
def test_there_and_back_again(
    plan: Callable[[dict[str, Any]], Planned],
    back: Callable[[Any], NativeOptions],
    options: dict[str, Any],
) -> None:
    """The options of the policy nearest to some options have the schedule of those."""
    first = plan(options)
    assert first.policy is not None
    endless = {"max_attempts": LARGEST} if first.native and first.native.runs == ENDLESS else {}
    found = back({**first.policy, **endless}).options
    assert schedule(plan(found)) == schedule(first)
    assert {*found.get("throws", ())} == {*options.get("throws", ())}


STEADY = {"backoff_strategy": "none", "jitter": False}
# the policy, the options of a Celery task, the options of a Dramatiq actor
TO: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"max_attempts": 1}, {"max_retries": 0}, {"max_retries": 0}),
    (
        {"max_attempts": 5, "initial_interval": "PT2S", "max_interval": "PT1M"},
        {"max_retries": 4, "retry_backoff": 4, "retry_backoff_max": 60, "retry_jitter": True},
        {"max_retries": 4, "min_backoff": 1333, "max_backoff": 60_000},
    ),
    (
        {"max_attempts": 4, "initial_interval": "PT2.5S", **STEADY},
        {"max_retries": 3, "default_retry_delay": 2.5},
        {"max_retries": 3, "min_backoff": 3333, "max_backoff": 3333},
    ),
    (
        {"max_attempts": 4, "initial_interval": "PT30S", "backoff_strategy": "none"},
        {"max_retries": 3, "retry_backoff": 60, "retry_backoff_max": 60, "retry_jitter": True},
        {"max_retries": 3, "min_backoff": 40_000, "max_backoff": 40_000},
    ),
    (
        {"max_attempts": 5, "initial_interval": "PT3S", "backoff_strategy": "linear", "jitter": False},
        {"max_retries": 4, "retry_backoff": 3, "retry_backoff_max": 12, "retry_jitter": False},
        {"max_retries": 4, "min_backoff": 2000, "max_backoff": 16_000},
    ),
    (
        {"max_attempts": LARGEST, "jitter": False},
        {"max_retries": None, "retry_backoff": 1, "retry_backoff_max": 300, "retry_jitter": False},
        {"max_retries": None, "min_backoff": 667, "max_backoff": 300_000},
    ),
    (
        {"max_attempts": 3, "initial_interval": "P9D", "max_interval": "P30D", "jitter": False},
        {"max_retries": 2, "retry_backoff": 777_600, "retry_backoff_max": 2_592_000, "retry_jitter": False},
        {"max_retries": 2, "min_backoff": 518_400_000, "max_backoff": 604_800_000},
    ),
]


@pytest.mark.parametrize(("policy", "celery", "actor"), TO)
def test_the_options(policy: dict[str, Any], celery: dict[str, Any], actor: dict[str, Any]) -> None:
    """Each framework's own plan can read the options."""
    found = to_celery_options(policy).options
    retried = {"autoretry_for": (Exception,)} if policy["max_attempts"] > 1 else {}
    assert found == {**retried, **celery}
    assert schedule(celery_plan(found))[0] == (ENDLESS if policy["max_attempts"] == LARGEST
                                               else policy["max_attempts"])  # fmt: skip
    assert to_dramatiq_options(policy).options == actor
    assert dramatiq_plan(actor).native is not None


EXACT_ON_CELERY: list[dict[str, Any]] = [
    {"max_attempts": 6, "initial_interval": "PT45.5S", **STEADY},
    {"max_attempts": 6, "initial_interval": "PT4S", "jitter": False},
    {"max_attempts": 20, "initial_interval": "PT1S", "max_interval": "PT10M", "jitter": False},
    {"max_attempts": 2, "initial_interval": "PT7S", "backoff_strategy": "polynomial", "jitter": False},
]


@pytest.mark.parametrize("policy", EXACT_ON_CELERY)
def test_exactly_the_same_waits_on_celery(policy: dict[str, Any]) -> None:
    """The options give exactly the policy's waits, and no wait is reported as lost."""
    found = to_celery_options(policy)
    assert [line.partition(":")[0] for line in found.lost] == ["response codes", "lost attempts"]
    whole = RetryPolicy.merge(policy)
    native = celery_plan(found.options).native
    assert native is not None
    for n, wait in enumerate(native.waits, 1):
        assert wait.least == wait.most == whole.delay(n, rng=NO_DRAW)


class _NoDraw:
    def random(self) -> float:
        raise AssertionError("nothing is drawn without jitter")


NO_DRAW = _NoDraw()


class CardStolen(Exception):
    """Loaded, by its full name and by its bare one."""


class CardEaten(CardStolen):
    """An error that a policy does not mean when it names the parent class."""


class Unprintable:
    """An object whose repr raises, as any object of a user may."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


LOST: list[tuple[dict[str, Any], str, str]] = [
    (
        {},
        "retry 1 waits 0 s to 2 s, not 0.5 s to 1.5 s",
        "retry 1 waits 0.667 s to 1.33 s, not 0.5 s to 1.5 s",
    ),
    (
        {"backoff_strategy": "polynomial", "max_attempts": 6, "jitter": False},
        "retry 5 waits 16 s, not 25 s",
        "together are on average 31 s, not 55 s",
    ),
    (
        {"on_exhaustion": "dead_letter"},
        "on_exhaustion: Celery keeps no dead letters",
        "on_exhaustion: the broker's dead queue keeps a failed job for 7 d",
    ),
    ({}, "a hard time limit ends the job", "Dramatiq discards nothing"),
    ({"non_retryable_errors": ["payment.*"]}, "'payment.*' is a prefix", "'payment.*' is a prefix"),
    ({"non_retryable_errors": ["a.b"]}, "'a.b' names no loaded exception", "'a.b' names no loaded exception"),
    ({"non_retryable_errors": ["CardStolen"]}, "subclasses of CardStolen", "subclasses of CardStolen"),
    (
        {"max_interval": "P30D", "initial_interval": "P9D"},
        "long waits: a retry may wait 30 d",
        "and Dramatiq cuts every wait to 7 d",
    ),
    ({"jitter": Jitter(1, 3)}, "not 1 s to 3 s", "retry 1 waits 1.33 s"),
    ({"jitter": lambda n, s, rng: s + 8 * rng.random()}, "not 1 s to 9 s", "not 1 s to 9 s"),
    ({"backoff_strategy": Intervals("PT1S", "PT1M"), "max_attempts": 4}, "retry 3", "retry 3"),
]


@pytest.mark.parametrize(("policy", "on_celery", "on_dramatiq"), LOST)
def test_what_is_lost(policy: dict[str, Any], on_celery: str, on_dramatiq: str) -> None:
    """The lost properties are told in words, for both frameworks."""
    for back, told in ((to_celery_options, on_celery), (to_dramatiq_options, on_dramatiq)):
        assert told in "\n".join(back(policy).lost)


def test_error_types_become_exception_classes() -> None:
    """The loaded ones: of a full name one, of a bare one all of that name; odd classes do no harm."""
    odd = type("OddlyLoaded", (Exception,), {"__module__": Unprintable()})
    assert to_dramatiq_options({"non_retryable_errors": ["OddlyLoaded"]}).options["throws"] == (odd,)
    for name in ("CardEaten", f"{__name__}.CardEaten"):
        policy = {"non_retryable_errors": [name, "builtins.KeyError"]}
        assert to_celery_options(policy).options["dont_autoretry_for"] == (CardEaten, KeyError)
        assert to_dramatiq_options(policy).options["throws"] == (CardEaten, KeyError)
        assert "CardEaten" not in "".join(to_celery_options(policy).lost)


@pytest.mark.parametrize(("factor", "most", "jitter"), [(1, 600, True), (7, 20, True), (3, 600, False)])
@pytest.mark.parametrize("n", [1, 3, 12])
def test_waits_are_what_celery_draws(factor: int, most: int, jitter: bool, n: int) -> None:
    """Least, mean and most fit 2,000 draws of Celery's own function."""
    drawn = [get_exponential_backoff_interval(factor, n - 1, most, jitter) for _ in range(2000)]
    wait = celery_wait(n, factor, most, jitter=jitter)
    assert wait.least <= min(drawn) <= max(drawn) <= wait.most
    assert min(drawn) == pytest.approx(wait.least, abs=0.03 * wait.most)
    assert max(drawn) == pytest.approx(wait.most, rel=0.03)
    assert fmean(drawn) == pytest.approx(wait.mean, rel=0.07)


def test_a_real_celery_task_with_the_options() -> None:
    """The task runs as often as the policy says; a job with a non-retryable error runs once."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    ran: list[type[Exception]] = []
    policy = {"max_attempts": 4, "non_retryable_errors": ["CardEaten"], **STEADY}

    def fail(cls: type[Exception]) -> None:
        ran.append(cls)
        raise cls

    task = app.task(fail, name="job", shared=False, **to_celery_options(policy).options)
    task.apply((OSError,))
    task.apply((CardEaten,))
    assert ran == [OSError] * 4 + [CardEaten]


def test_the_presets_of_the_frameworks() -> None:
    """A policy that is what a framework does by default becomes that framework's options."""
    celery, actor = to_celery_options(preset("celery").policy), to_dramatiq_options(preset("dramatiq").policy)
    assert celery.options == {"autoretry_for": (Exception,), "max_retries": 3, "retry_backoff": 1,
                              "retry_backoff_max": 600, "retry_jitter": True}  # fmt: skip
    assert actor.options == {"max_retries": 20, "min_backoff": 15_000, "max_backoff": 604_800_000}
    assert not [line for line in celery.lost + actor.lost if line.startswith("retry")]


def test_an_invalid_policy_is_refused() -> None:
    for back in (to_celery_options, to_dramatiq_options):
        with pytest.raises(InvalidRetryPolicy, match="max_attempts: -1 must be >= 0"):
            back({"max_attempts": -1})


def test_neither_framework_is_needed() -> None:
    """The formulas stand in modules of their own."""
    told = "from ojs_bridge.migration import *; to_celery_options({}), to_dramatiq_options({})"
    assert not modules_after(told) & FRAMEWORKS


class Refusing(type):
    """A metaclass that refuses what it is asked for."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__"):
            raise OSError(name)
        return super().__getattribute__(name)


class Hidden(Exception, metaclass=Refusing):
    """A loaded error that says nothing of itself."""


def test_a_loaded_error_that_cannot_be_asked() -> None:
    """It hides no other class."""
    named = {"max_attempts": 6, "non_retryable_errors": ["builtins.OSError"]}
    assert to_celery_options(named).options["dont_autoretry_for"] == (OSError,)  # type: ignore[arg-type]
