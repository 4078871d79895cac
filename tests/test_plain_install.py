"""A plain `install` changes no retries; each field of a policy changes its part."""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from statistics import fmean, quantiles
from threading import local
from types import new_class
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import dramatiq
import pytest
from celery import Celery, Task
from celery.exceptions import Retry
from dramatiq.broker import MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import Retry as DramatiqsRetry
from dramatiq.middleware import Callbacks, Middleware, Pipelines, Retries

from ojs_bridge import Bridge, RetryPolicy
from ojs_bridge.celery import OJSTask, install
from ojs_bridge.celery.installation import is_bridged, task_policy
from ojs_bridge.celery.worker import check_app
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.dramatiq import install as install_dramatiq
from ojs_bridge.engine.layers import TaskPolicy, with_ojs_jitter
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from tests.contract.steps import Step, an, raises, retries
from tests.on_celery.by_hand import ByHand
from tests.on_celery.fleet import worker_here
from tests.servers import eventually

T = TypeVar("T")
AUTO = {
    "autoretry_for": (OSError,),
    "dont_autoretry_for": (FileNotFoundError,),
    "retry_kwargs": {"max_retries": 2, "countdown": 0},
}
#: task options, what its runs do -> runs, natively and under a plain install
CELERY: list[tuple[dict[str, Any], list[Step], int]] = [
    ({}, [raises(OSError)], 1),
    ({}, [retries(countdown=0)], 4),
    ({}, [retries(exc=an(KeyError, "k"), countdown=0)], 4),
    ({}, [retries(countdown=0, max_retries=1)], 2),
    ({}, [retries(countdown=0, max_retries=5)], 6),
    ({}, [retries(countdown=0), raises(KeyError, "sold out")], 2),
    ({"max_retries": 0}, [retries(countdown=0)], 1),
    ({"max_retries": 1, "default_retry_delay": 0}, [retries()], 2),
    ({"max_retries": None}, [retries(countdown=0)] * 6 + ["ok"], 7),
    ({"throws": (OSError,)}, [retries(exc=an(OSError), countdown=0)], 4),
    (AUTO, [raises(OSError)], 3),
    (AUTO, [raises(FileNotFoundError)], 1),
    (AUTO, [raises(KeyError, "sold out")], 1),
    (AUTO, [retries(countdown=0), raises(KeyError, "k")], 2),
    ({"acks_late": False}, [raises(OSError)], 1),
    ({"max_retries": 1.5}, [retries(countdown=0)], 2),
    ({"max_retries": Decimal(2)}, [retries(countdown=0)], 3),
    ({"max_retries": True}, [retries(countdown=0)], 2),
    ({"max_retries": float("nan")}, [retries(countdown=0)] * 5 + ["ok"], 6),
    ({"default_retry_delay": None}, [retries()], 4),
    ({"default_retry_delay": ""}, [retries()], 4),
    ({**AUTO, "autoretry_for": [OSError]}, [raises(OSError)], 3),
    ({**AUTO, "autoretry_for": {OSError}, "dont_autoretry_for": []}, [raises(OSError)], 3),
    ({**AUTO, "retry_backoff": "0.5", "retry_backoff_max": "0", "retry_jitter": "no"}, [raises(OSError)], 3),
    (
        {**AUTO, "retry_backoff": Decimal(1), "retry_backoff_max": 0.9, "retry_jitter": None},
        [raises(OSError)],
        3,
    ),
]
#: options that cannot be read, what its runs do -> runs: the task stays native
UNREADABLE: list[tuple[dict[str, Any], list[Step], int]] = [
    ({"max_retries": "3"}, [retries(countdown=0)], 1),
    ({"max_retries": "3"}, ["ok"], 1),
    ({"max_retries": timedelta(3)}, [retries(countdown=0)], 1),
    ({"default_retry_delay": "1"}, [retries(countdown=0)], 4),
    ({"default_retry_delay": "1"}, [retries()], 1),
    ({"default_retry_delay": timedelta(seconds=1)}, [retries(countdown=0)], 4),
    ({"default_retry_delay": Decimal(1)}, [retries(countdown=0)], 4),
    ({"default_retry_delay": float("inf")}, [retries(countdown=0)], 4),
    ({**AUTO, "autoretry_for": "OSError"}, [raises(OSError)], 1),
    ({**AUTO, "autoretry_for": ["OSError"]}, [raises(OSError)], 1),
    ({**AUTO, "autoretry_for": ((OSError, KeyError),)}, [raises(OSError)], 1),
    ({**AUTO, "dont_autoretry_for": "KeyError"}, [raises(OSError)], 1),
    ({**AUTO, "retry_kwargs": None}, [raises(OSError)], 1),
    ({**AUTO, "retry_kwargs": "max_retries"}, [raises(OSError)], 1),
    ({**AUTO, "retry_kwargs": {"max_retries": "3"}}, [raises(OSError)], 1),
    ({**AUTO, "retry_kwargs": {"countdown": "1"}}, [raises(OSError)], 1),
    ({**AUTO, "retry_backoff": float("inf")}, [raises(OSError)], 1),
]


