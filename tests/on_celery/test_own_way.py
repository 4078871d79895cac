"""A retry goes the fleet's own way down: its classes, routers and receivers see it, as without the bridge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from celery import VERSION, Celery, Task, signals
from celery.exceptions import Reject, Retry

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from tests.on_celery.by_hand import ByHand, by_hand, natively, plain
from tests.on_celery.test_canary import SCENARIOS, seen
from tests.servers import eventually

#: Where the bridge does better on purpose: an attempt that was lost counts, and a Reject is the task's own.
BETTER = {"a killed child", "retry_on_worker_lost", "autoretry takes Reject for an error"}
if VERSION < (5, 7):
    # An older Celery loses a job whose task calls itself, and asks for a retry there.
    BETTER |= {"called", "calls itself, and retries"}


def compared(hand: ByHand) -> list[tuple[Any, ...]]:
    """What was seen, without the time to live that a broker is told of; the header says it, too."""
    return [without(*note) for note in seen(hand)]


def without(kind: str, job: int, *rest: Any) -> tuple[Any, ...]:
    if kind == "run":
        retries, headers, properties, name = rest
        own = {key: value for key, value in headers.items() if key != "ojs"}
        return kind, job, retries, own, [given for given in properties if given != "expiration"], name
    if kind == "delivered" and rest[0] is not None and rest[0] < 0.01:
        # No policy has a wait of nothing.
        return kind, job, None
    return kind, job, *rest


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - BETTER))
def test_under_plain_install_a_job_runs_as_without_the_bridge(unique: str, name: str) -> None:
    """The same runs, counters, headers, delays, handlers, acknowledgements, state and result."""
    task, steps, options = SCENARIOS[name]
    native, bridged = by_hand(natively, f"{unique}-n"), by_hand(plain, f"{unique}-p")
    jobs = []
    for hand in (native, bridged):
        jobs.append(hand.send(task, *steps, **options))
        hand.deliver_all()
    assert compared(bridged) == compared(native)
    assert bridged.state(jobs[1]) == native.state(jobs[0])


@pytest.mark.skipif(VERSION < (5, 7), reason="Celery has the option from 5.7 on")
def test_a_job_whose_time_is_over_is_put_back_as_its_task_says(unique: str) -> None:
    """`acks_on_timeout=False`: Celery runs it again, without end."""
    told = []
    for installing in (natively, plain):
        hand = by_hand(installing, f"{unique}-{installing.__name__}")
        hand.send("kept", "ok", headers={"dies": "time limit"})
        assert [hand.deliver() for _ in range(3)] == [True] * 3
        told.append(compared(hand))
    assert told[0] == told[1]
    assert [note[0] for note in told[0]] == ["delivered", "requeue"] * 3


class Patient(Task):
    """A class that has its own way down, and notes what comes along."""

    abstract = True
    notes: ClassVar[list[Any]] = []

    def retry(self, *args: Any, **options: Any) -> Any:
        self.notes.append(("retry", type(options.get("exc")).__name__, options.get("countdown")))
        options.update(countdown=100 * (self.request.retries + 1), max_retries=3)
        return super().retry(*args, **options)

    def signature_from_request(self, *args: Any, **options: Any) -> Any:
        signature = super().signature_from_request(*args, **options)
        self.notes.append(("signature", options["retries"], options["countdown"]))
        return signature.set(headers={**(signature.options.get("headers") or {}), "team": "own"})

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        self.notes.append(("apply_async", options.get("retries"), options.get("countdown")))
        return super().apply_async(args, kwargs, **options)


class Fleet(Celery):
    """An app that sends in its own way: a retry goes to the queue `slow`."""

    notes: ClassVar[list[Any]] = []

    def send_task(self, name: str, *args: Any, **options: Any) -> Any:
        if options.get("retries"):
            options["queue"] = f"{self.main}-slow"
        self.notes.append(("send_task", options.get("retries", 0), sorted(options.get("headers") or {})))
        return super().send_task(name, *args, **options)


@contextmanager
def heard(notes: list[Any]) -> Iterator[None]:
    """Note what the receivers of Celery's publish signals get; one changes the body and a header."""

    def before(sender: str, body: Any, headers: Any, routing_key: str, **_: Any) -> None:
        args, kwargs, embed = body
        kwargs["trace"] = headers["retries"]
        headers["x-seen"] = headers["retries"]
        notes.append(("before", list(args), sorted(embed), routing_key.rpartition("-")[2]))

    def after(sender: str, body: Any, headers: Any, **_: Any) -> None:
        notes.append(("after", body[1]["trace"], headers["retries"]))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    yield
    signals.before_task_publish.disconnect(before)
    signals.after_task_publish.disconnect(after)


