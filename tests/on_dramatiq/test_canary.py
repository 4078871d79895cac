"""A part of the jobs under the bridge, the rest native, and both ways from one to the other."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Retries, Shutdown
from dramatiq.results import ResultFailure, Results
from dramatiq.results.backends import StubBackend

from ojs_bridge import Bridge, ConfigurationError, DeadLetter
from ojs_bridge.adapters.terms import Canary
from ojs_bridge.dramatiq import OJSRetries, install
from ojs_bridge.rules.job import format_time
from tests.on_dramatiq.fleet import QUICK, dead_messages
from tests.servers import eventually

#: Options of the stock middleware: its three runs differ from the bridge's five.
STOCK = {"max_retries": 2, "min_backoff": 1, "max_backoff": 1}


class Ledger:
    """The actors' notes: the options of each run, by job id."""

    def __init__(self, broker: dramatiq.Broker, queue: str) -> None:
        self.broker, self.queue = broker, queue
        self.runs: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.at: list[float] = []

    def actor(self, name: str, fails: int = 1000, **options: Any) -> dramatiq.Actor[..., Any]:
        """Declare an actor that fails so many times."""

        def run(*, raising: str = "") -> None:
            message = CurrentMessage.get_current_message()
            assert message is not None
            self.at.append(time.time())
            self.runs[message.message_id].append(dict(message.options))
            if raising == "forgetful":
                message.options.pop("ojs", None)
            if raising == "dead":
                raise DeadLetter("a.b")
            if len(self.runs[message.message_id]) <= fails:
                raise OSError("down")

        return dramatiq.actor(run, broker=self.broker, actor_name=name, queue_name=self.queue, **options)

    def counters(self, job_id: str) -> list[int]:
        """The native counter at each run of a job."""
        return [options.get("retries", 0) for options in self.runs[job_id]]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run a worker until all is done."""
        worker = dramatiq.Worker(self.broker, worker_timeout=10, worker_threads=16)
        worker.start()
        try:
            yield
            self.broker.join(self.queue, timeout=30_000, fail_fast=False)  # type: ignore[call-arg]
        finally:
            worker.stop()

    @property
    def dead(self) -> set[str]:
        """The jobs in the broker's dead queue."""
        return {message.message_id for message in dead_messages(self.broker, self.queue)}


@pytest.fixture
def ledger(unique: str) -> Ledger:
    """A broker whose stock retries are set, and what its jobs write down."""
    broker = StubBroker()
    broker.middleware = [Retries(**STOCK) if isinstance(m, Retries) else m for m in broker.middleware]
    broker.add_middleware(CurrentMessage())
    return Ledger(broker, unique)


def bridge(store: Path | None = None, **options: Any) -> Bridge:
    """A bridge whose jobs run five times."""
    url = f"sqlite:///{store}/ojs.db" if store else None
    return Bridge(url, {**QUICK, "initial_interval": "PT0.01S", "max_attempts": 5}, **options)


def test_a_percentage_of_the_jobs(ledger: Ledger, tmp_path: Path) -> None:
    """The others end as they always did: natively, with their last state in the dead queue."""
    keeping = {**QUICK, "initial_interval": "PT0.01S", "max_attempts": 5, "on_exhaustion": "dead_letter"}
    kept = Bridge(f"sqlite:///{tmp_path}/ojs.db", keeping)
    install(ledger.broker, kept, canary=40)
    actor = ledger.actor("charge")
    jobs = [actor.send().message_id for _ in range(40)]
    ours = {job for job in jobs if Canary(40).covers("charge", job)}
    with ledger.working():
        pass
    assert 0 < len(ours) < 40
    for job in jobs:
        assert ledger.counters(job) == ([0, 1, 2, 3, 4] if job in ours else [0, 1, 2]), job
        assert all(("ojs" in options) is (job in ours) for options in ledger.runs[job][1:])
    assert ledger.dead == set(jobs) - ours
    assert {letter.id for letter in kept.dead_letters.list().letters} == ours