def natively(app: Celery) -> None:
    """Install nothing."""


def plainly(app: Celery) -> None:
    """Install a bridge without a policy."""
    install(app, Bridge())


@pytest.mark.parametrize(("options", "steps", "runs"), CELERY)
def test_celery_tasks_run_as_often_and_end_alike(
    options: dict[str, Any], steps: list[Step], runs: int, unique: str
) -> None:
    """A task gets the retries that it asks for natively, and no others."""
    found = []
    for installing in (natively, plainly):
        hand = ByHand(f"{unique}-{installing.__name__}", installing)
        hand.define("charge", **options)
        job = hand.send("charge", *steps)
        hand.deliver_all()
        found.append((len(hand.runs(job)), hand.state(job)))
    assert found[0] == found[1]
    assert found[1][0] == runs


@pytest.mark.parametrize(("options", "steps", "runs"), UNREADABLE)
def test_a_celery_task_with_options_that_cannot_be_read_stays_native(
    options: dict[str, Any], steps: list[Step], runs: int, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the policies say; the log names it, and the tasks beside it are taken over."""
    found = []
    for installing in (
        natively,
        plainly,
        lambda app: install(app, Bridge(), policies={"*": {"jitter": False}}),
    ):
        hand = ByHand(f"{unique}-{len(found)}", installing)
        task = hand.define("charge", **options)
        beside = hand.define("beside")
        assert (is_bridged(task), is_bridged(beside)) == (False, installing is not natively)
        check_app(hand.app)
        job = hand.send("charge", *steps)
        hand.deliver_all()
        found.append((len(hand.runs(job)), hand.state(job)))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == runs
    said = [r for r in caplog.records if r.getMessage().startswith("task charge stays native: ")]
    assert len(said) >= 2


@pytest.mark.parametrize("late", [False, True], ids=["as it is declared", "later"])
def test_a_worker_starts_beside_an_option_that_cannot_be_read(
    late: bool, valkey_url: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery(unique, broker=valkey_url, set_as_current=False)
    app.conf.update(task_default_queue=unique, worker_hijack_root_logger=False)
    install(app, Bridge())
    ran: list[str] = []

    @app.task(shared=False, name="odd", bind=True, **({} if late else {"max_retries": "3"}))
    def odd(task: Any) -> None:
        ran.append("odd")
        task.retry(countdown=0.01)

    @app.task(shared=False, name="beside")
    def beside() -> None:
        ran.append("beside")

    odd.max_retries = "3"
    with worker_here(app, pool="solo"):
        odd.delay()
        beside.delay()
        eventually(lambda: len(ran) == 2)
    assert ran == ["odd", "beside"]
    assert not is_bridged(app.tasks["odd"])
    assert "task odd stays native: max_retries='3' is no number" in caplog.text


def test_an_option_that_a_run_makes_unreadable_changes_no_retries(
    unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    hand = ByHand(unique, plainly)
    task = hand.define("charge", max_retries=1, default_retry_delay=0)
    for _ in range(2):
        job = hand.send("charge", retries())
        hand.deliver_all()
        assert len(hand.runs(job)) == 2
        task.max_retries = "many"
    assert caplog.text.count("task charge: its retries stay as they were: ('many', 0)") == 1


class Slotless:
    __slots__ = ()

    def told(self) -> str:
        return "slotless"


class WithDictionary:
    __slots__ = ("__dict__",)


class WithWeakReference:
    __slots__ = ("__weakref__",)


class WithSlot:
    __slots__ = ("slot",)


class Plain:
    """A base without slots."""


class Abstract(ABC):
    """An abstract base without slots."""

    @abstractmethod
    def run(self) -> None: ...


class Of(Generic[T]):
    """A generic base without slots."""


class Keyword:
    def __init_subclass__(cls, *, queue: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        subclasses.append(cls.__name__)


class Speaking(Protocol):
    def told(self) -> str: ...


class Metaclass(type):
    """A metaclass of a user's."""


class OfMetaclass(metaclass=Metaclass):
    __slots__ = ()


subclasses: list[str] = []
BASES: list[tuple[Any, ...]] = [
    (ABC,), (Abstract,), (Generic[T],), (Of[int],), (Speaking,), (Slotless,), (WithDictionary,),
    (WithWeakReference,), (WithSlot,), (Plain,), (Keyword,), (OfMetaclass,), (local,), (Exception,),
    (Slotless, ABC), (Plain, Slotless), (ABC, Generic[T]), (Slotless, WithSlot),
]  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("bases", BASES, ids=lambda bases: "-".join(b.__name__ for b in bases))
def test_a_task_class_of_any_layout_is_taken_over(bases: tuple[Any, ...], first: bool, unique: str) -> None:
    """Its methods come first, as before, and `super()` leads to Celery's through the bridge's."""

    def own(space: dict[str, Any]) -> None:
        def on_retry(task: Any, exc: Any, job: str, *rest: Any) -> None:
            heard.append(("on_retry", type(exc)))
            super(Own, task).on_retry(exc, job, *rest)

        def retry(task: Any, *args: Any, **options: Any) -> Any:
            if task.name == "charge":
                heard.append(("retry", task.request.retries))
            return super(Own, task).retry(*args, **options)

        space.update(abstract=True, on_retry=on_retry, retry=retry)

    found: list[Any] = []
    for installing in (natively, plainly):
        heard: list[Any] = []
        subclasses.clear()
        Own = new_class("Own", (*bases, Task) if first else (Task, *bases), exec_body=own)  # noqa: N806
        hand = ByHand(f"{unique}-{installing.__name__}", installing)
        task = hand.define("charge", base=Own, max_retries=2, default_retry_delay=0)
        hand.define("auto", base=Own, **AUTO)
        assert isinstance(task, Own)
        assert is_bridged(task) == (installing is plainly)
        for name, step in (("charge", retries()), ("auto", raises(OSError))):
            job = hand.send(name, step)
            hand.deliver_all()
            found.append((hand.runs(job), hand.state(job)))
        found.append((heard, list(subclasses)))
    assert found[:3] == found[3:]
    assert len(found[0][0]) == 3


def test_autoretry_for_that_is_set_too_late_does_nothing_as_natively(unique: str) -> None:
    """Celery reads the option once, when a task is declared."""
    hand = ByHand(unique, plainly)
    task = hand.define("charge", max_retries=2, default_retry_delay=0)
    task.autoretry_for = (OSError,)
    job = hand.send("charge", raises(OSError))
    hand.deliver_all()
    assert len(hand.runs(job)) == 1


@pytest.mark.parametrize(("late", "runs"), [(False, 0), (True, 1)])
def test_a_child_that_dies_is_a_lost_attempt_where_the_broker_has_the_message(
    late: bool, runs: int, unique: str
) -> None:
    """A task that is never retried is safe from crashes, too; an at-most-once task does not run again."""
    hand = ByHand(unique, lambda app: install(app, Bridge(retry={"initial_interval": "PT0.001S"})))
    hand.define("charge", acks_late=late)
    job = hand.send("charge", "ok", headers={"dies": "killed"})
    assert hand.deliver()
    message = hand.take()
    assert (message is not None) == bool(runs)
    assert hand.state(job)[0] == ("RETRY" if runs else "FAILURE")


def fails() -> None:
    raise OSError("down")


def hints() -> None:
    raise DramatiqsRetry("later", delay=1)


class Untrue:
    """A value that is neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def raises_in_retry_when(retries: int, error: BaseException) -> bool:
    raise ZeroDivisionError(retries)


def exits_in_retry_when(retries: int, error: BaseException) -> bool:
    raise SystemExit(3)


def often(retries: int, error: BaseException) -> bool:
    return retries < 3


#: what the stock Retries is given, an actor's options, a message's options, the actor -> runs
STOCK = {"max_retries": 2, "min_backoff": 1, "max_backoff": 2}
DRAMATIQ: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], Callable[[], None], int]] = [
    (STOCK, {}, {}, fails, 3),
    (STOCK, {"max_retries": 0}, {}, fails, 1),
    (STOCK, {"max_retries": 1}, {}, fails, 2),
    (STOCK, {"max_retries": 1.5}, {}, fails, 3),
    (STOCK, {"max_retries": True}, {}, fails, 2),
    (STOCK, {"min_backoff": -5, "max_backoff": -5}, {}, fails, 3),
    (STOCK, {}, {"max_retries": 3}, fails, 4),
    (STOCK, {}, {"max_retries": 0.5}, fails, 2),
    (STOCK, {"throws": OSError}, {}, fails, 1),
    (STOCK, {"throws": OSError | KeyError}, {}, fails, 1),
    (STOCK, {"throws": ((OSError,), KeyError)}, {}, fails, 1),
    (STOCK, {"throws": OSError, "retry_when": raises_in_retry_when}, {}, fails, 1),
    (STOCK, {"retry_when": lambda n, _: n < 4}, {}, fails, 5),
    (STOCK, {"retry_when": often, "max_retries": 0}, {}, fails, 4),
    (STOCK, {"retry_when": often}, {"max_retries": 0}, fails, 4),
    (STOCK, {"retry_when": often, "max_retries": 9}, {"max_retries": 1}, fails, 4),
    (STOCK, {"retry_when": often}, {"max_retries": None}, fails, 4),
    (STOCK, {"retry_when": often}, {"retries": 1}, fails, 3),
    (STOCK, {}, {"retry_when": True}, fails, 3),
    ({**STOCK, "retry_when": often}, {}, {}, fails, 4),
    ({**STOCK, "retry_when": often}, {"max_retries": 1}, {}, fails, 4),
    ({**STOCK, "retry_when": often}, {}, {"max_retries": 0}, fails, 4),
    ({**STOCK, "retry_when": often}, {"retry_when": None}, {}, fails, 3),
    ({**STOCK, "retry_when": often}, {"retry_when": None}, {"max_retries": 1}, fails, 2),
    ({**STOCK, "retry_when": raises_in_retry_when}, {"retry_when": often}, {}, fails, 4),
    (STOCK, {}, {}, hints, 3),
]
#: the same, for a `retry_when` that gives no answer
WITHOUT_AN_ANSWER: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (STOCK, {"retry_when": raises_in_retry_when}, {}),
    (STOCK, {"retry_when": raises_in_retry_when}, {"max_retries": 3}),
    (STOCK, {"retry_when": exits_in_retry_when}, {}),
    (STOCK, {"retry_when": lambda n: n < 3}, {}),
    (STOCK, {"retry_when": lambda *_: Untrue()}, {}),
    (STOCK, {"retry_when": "often"}, {}),
    (STOCK, {"retry_when": False}, {}),
    ({**STOCK, "retry_when": raises_in_retry_when}, {}, {}),
]


class Told:
    """What an actor's runs are, and what its callbacks, its pipeline and its dead letters hear of them."""

    def __init__(
        self, queue: str, stock: dict[str, Any], bridge: Bridge | None, policies: Any = None
    ) -> None:
        self.broker = StubBroker(middleware=[Callbacks(), Pipelines(), Retries(**stock)])
        if bridge is not None:
            install_dramatiq(self.broker, bridge, policies=policies)
        self._queue = queue
        self.runs = 0
        self.failures: list[Any] = []
        self.heirs: list[Any] = []
        self.followed: list[Any] = []
        self._act("failed", lambda message, error: self.failures.append((_kept(message), error)))
        self._act("heir", lambda message, counts: self.heirs.append((_kept(message), counts)))
        self._act("next", lambda *args: self.followed.append(args))

    def _act(self, name: str, function: Callable[..., Any], **options: Any) -> dramatiq.Actor[..., Any]:
        settings = {"actor_name": name, "queue_name": self._queue, "on_failure": None, **options}
        return dramatiq.actor(function, broker=self.broker, **settings)

    def run(self, act: Callable[[], None], options: dict[str, Any], sent: dict[str, Any]) -> None:
        """Run an actor in a pipeline, until the broker has no message any more."""

        def run() -> None:
            self.runs += 1
            act()

        actor = self._act("charge", run, on_failure="failed", on_retry_exhausted="heir", **options)
        steps = [actor.message_with_options(**sent), self.broker.get_actor("next").message()]
        dramatiq.pipeline(steps, broker=self.broker).run()
        worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=3)
        worker.start()
        self.broker.join(self._queue, timeout=30_000, fail_fast=False)
        worker.join()
        worker.stop()

    @property
    def all(self) -> Any:
        """All of it; the order in which callbacks run is left to chance."""
        dead = [(m.actor_name, m.failed, _kept(m.asdict())) for m in self.broker.dead_letters]
        return self.runs, sorted(self.failures, key=str), self.heirs, self.followed, dead