def way_down(installing: Callable[[Celery], object], name: str, asks: bool) -> tuple[list[Any], list[Any]]:
    """What is seen on the way down of each retry of a job, and what its runs have."""
    app = Fleet(name, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_default_queue=f"{name}-usual", task_acks_late=True)
    runs: list[Any] = []
    options: dict[str, Any] = {} if asks else {"autoretry_for": (OSError,), "retry_backoff": 2}
    Patient.notes = Fleet.notes = notes = []
    installing(app)

    @app.task(bind=True, base=Patient, name="sync", shared=False, lazy=False, retry_jitter=False, **options)
    def sync(self: Task, n: int, trace: int | None = None) -> None:
        request = self.request
        headers = {key: value for key, value in (request.headers or {}).items() if key != "ojs"}
        same = request.parent_id == request.id, request.root_id == request.id
        runs.append((request.retries, trace, headers, *same, request.delivery_info["routing_key"][-5:]))
        if asks:
            self.retry(exc=OSError("down"))
        raise OSError("down")

    usual, slow = ByHand.of(app, f"{name}-usual"), ByHand.of(app, f"{name}-slow")
    with heard(notes):
        sync.apply_async((7,), link=app.signature("after"))
        while usual.deliver() or slow.deliver():
            assert len(runs) < 9
    return notes, runs


@pytest.mark.parametrize("asks", [True, False], ids=["self.retry", "autoretry_for"])
def test_a_fleets_own_classes_and_receivers_see_each_retry(unique: str, asks: bool) -> None:
    """Its `retry` chooses waits and limit, its signature a header, its app a queue."""
    native = way_down(natively, f"{unique}-n", asks)
    bridged = way_down(plain, f"{unique}-p", asks)
    assert bridged == native
    assert [run[0] for run in native[1]] == [0, 1, 2, 3]
    assert [run[1] for run in native[1]] == [0, 1, 2, 3]


@pytest.mark.parametrize("parks", [False, True], ids=["published", "parked"])
def test_under_a_policy_a_retry_takes_that_way_too(unique: str, tmp_path: Path, parks: bool) -> None:
    """The policy says how often and when; a parked retry is published byte for byte, and heard of once."""
    wait = "PT1H" if parks else "PT0.01S"
    policy = {"max_attempts": 2, "initial_interval": wait, "max_interval": wait, "jitter": False}
    app = Fleet(unique, broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_default_queue=f"{unique}-usual", task_acks_late=True)
    Patient.notes = Fleet.notes = notes = []
    bridge = install(app, Bridge(f"sqlite:///{tmp_path}/ojs.db", park_after="PT1S"), policies={"*": policy})
    runs: list[Any] = []

    @app.task(bind=True, base=Patient, name="sync", shared=False, lazy=False)
    def sync(self: Task, n: int, trace: int | None = None) -> None:
        request = self.request
        runs.append((request.retries, trace, request.delivery_info["routing_key"][-4:]))
        raise OSError("down")

    usual, slow = ByHand.of(app, f"{unique}-usual"), ByHand.of(app, f"{unique}-slow")
    with heard(notes):
        job = sync.apply_async((7,)).id
        assert usual.deliver()
        if parks:
            (parked,) = bridge.retries.list().jobs
            assert json.loads(parked.message["body"])[1] == {"trace": 1}
            bridge.retries.run(job)
            bridge.start()
        # A delivery that comes before its time is put off.
        eventually(lambda: slow.deliver() and len(runs) == 2, what="the retry in the fleet's own queue")
        bridge.stop()
    assert runs == [(0, 0, "sual"), (1, 1, "slow")]
    kinds = [note[0] for note in notes]
    assert kinds == [
        *("apply_async", "send_task", "before", "after"),
        *("retry", "signature", "apply_async", "send_task", "before", "after"),
    ]