@pytest.mark.parametrize(("canary", "runs"), [(0, 3), (50, 3), (100, 5)])
def test_a_job_whose_id_is_a_number_is_not_lost(ledger: Ledger, canary: float, runs: int) -> None:
    """JSON allows such an id to producers without Dramatiq."""
    install(ledger.broker, bridge(), canary=canary)
    message = ledger.actor("charge").message()
    ledger.broker.enqueue(replace(message, message_id=5))  # type: ignore[arg-type]
    with ledger.working():
        pass
    assert [len(found) for found in ledger.runs.values()] == [runs]


def test_by_pattern(ledger: Ledger) -> None:
    """A name that no pattern matches stays native."""
    install(ledger.broker, bridge(), canary={"billing.*": 100, "billing.old": 0})
    jobs = {name: ledger.actor(name).send().message_id for name in ("billing.new", "billing.old", "mail")}
    with ledger.working():
        pass
    assert {name: len(ledger.runs[job]) for name, job in jobs.items()} == {
        "billing.new": 5, "billing.old": 3, "mail": 3}  # fmt: skip


def test_from_the_environment(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary comes from the environment when `install` gets none."""
    monkeypatch.setenv("OJS_BRIDGE_CANARY", '{"new": 100}')
    install(ledger.broker, bridge())
    jobs = [ledger.actor(name).send().message_id for name in ("new", "old")]
    with ledger.working():
        pass
    assert [len(ledger.runs[job]) for job in jobs] == [5, 3]


def test_an_actor_or_a_job_with_its_own_policy_is_always_under_the_bridge(ledger: Ledger) -> None:
    """A policy sent before `install` counts, and so does an unreadable header; native options do not."""
    plain = ledger.actor("plain")
    unread = plain.send_with_options(ojs_retry={"max_attempts": 4}).message_id
    install(ledger.broker, bridge(), canary=0)
    own = ledger.actor("own", ojs_retry={"max_attempts": 4})
    jobs = [own.send().message_id, plain.send_with_options(ojs_retry={"max_attempts": 4}).message_id, unread]
    header = {"v": 1, "attempt": 2}
    native = plain.send_with_options(max_retries=1, retries=1, ojs=header).message_id
    unreadable = plain.send_with_options(ojs={"v": 7}).message_id
    with ledger.working():
        pass
    assert [len(ledger.runs[job]) for job in jobs] == [4, 4, 4]
    assert ledger.counters(native) == [1]
    assert unreadable not in ledger.runs
    assert ledger.dead == {native, unreadable}


def test_a_job_ends_where_it_has_begun(ledger: Ledger) -> None:
    """The job stays under the bridge, even if its actor removes the bridge's option from the message."""
    install(ledger.broker, bridge(), canary=0)
    actor = ledger.actor("charge")
    options = {"kwargs": {"raising": "forgetful"}, "ojs_retry": {"max_attempts": 2}}
    job = actor.send_with_options(**options).message_id
    with ledger.working():
        pass
    assert ledger.counters(job) == [0, 1]


@pytest.mark.parametrize("stored", [False, True])
def test_what_has_a_time_under_the_bridge_waits_for_it(ledger: Ledger, tmp_path: Path, stored: bool) -> None:
    """The job waits although its actor is outside the canary; then Dramatiq itself runs and retries it."""
    its = bridge(tmp_path if stored else None, park_after="PT0.2S")
    install(ledger.broker, its, canary=0)
    actor = ledger.actor("charge")
    due = its.engine.now() + timedelta(seconds=0.6)
    state = {"v": 1, "attempt": 2, "next_retry_at": format_time(due)}
    job = actor.send_with_options(retries=1, ojs=state).message_id
    with ledger.working():
        eventually(lambda: len(ledger.runs[job]) == 2, what="the job ended")
    assert ledger.at[-1] >= due.timestamp() - 0.001
    assert ledger.counters(job) == [1, 2]
    assert ledger.dead == {job}


def test_an_interrupt_while_a_native_job_is_put_off_runs_it_no_second_time(ledger: Ledger) -> None:
    """The job's delivery comes again, so Dramatiq must not retry the job as well."""
    its = bridge()
    install(ledger.broker, its, canary=0)
    actor = ledger.actor("charge")

    class Interrupting(dramatiq.Middleware):
        """Interrupts the thread that first puts a job off."""

        left = 1

        def before_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
            """Interrupt a worker's thread, and no other, once."""
            if delay and self.left:
                self.left = 0
                raise Shutdown

    due = its.engine.now() + timedelta(seconds=0.3)
    state = {"v": 1, "attempt": 2, "next_retry_at": format_time(due)}
    ledger.broker.add_middleware(Interrupting())
    job = actor.send_with_options(retries=1, ojs=state).message_id
    with ledger.working():
        eventually(lambda: len(ledger.runs[job]) == 2, what="the job ended")
    assert ledger.counters(job) == [1, 2]
    assert ledger.dead == {job}


class Changing(Canary):
    """A canary whose percentage a test changes: as workers with another one do that come after these."""

    def covers(self, name: str, job_id: str) -> bool:
        """Return whether all jobs are covered now."""
        return self.now

    now = True


@pytest.mark.parametrize("stored", [False, True])
def test_a_job_changes_sides_and_back_with_its_counter_in_step(
    ledger: Ledger, tmp_path: Path, stored: bool
) -> None:
    """Native when the bridge has retried it, under the bridge when Dramatiq has."""
    canary = Changing(50)
    middleware = install(ledger.broker, bridge(tmp_path if stored else None), canary=50)
    middleware.actors._terms = replace(middleware.actors._terms, canary=canary)
    sides = [True, False, True, False, False, True, True]
    actor = ledger.actor("charge", fails=6, max_retries=9, min_backoff=1, max_backoff=1)

    class Switching(dramatiq.Middleware):
        """Changes sides at each run."""

        def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
            """Choose the side of this run."""
            canary.now = sides[message.options.get("retries", 0)]

    ledger.broker.add_middleware(Switching(), before=OJSRetries)
    job = actor.send().message_id
    with ledger.working():
        pass
    assert ledger.counters(job) == [0, 1, 2, 3, 4, 5, 6]
    attempts = [options.get("ojs", {}).get("attempt") for options in ledger.runs[job]]
    assert attempts == [None, 2, 2, 4, 4, 4, 7]
    errors = [len(options.get("ojs", {}).get("errors", ())) for options in ledger.runs[job]]
    assert errors == [0, 1, 1, 2, 2, 2, 3]
    assert ledger.dead == set()


def test_a_native_job_s_results_interrupts_and_responses_are_dramatiq_s(ledger: Ledger) -> None:
    """A response code is an error like any other; a reader of the result gets the last error."""
    backend = StubBackend()
    ledger.broker.add_middleware(Results(backend=backend))
    install(ledger.broker, bridge(), canary=0)
    actor = ledger.actor("charge", store_results=True)
    message = actor.send(raising="dead")
    with ledger.working():
        pass
    assert ledger.counters(message.message_id) == [0, 1, 2]
    with pytest.raises(ResultFailure, match="DeadLetter"):
        message.get_result(backend=backend)
    assert all("ojs" not in options for options in ledger.runs[message.message_id])


@pytest.mark.parametrize(
    ("canary", "said"),
    [(101, "canary: 101"), ({"charge": "5"}, r"canary\['charge'\]: '5'"), ("5", "canary: '5'")],
)
def test_what_is_no_percentage_is_refused(ledger: Ledger, canary: Any, said: str) -> None:
    """`install` raises the error."""
    with pytest.raises(ConfigurationError, match=said):
        install(ledger.broker, bridge(), canary=canary)


def test_a_pattern_for_no_actor_is_refused(ledger: Ledger) -> None:
    """The error comes when a worker starts, also if the pattern names only native actors."""
    install(ledger.broker, bridge(), policies={"charge": {}}, canary={"bill.*": 10})
    for name in ("charge", "bill.me"):
        ledger.actor(name)
    worker = dramatiq.Worker(ledger.broker)
    with pytest.raises(ConfigurationError, match=r"canary\['bill\.\*'\] names no actor"):
        worker.start()


def test_a_worker_says_what_is_under_the_bridge(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """The worker logs the canary when it starts."""
    install(ledger.broker, bridge(), canary={"charge": 12.5})
    ledger.actor("charge")
    with ledger.working():
        pass
    assert "canary: under the bridge are 12.5 % of charge" in caplog.text