def _kept(message: Any) -> Any:
    """Return the number of a message's retries, and whether it has a traceback."""
    return message["options"].get("retries"), "traceback" in message["options"]


@pytest.mark.parametrize("store", [None, "memory://"])
@pytest.mark.parametrize(("stock", "options", "sent", "act", "runs"), DRAMATIQ)
def test_dramatiq_actors_run_as_often_and_end_alike(
    stock: dict[str, Any],
    options: dict[str, Any],
    sent: dict[str, Any],
    act: Callable[[], None],
    runs: int,
    store: str | None,
    unique: str,
) -> None:
    """The settings of the replaced `Retries` count; callbacks and dead letters are as before."""
    found = []
    for bridge in (None, Bridge(store=store)):
        told = Told(unique, stock, bridge)
        told.run(act, options, sent)
        found.append(told.all)
    assert found[0] == found[1]
    assert found[0][0] == runs


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "policies", [None, {"*": {"on_exhaustion": "dead_letter", "jitter": False}}], ids=str
)
@pytest.mark.parametrize(("stock", "options", "sent"), WITHOUT_AN_ANSWER)
def test_a_retry_when_without_an_answer_ends_the_job_after_one_run(
    stock: dict[str, Any], options: dict[str, Any], sent: dict[str, Any], policies: Any, unique: str
) -> None:
    """Dramatiq alone loses such a job; under the bridge its dead letter says why."""
    native = Told(unique, stock, None)
    native.run(fails, options, sent)
    assert (native.runs, native.broker.dead_letters) == (1, [])
    bridge = Bridge(store="memory://")
    told = Told(unique, stock, bridge, policies)
    told.run(fails, options, sent)
    assert (told.runs, [error["type"] for _, error in told.failures], told.heirs) == (1, ["OSError"], [])
    (letter,) = bridge.dead_letters.list().letters
    assert "the actor's retry_when failed with" in letter.reason