@pytest.mark.parametrize(
    ("ends", "state", "acked"),
    [
        ("returns", "SUCCESS", "ack"),
        ("catches", "SUCCESS", "ack"),
        ("raises", "FAILURE", "ack"),
        ("rejects", "FAILURE", "reject"),
    ],
)
@pytest.mark.parametrize("installing", [natively, plain])
def test_a_retry_is_sent_however_its_run_ends(
    unique: str, installing: Any, ends: str, state: str, acked: str
) -> None:
    """Celery shows the end of the run and what follows it, and the retry runs, too."""
    hand = by_hand(installing, unique)

    @hand.app.task(bind=True, name="asks", shared=False, lazy=False, max_retries=1)
    def asks(self: Task) -> str:
        hand.notes.append(("run", self.request.id, self.request.retries))
        if self.request.retries == 0:
            with suppress(Retry):
                self.retry(countdown=0, throw=ends == "catches")
            if ends == "raises":
                raise KeyError("k")
            if ends == "rejects":
                raise Reject("no", requeue=False)
        return "done"

    job = asks.apply_async(link=hand.app.signature("collect")).id
    hand.deliver()
    if VERSION >= (5, 7) or ends != "rejects":
        assert hand.app.AsyncResult(job).state == state
    assert [note[0] for note in hand.notes if note[0] in ("ack", "reject", "requeue")] == [acked]
    hand.deliver_all()
    assert hand.runs(job) == [0, 1]


def test_a_retry_that_own_code_sends_by_itself_is_no_second_one(unique: str) -> None:
    """An `apply_async` may send in its own way, or nothing: as natively, the run ends as retried."""
    told = []
    for installing in (natively, plain):
        hand = by_hand(installing, f"{unique}-{installing.__name__}")

        class Silent(Task):
            abstract = True

            def apply_async(self, *args: Any, **options: Any) -> Any:
                return None if options.get("retries") else super().apply_async(*args, **options)

        hand.define("silent", base=Silent, max_retries=2)
        job = hand.send("silent", *SCENARIOS["self.retry"][1])
        hand.deliver_all()
        told.append((hand.runs(job), hand.state(job)[0]))
    assert told == [([0], "RETRY")] * 2


def test_own_code_that_refuses_to_send_ends_no_job_that_a_policy_retries(unique: str, tmp_path: Path) -> None:
    """A lock or a check of arguments in `apply_async`: the retry goes on with its message as it came."""

    class Locked(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            if options.get("retries"):
                raise LookupError("locked")
            return super().apply_async(*args, **options)

    def installing(app: Celery) -> None:
        policy = {"max_attempts": 3, "initial_interval": "PT0.001S"}
        install(app, Bridge(f"sqlite:///{tmp_path}/ojs.db"), policies={"locked": policy})

    hand = by_hand(installing, unique)
    hand.define("locked", base=Locked)
    job = hand.send("locked", *SCENARIOS["failure"][1])
    eventually(lambda: hand.deliver_all() or hand.runs(job) == [0, 1, 2], what="three runs")


def test_a_retry_after_the_expiry_is_sent_and_revoked(unique: str, tmp_path: Path) -> None:
    """Celery revokes it when it is due; under a policy the job ends at once, since no attempt can follow."""
    sent = []
    for installing in (natively, plain):
        hand = by_hand(installing, f"{unique}-{installing.__name__}")
        job = hand.send("auto", *SCENARIOS["autoretry"][1], expires=60)
        assert hand.deliver()
        message = hand.take()
        sent.append((message.headers["retries"], hand.state(job)[0]))
    assert sent == [(1, "RETRY")] * 2


def test_the_retry_says_what_celerys_says(unique: str) -> None:
    """Receivers of `task_retry` get the error that was given, a signature, and the same text."""
    told: list[list[Any]] = []

    def note(request: Any, reason: Any, **_: Any) -> None:
        told[-1].append((str(reason), repr(reason.exc), reason.sig is not None, request.headers))

    signals.task_retry.connect(note)
    for installing in (natively, plain):
        told.append([])
        hand = by_hand(installing, f"{unique}-{installing.__name__}")

        @hand.app.task(bind=True, name="asks", shared=False, lazy=False, max_retries=3)
        def asks(self: Task) -> None:
            try:
                raise ValueError("x")
            except ValueError as error:
                n = self.request.retries
                self.retry(countdown=(60, 0.5)[n % 2], exc=error if n > 1 else None)

        asks.apply_async()
        hand.deliver_all()
    signals.task_retry.disconnect(note)
    assert told[0] == told[1]
    assert told[0][0] == ("Retry in 60s", "None", True, None)
