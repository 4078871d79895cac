"""An interrupt strikes before the actor or after it: no job is lost, no success runs again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Interrupt, Middleware, Shutdown, shutdown

from ojs_bridge import Bridge, open_store
from ojs_bridge.adapters.presence import LOOK_SECONDS
from ojs_bridge.dramatiq import OJSRetries, consumer
from ojs_bridge.store import Settle
from tests.on_dramatiq.fleet import QUICK, Fleet, Heard, left_in
from tests.servers import Valkey, eventually


class Striking(Middleware):
    """A middleware that is interrupted the first `times` times that it hears of an outcome."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.heard: list[Any] = []

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self.heard.append(exception)
        if len(self.heard) <= self.times:
            raise Interrupt


@pytest.fixture(params=["silent", "told"])
def bridge(request: pytest.FixtureRequest) -> Bridge:
    """A bridge that begins a job only when it fails, and one that begins it before it runs."""
    return Bridge(None, QUICK, listeners=[] if request.param == "silent" else [Heard()])


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize(
    ("before", "times", "runs"),
    [
        pytest.param(True, 1, 1, id="after the bridge has heard of the success"),
        pytest.param(False, 1, 2, id="before: a failed attempt"),
        pytest.param(False, 2, 2, id="before, and again: given back"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_after_the_actor(
    stub: StubBroker,
    unique: str,
    bridge: Bridge,
    before: bool,
    times: int,
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "LATER_SECONDS", 0.1)
    fleet = Fleet(stub, unique, bridge)
    # The first actor puts OJSRetries in its place. A middleware before it hears of an outcome after it.
    actor, striking = fleet.actor(lambda n: None), Striking(times)
    stub.add_middleware(striking, **{"before" if before else "after": OJSRetries})
    job = fleet.send(actor)
    with fleet.working(threads=2):
        eventually(lambda: len(striking.heard) == runs + 1 and left_in(stub, unique) == 0)
    assert len(job.runs) == runs
    assert [type(e) for e in striking.heard] == [type(None), Interrupt, type(None)][: runs + 1]


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_a_job_whose_begin_is_interrupted_has_used_no_attempt(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is told to shut down during the store's first answer."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    reserve, interrupts = store.reservations.reserve, [Shutdown]

    def interrupted(*args: Any, **options: Any) -> Any:
        found = reserve(*args, **options)
        if interrupts and not args[0].key.startswith(("proof:", "ojs-bridge:")):
            raise interrupts.pop()
        return found

    monkeypatch.setattr(store.reservations, "reserve", interrupted)
    fleet = Fleet(broker, unique, store=store, reservation=timedelta(seconds=6))
    job = fleet.send(fleet.actor(lambda n: None, max_retries=0))
    with fleet.working(threads=1):
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 1


def test_a_worker_is_present_while_a_job_outlasts_its_stop(valkey: Valkey) -> None:
    """Else another worker would give back its message after 4 s, and without a store run it beside it."""
    broker = RedisBroker(url=valkey.url, namespace=f"t{uuid4().hex[:10]}", middleware=[])
    broker.add_middleware(OJSRetries(Bridge()))
    begun, over = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker)
    def outlasts() -> None:
        begun.set()
        over.wait()

    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=100)
    worker.start()
    outlasts.send()
    assert begun.wait(90)
    channel = f"{broker.namespace}:_ojs.worker.{broker.broker_id}"
    eventually(lambda: broker.client.pubsub_numsub(channel)[0][1] == 1, what="its presence")
    worker.stop(timeout=100)
    time.sleep(2.5 * LOOK_SECONDS)
    assert broker.client.pubsub_numsub(channel)[0][1] == 1
    over.set()


def test_an_interrupt_that_comes_late_costs_no_acknowledgement(
    valkey: Valkey, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shutdown has chosen the threads that it interrupts, and one of them ends its job meanwhile.

    Other threads settle and acknowledge what it has ended.
    """
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    settles, over = threading.Event(), threading.Event()

    def slow(usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Settle a run only when the test lets it, or the thread is interrupted."""

        def settle(order: Settle | Sequence[Settle]) -> Any:
            if not (isinstance(order, Settle) and order.reservation.key.startswith("ojs-bridge:")):
                settles.set()
                while not over.is_set():
                    time.sleep(0.005)
            return usual(order)

        return settle

    for name in ("settle", "settle_all"):
        monkeypatch.setattr(store.reservations, name, slow(getattr(store.reservations, name)))
    broker = RedisBroker(url=valkey.url, namespace=unique)
    fleet = Fleet(broker, unique, store=store)
    running, go = threading.Barrier(3), threading.Event()

    def waits(n: int) -> None:
        running.wait(90)
        go.wait(90)

    def ends_later(n: int) -> None:
        running.wait(90)
        settles.wait(90)

    jobs = [fleet.send(fleet.actor(waits, notify_shutdown=True)), fleet.send(fleet.actor(ends_later))]
    interrupt = shutdown.raise_thread_exception

    def late(*args: Any) -> None:
        go.set()
        assert settles.wait(90)
        time.sleep(0.3)  # the other job ends, too
        interrupt(*args)
        threading.Timer(0.3, over.set).start()

    monkeypatch.setattr(shutdown, "raise_thread_exception", late)
    with fleet.working(threads=2):
        running.wait(90)
    assert [len(job.runs) for job in jobs] == [1, 1]
    assert fleet.left() == 0
    assert [fleet.heard.types(job.id) for job in jobs] == [["job.started", "job.completed"]] * 2


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("raises", [True, False], ids=["failed", "succeeded"])
@pytest.mark.parametrize("policy", [{"max_attempts": 2}, {"max_attempts": 1, "on_exhaustion": "dead_letter"}])
@pytest.mark.parametrize("store", [None, "memory://"])
def test_an_interrupt_after_the_decision_was_carried_out_brings_nothing_back(
    stub: StubBroker,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    store: str | None,
    policy: dict[str, Any],
    raises: bool,
) -> None:
    """Another middleware's interrupt is one that the bridge does not know, and cannot disarm."""
    fleet = Fleet(stub, unique, store=store, retry={**QUICK, **policy})
    settling = fleet.bridge.engine.settling
    settle, struck = settling.settle, list[Any]()

    def strikes(*args: Any) -> None:
        settle(*args)
        if not struck:
            struck.append(args)
            raise Interrupt

    def ends(_: int) -> None:
        if raises:
            raise OSError("down")

    monkeypatch.setattr(settling, "settle", strikes)
    with fleet.working(threads=1):
        job = fleet.send(fleet.actor(ends))
        eventually(lambda: struck and len(job.runs) >= (policy["max_attempts"] if raises else 1))
        eventually(lambda: fleet.left() == 0 and time.sleep(0.3) is None and fleet.left() == 0)
    assert len(job.runs) == (policy["max_attempts"] if raises else 1)