def test_a_broker_that_never_retries_still_does_not(unique: str) -> None:
    """`install` brings no retries; OJSRetries among the middleware does."""
    for put, runs in ((install_dramatiq, 1), (lambda b, bridge: b.add_middleware(OJSRetries(bridge)), 3)):
        broker = StubBroker(middleware=[])
        put(broker, Bridge())
        actor = dramatiq.actor(fails, broker=broker, actor_name="charge", queue_name=unique)
        (retries,) = broker.middleware
        assert retries.actors.tasks[actor.actor_name].policy.max_attempts == runs


def test_on_such_a_broker_an_actor_that_no_policy_names_is_never_retried(unique: str) -> None:
    ran: list[int] = []
    broker = StubBroker(middleware=[])
    install_dramatiq(broker, Bridge(), policies={"heir": {}})
    dramatiq.actor(fails, broker=broker, actor_name="heir", queue_name=unique)

    def run() -> None:
        ran.append(1)
        raise OSError("down")

    dramatiq.actor(run, broker=broker, actor_name="charge", queue_name=unique).send()
    worker = dramatiq.Worker(broker, worker_timeout=20)
    worker.start()
    # A retry would be in the delayed queue, which is joined, too.
    broker.join(unique, timeout=10_000)
    worker.stop()
    assert ran == [1]


class Options(Middleware):
    """A middleware that lets actors have the options of the stock Retries."""

    actor_options: ClassVar[set[str]] = {"max_retries", "min_backoff", "retry_when", "on_retry_exhausted"}


@pytest.mark.parametrize("sent", [{}, {"max_retries": 3}], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"max_retries": 3}, {"max_retries": None, "min_backoff": 1}, {"retry_when": lambda n, _: n < 4},
     {"max_retries": 2, "on_retry_exhausted": "heir"}],
    ids="-".join,
)  # fmt: skip
def test_options_that_no_retries_reads_say_nothing(
    options: dict[str, Any], sent: dict[str, Any], unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a broker without Retries a job runs once, whatever its actor or its message says."""
    for installed in (False, True):
        broker = StubBroker(middleware=[Options()])
        if installed:
            install_dramatiq(broker, Bridge())
        ran: list[str] = []

        def run(ran: list[str] = ran) -> None:
            ran.append("ran")
            raise OSError("down")

        def heir(*_: Any, ran: list[str] = ran) -> None:
            ran.append("heir")

        actor = dramatiq.actor(run, broker=broker, actor_name="charge", queue_name=unique, **options)
        dramatiq.actor(heir, broker=broker, actor_name="heir", queue_name=unique)
        if not installed:
            told = {hazard.name: hazard.text for hazard in of_dramatiq(broker, ["charge"])[0].hazards}
            assert ", ".join(sorted(options)) in told["unused-retry-options"]
        actor.send_with_options(**sent)
        worker = dramatiq.Worker(broker, worker_timeout=20)
        worker.start()
        broker.join(unique, timeout=30_000, fail_fast=False)
        worker.join()
        worker.stop()
        assert ran == ["ran"]
    assert f"actor charge: {', '.join(sorted(options))} is not read, as before" in caplog.text


#: The draws for each wait, the retries whose waits are drawn, and entries that say nothing of waits.
DRAWS = 500
RETRIES = (1, 3, 6)
ENTRIES: list[Any] = [None, {"on_exhaustion": "dead_letter"}, {"retry_on": "failure"}]


def check_alike(native: Sequence[float], policy: RetryPolicy, n: int, *, cut: float) -> None:
    """Compare a framework's waits to those of a policy, by their ends, their mean and their twentieths.

    The framework cuts a wait to whole numbers of `cut` seconds.
    """
    bridged = [policy.delay(n) for _ in range(DRAWS)]
    near = 0.06 * max(native) + 1.5 * cut
    assert len(native) == DRAWS
    assert with_ojs_jitter(policy).to_ojs()["jitter"] == (policy.jitter is not False)
    assert fmean(bridged) == pytest.approx(fmean(native), abs=0.05 * max(native) + cut / 2), n
    for find in (min, max, lambda waits: quantiles(waits, n=20)):
        assert find(bridged) == pytest.approx(find(native), abs=near + 0.04 * max(native)), n


BACKOFF = {"autoretry_for": (OSError,), "max_retries": 6}
CELERY_WAITS: list[dict[str, Any]] = [
    BACKOFF,
    {**BACKOFF, "default_retry_delay": 7},
    {**BACKOFF, "default_retry_delay": 0.25},
    {**BACKOFF, "retry_kwargs": {"countdown": 9}},
    {**BACKOFF, "retry_backoff": True},
    {**BACKOFF, "retry_backoff": True, "retry_jitter": False},
    {**BACKOFF, "retry_backoff": True, "retry_backoff_max": 5},
    {**BACKOFF, "retry_backoff": 60, "retry_backoff_max": 600},
    {**BACKOFF, "retry_backoff": 60, "retry_backoff_max": 600, "retry_jitter": False},
    {**BACKOFF, "retry_backoff": 60, "retry_backoff_max": 60},
    {**BACKOFF, "retry_backoff": 60, "retry_backoff_max": 10},
    {**BACKOFF, "retry_backoff": 2.9, "retry_kwargs": {"countdown": 9}},
    {**BACKOFF, "retry_backoff": 0.5, "retry_backoff_max": 0},
]


@pytest.fixture
def same_draws() -> Iterator[None]:
    """Have chance draw the same numbers each time, and nothing logged."""
    logging.disable(logging.CRITICAL)
    random.seed(30)
    yield
    random.seed()
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize("options", CELERY_WAITS, ids=str)
def test_celery_draws_each_wait_as_before(options: dict[str, Any], unique: str) -> None:
    """Celery's own waits, and those of the policy that `install` makes of the task's options."""
    native: list[float] = []

    class Noting(Task):
        abstract = True

        def retry(self, *_: Any, countdown: float | None = None, **__: Any) -> Retry:
            native.append(self.default_retry_delay if countdown is None else countdown)
            return Retry()

    hand = ByHand(f"{unique}-natively", natively)
    task = hand.define("charge", base=Noting, **options)
    entries = [*ENTRIES, {"max_attempts": 7}]
    policies = [
        celery_policy(Bridge(), entry and {"c*": entry}, f"{unique}-{k}", **options).policy
        for k, entry in enumerate(entries)
    ]
    for n in RETRIES:
        native.clear()
        task.push_request(retries=n - 1)
        for _ in range(DRAWS):
            with pytest.raises(Retry):
                task.run(raises(OSError))
        task.pop_request()
        for policy in policies:
            check_alike(native, policy, n, cut=1)


class Recording(StubBroker):
    """A broker that notes the delays of what is sent to it."""

    delays: ClassVar[list[int]] = []

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        self.delays.append(delay or 0)
        return message


#: what the stock Retries is given, an actor's options, a message's options
DRAMATIQ_WAITS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"min_backoff": 500, "max_backoff": 6000}, {}, {}),
    ({"min_backoff": 500, "max_backoff": 6000}, {"min_backoff": 2000}, {}),
    ({"min_backoff": 500, "max_backoff": 6000}, {"max_backoff": 700}, {}),
    ({"min_backoff": 500}, {"min_backoff": 3000, "max_backoff": 5000}, {}),
    ({}, {"min_backoff": 5000, "max_backoff": 300}, {}),
    ({}, {"max_backoff": 40_000}, {}),
    ({}, {"min_backoff": 1}, {}),
    ({}, {"max_backoff": 40_000}, {"min_backoff": 4000}),
    ({}, {"min_backoff": 4000}, {"max_backoff": 40_000}),
    ({"min_backoff": 500, "max_backoff": 6000}, {}, {"min_backoff": 1000}),
    ({"min_backoff": 500, "max_backoff": 6000}, {}, {"max_backoff": 900}),
    ({}, {}, {"min_backoff": 60_000, "max_backoff": 600_000}),
    ({}, {}, {"max_retries": 9}),
]


@pytest.mark.usefixtures("same_draws")
@pytest.mark.parametrize(("stock", "options", "sent"), DRAMATIQ_WAITS)
def test_dramatiq_draws_each_wait_as_before(
    stock: dict[str, Any], options: dict[str, Any], sent: dict[str, Any], unique: str
) -> None:
    """The waits of the stock Retries, and those of the policy that `install` makes of all options."""
    broker = Recording(middleware=[retries := Retries(**stock)])
    actor = dramatiq.actor(fails, broker=broker, actor_name="charge", queue_name=unique, **options)
    policies = []
    for entry in ENTRIES:
        other = StubBroker(middleware=[Retries(**stock)])
        actors = install_dramatiq(other, Bridge(), policies=entry and {"c*": entry}).actors
        dramatiq.actor(fails, broker=other, actor_name="charge", queue_name=unique, **options)
        task = actors.tasks["charge"]
        assert task is not None
        policies.append(actors.of_message(task, actor.message_with_options(**sent)).policy)
    for n in RETRIES:
        broker.delays.clear()
        for _ in range(DRAWS):
            message = MessageProxy(actor.message_with_options(retries=n - 1, **sent))
            retries.after_process_message(broker, message, exception=OSError())
        native = [delay / 1000 for delay in broker.delays]
        for policy in policies:
            check_alike(native, policy, n, cut=0.001)


#: what the bridge is given, a policy that names the task -> rule, max_attempts, seconds before retry 1
SPOKEN: list[tuple[dict[str, Any] | None, dict[str, Any] | None, str, int, float]] = [
    (None, None, "asked", 4, 180),
    (None, {}, "asked", 4, 180),
    (None, {"on_exhaustion": "dead_letter"}, "asked", 4, 180),
    ({"on_exhaustion": "dead_letter"}, None, "asked", 4, 180),
    (None, {"initial_interval": "PT10M", "max_interval": "PT1H"}, "asked", 4, 600),
    (None, {"max_attempts": 5}, "failure", 5, 1),
    ({"max_attempts": 5}, None, "failure", 5, 1),
    ({"max_attempts": 5}, {"max_interval": "PT9M"}, "failure", 5, 1),
    (None, {"max_attempts": 5, "retry_on": "asked"}, "asked", 5, 1),
    (None, {"retry_on": "failure"}, "failure", 4, 180),
    ({"max_attempts": 5}, {"retry_on": "asked"}, "asked", 5, 1),
]


def told(task: TaskPolicy, error: BaseException) -> tuple[str, int, float]:
    """Return a rule, max_attempts, and the seconds before retry 1."""
    rule = "asked" if task.layers.retries.rules_out(error) else "failure"
    waits = task.policy.initial_interval / timedelta(seconds=1)
    return rule, task.policy.max_attempts, waits


def celery_policy(bridge: Bridge, policies: Any, unique: str, **options: Any) -> TaskPolicy:
    """Return the policy of a task."""
    hand = ByHand(unique, lambda app: install(app, bridge, policies=policies))
    return task_policy(hand.app, hand.define("charge", **options))


@pytest.mark.parametrize(("retry", "entry", "rule", "attempts", "wait"), SPOKEN)
def test_who_says_max_attempts_asks_for_retries(
    retry: Any, entry: Any, rule: str, attempts: int, wait: float, unique: str
) -> None:
    """Fields that are left out have the spec's default; any other field shapes the retries that are there."""
    policies = None if entry is None else {"c*": entry}
    task = celery_policy(Bridge(retry=retry), policies, unique)
    assert told(task, OSError()) == (rule, attempts, wait)
    auto = celery_policy(Bridge(retry=retry), policies, unique, autoretry_for=(KeyError,))
    named = None if entry is None else entry.get("retry_on")
    assert bool(auto.layers.retries.rules_out(OSError())) == (named != "failure")
    own = celery_policy(Bridge(retry=retry), None, unique, base=OJSTask)
    assert told(own, OSError()) == ("failure", (retry or {}).get("max_attempts", 3), 1)


#: what the bridge is given, a policy that names the actor, its own -> max_attempts, seconds, what it ends as
HEARD: list[tuple[Any, Any, Any, int, float, str]] = [
    (None, None, None, 21, 15, "dead_letter"),
    (None, {"on_exhaustion": "discard"}, None, 21, 15, "discard"),
    (None, {"jitter": True}, None, 21, 1, "dead_letter"),
    (None, {"max_attempts": 5}, None, 5, 1, "dead_letter"),
    ({"max_attempts": 5}, None, None, 5, 1, "dead_letter"),
    (None, {"retry_on": "asked"}, None, 21, 15, "dead_letter"),
    (None, None, {}, 3, 1, "discard"),
    (None, None, {"max_attempts": 5}, 5, 1, "discard"),
]


@pytest.mark.parametrize(("retry", "entry", "own", "attempts", "wait", "end"), HEARD)
def test_who_speaks_is_heard_on_dramatiq(
    retry: Any, entry: Any, own: Any, attempts: int, wait: float, end: str, unique: str
) -> None:
    """The rules are those of Celery; Dramatiq itself keeps its dead messages."""
    broker = StubBroker()
    middleware = install_dramatiq(
        broker, Bridge(retry=retry), policies=None if entry is None else {"c*": entry}
    )
    options = {} if own is None else {"ojs_retry": own}
    dramatiq.actor(fails, broker=broker, actor_name="charge", queue_name=unique, **options)
    task = middleware.actors.tasks["charge"]
    assert task is not None
    asked = "asked" if entry and entry.get("retry_on") else "failure"
    assert told(task, OSError()) == (asked, attempts, wait)
    assert task.policy.on_exhaustion == end


@pytest.mark.parametrize(("retry", "runs"), [({"max_attempts": 3}, 3), ({"on_exhaustion": "dead_letter"}, 1)])
def test_a_job_may_ask_for_retries_too(retry: dict[str, Any], runs: int, unique: str) -> None:
    """A producer sets `max_attempts`; the waits are the task's."""
    hand = ByHand(unique, plainly)
    hand.define("charge", default_retry_delay=0)
    job = hand.send("charge", raises(OSError), ojs_retry=retry)
    hand.deliver_all()
    assert len(hand.runs(job)) == runs
