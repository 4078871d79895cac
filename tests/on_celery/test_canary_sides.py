"""A canary on Celery: which jobs are inside, and what keeps its promises outside it."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain
from celery.signals import task_failure, task_postrun

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.adapters.terms import Canary
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.run import settle_success
from ojs_bridge.celery.worker import check_app
from tests.contract.steps import an, calls_itself, raises, retries
from tests.on_celery.by_hand import ByHand, by_hand, failing, header, natively, outside, plain
from tests.on_celery.fleet import in_seconds
from tests.servers import eventually


class Heard(list[str]):
    """The types of the events of each job."""

    def __call__(self, event: Any) -> None:
        self.append(f"{event.subject} {event.type.removeprefix('job.')}")


def test_the_id_says_which_jobs_are_inside(unique: str, tmp_path: Path) -> None:
    """Jobs inside follow the policy and become dead letters; Celery's options count for the others."""
    heard = Heard()
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", listeners=[heard])
    policy = {"max_attempts": 5, "initial_interval": "PT0.001S", "on_exhaustion": "dead_letter"}
    hand = by_hand(lambda app: install(app, bridge, policies={"auto": policy}, canary=40), unique)
    jobs = [hand.send("auto", raises(OSError), task_id=f"{unique}-{number}") for number in range(20)]
    hand.deliver_all()
    bridge.flush()
    inside = [job for job in jobs if Canary(40).covers("auto", job)]
    assert 0 < len(inside) < 20
    for job in jobs:
        assert hand.runs(job) == list(range(5 if job in inside else 3)), job
        assert hand.state(job) == ("FAILURE", "OSError()")
        assert (f"{job} discarded" in heard) == (job in inside)
    assert {letter.id for letter in bridge.dead_letters.list().letters} == {*inside}


def test_a_job_with_a_policy_of_its_own_is_always_inside(unique: str) -> None:
    """An @ojs_task is inside, too, and so is a job with an unreadable header, which may hold a policy."""
    hand = by_hand(outside, unique)
    ojs_task(hand.app, name="own", shared=False, retry={"max_attempts": 2, "initial_interval": "PT0.001S"})(
        failing
    )
    own = hand.send("auto", raises(OSError), ojs_retry={"max_attempts": 6, "initial_interval": "PT0.001S"})
    task = hand.send("own")
    unreadable = hand.send("auto", raises(OSError), headers={"ojs": "{"})
    hand.deliver_all()
    assert hand.runs(own) == list(range(6))
    assert (hand.state(task)[0], hand.state(unreadable)[0]) == ("FAILURE", "FAILURE")
    assert sum(note[:2] == ("delivered", task) for note in hand.notes) == 2
    assert hand.runs(unreadable) == []


@pytest.mark.parametrize("canary", [0, 100])
def test_a_task_that_calls_itself_sees_no_header_of_the_bridge(unique: str, canary: int) -> None:
    """The task could not pass such a header on to another job: no message can carry it."""
    hand = by_hand(lambda app: install(app, Bridge(), canary=canary), unique)
    hand.send("plain", calls_itself("nested"))
    hand.deliver_all()
    assert [note[3] for note in hand.notes if note[0] == "run"] == [{}, {}]


@pytest.mark.parametrize("installing", [plain, outside])
def test_a_message_may_have_a_header_with_the_name_of_our_attribute(unique: str, installing: Any) -> None:
    hand = by_hand(installing, unique)
    task_postrun.connect(settle_success)
    try:
        jobs = [
            hand.send("auto", step, "ok", headers={"ojs_run": "theirs"}) for step in ("ok", raises(OSError))
        ]
        hand.deliver_all()
    finally:
        task_postrun.disconnect(settle_success)
    assert [hand.runs(job) for job in jobs] == [[0], [0, 1]]
    assert [hand.state(job)[0] for job in jobs] == ["SUCCESS", "SUCCESS"]


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_worker_gives_each_message_to_its_side(unique: str, protocol: int) -> None:
    """The first version of Celery's protocol has a job's id in the body."""
    hand = by_hand(lambda app: install(app, Bridge(), canary=40), unique)
    hand.app.conf.task_protocol = protocol
    side = hand.app.tasks["plain"].ojs_outside.apart(lambda *_: "inside", lambda *_: "outside")
    sent = [hand.send("plain", 1, task_id=f"{unique}-{number}") for number in range(20)]
    found = [side(hand.take(), None) for _ in sent]
    assert found == ["inside" if Canary(40).covers("plain", job) else "outside" for job in sent]
    assert len({*found}) == 2


def test_outside_the_canary_a_tasks_own_receivers_hear_of_a_dead_child(unique: str) -> None:
    """The main process sends the signal, and the receivers are connected to the registered task."""
    hand, heard = by_hand(outside, unique), []

    def hear(task_id: str, **_: Any) -> None:
        heard.append(task_id)

    task_failure.connect(hear, sender=hand.app.tasks["plain"])
    jobs = [hand.send(name, "ok", headers={"dies": "killed"}) for name in ("plain", "auto")]
    hand.deliver_all()
    assert heard == jobs[:1]


@pytest.mark.parametrize("dies", [None, "killed", "time limit"])
def test_outside_the_canary_a_job_still_waits_for_its_time(unique: str, dies: str | None) -> None:
    """A job that was retried under the bridge waits, also when its child died meanwhile."""
    hand = by_hand(outside, unique)
    ojs = header(attempt=2, next_retry_at=in_seconds(50), errors=[])
    headers = {"ojs": ojs, **({"dies": dies} if dies else {})}
    job = hand.send("auto", raises(OSError), retries=1, headers=headers)
    assert hand.deliver()
    assert hand.runs(job) == []
    waiting = hand.take()
    assert (waiting.headers["retries"], waiting.headers["eta"] is not None) == (1, True)
    assert json.loads(waiting.headers["ojs"])["attempt"] == 2


def test_a_lowered_canary_leaves_a_retry_of_the_bridge_to_celery(unique: str) -> None:
    """Celery itself waits for the message's time; only a retry that is due later is the bridge's."""
    hand = by_hand(lambda app: install(app, Bridge(), canary=100), unique)
    lowered = by_hand(outside, unique).app.tasks["plain"].ojs_outside
    hand.send("plain", retries(countdown=50))
    assert hand.deliver()
    headers = hand.take().headers
    assert (headers["retries"], "ojs" in headers) == (1, True)
    assert [lowered.has(headers), lowered.has({**headers, "eta": None})] == [True, False]


def test_outside_the_canary_a_parked_retry_is_parked_again(unique: str, tmp_path: Path) -> None:
    """A retry that comes too early is parked; a retry that is published when due is Celery's."""
    bridge = Bridge(store=f"sqlite:///{tmp_path}/ojs.db")
    hand = by_hand(lambda app: install(app, bridge, canary=0), unique)
    ojs = header(attempt=2, next_retry_at=in_seconds(600))
    job = hand.send("auto", "ok", retries=1, headers={"ojs": ojs})
    hand.deliver_all()
    assert [parked.id for parked in bridge.retries.list().jobs] == [job]
    bridge.retries.run(job)
    bridge.start()
    try:
        eventually(hand.deliver, what="the parked retry")
    finally:
        bridge.stop()
    assert (hand.runs(job), hand.state(job)) == ([1], ("SUCCESS", "'ok'"))


@pytest.mark.parametrize("order", [[0, 100, None], [100, 0, None], [None, 100, 0], [100, None, 0]])
def test_the_native_counter_stays_in_step_wherever_a_job_runs(unique: str, order: list[int | None]) -> None:
    """Turn by turn with the bridge, outside its canary, and on a worker that knows nothing of it."""
    notes: list[Any] = []
    policy = {"max_attempts": 7, "initial_interval": "PT0.001S"}

    def hand_of(canary: int | None) -> ByHand:
        installed = functools.partial(install, bridge=Bridge(), policies={"*": policy}, canary=canary)
        hand = ByHand(unique, natively if canary is None else installed, notes=notes)
        hand.define("both", max_retries=6, default_retry_delay=0)
        hand.define("automatic", max_retries=6, default_retry_delay=0, autoretry_for=(OSError,))
        return hand

    hands = itertools.cycle([hand_of(canary) for canary in order])
    first = next(hands)
    jobs = [first.send("both", retries(exc=an(OSError))), first.send("automatic", raises(OSError))]
    assert any(not hand.deliver() for hand in itertools.islice(hands, 60))
    for job in jobs:
        assert first.runs(job) == list(range(7))
        assert first.state(job)[0] == "FAILURE"


def test_a_later_jobs_own_policy_comes_through_a_worker_that_does_not_know_it(unique: str) -> None:
    """The bridge's producer sets the policy in a chain; a worker without the bridge sends the later job."""
    notes: list[Any] = []
    old, new = (ByHand(unique, installing, notes=notes) for installing in (natively, outside))
    for hand in (old, new):
        hand.define("retried", autoretry_for=(OSError,), default_retry_delay=0)
    policy = {"max_attempts": 6, "initial_interval": "PT0.001S"}
    job = new.app.tasks["retried"].si
    last = chain(job(1), job(raises(OSError)).set(ojs_retry=policy), app=new.app).apply_async()
    assert old.deliver()
    assert old.deliver()
    new.deliver_all()
    assert new.runs(last.id) == list(range(6))


def test_a_later_jobs_own_policy_comes_through_a_worker_that_does_not_have_its_task(unique: str) -> None:
    """The worker's policies may be older than the producer's; it passes on a policy for other tasks."""
    notes: list[Any] = []
    elsewhere = functools.partial(install, policies={"elsewhere": {}})
    old, new = (ByHand(unique, installing, notes=notes) for installing in (elsewhere, outside))
    for hand in (old, new):
        hand.define("retried", autoretry_for=(OSError,), default_retry_delay=0)
        hand.define("elsewhere")
    job = new.app.tasks["retried"].si
    step = job(raises(OSError)).set(ojs_retry={"max_attempts": 6, "initial_interval": "PT0.001S"})
    last = chain(new.app.tasks["elsewhere"].si(1), job(1), step, app=new.app).apply_async()
    assert old.deliver()
    assert old.deliver()
    new.deliver_all()
    assert new.runs(last.id) == list(range(6))


def test_a_policy_can_be_taken_from_a_signature(unique: str) -> None:
    """The header for workers without the bridge goes, too."""
    new = by_hand(outside, unique)
    signature = new.app.tasks["plain"].si(1).set(headers={"own": 1}, ojs_retry={"max_attempts": 6})
    assert {"own", "ojs"} == set(signature.options["headers"])
    assert signature.set(ojs_retry=None).options["headers"] == {"own": 1}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"canary": 120}, "canary: 120 must be between 0 and 100"),
        ({"canary": {"mail.*": 10}}, "canary['mail.*'] names no installed task of the app 'checked'"),
        (
            {"canary": {"own": 10}},
            "canary['own'] names no installed task of the app 'checked'",
        ),
    ],
)
def test_a_canary_that_cannot_be_is_refused(arguments: dict[str, Any], problem: str) -> None:
    """A wrong canary is refused by `install`, or when the worker starts."""
    app = Celery("checked", broker="memory://", set_as_current=False)
    ojs_task(app, name="own", shared=False)(failing)
    app.task(shared=False, name="plain")(failing)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(problem)}$"):
        install(app, Bridge(), **arguments)
        check_app(app)


def test_a_worker_says_which_jobs_are_under_the_bridge(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The canary may come from the worker's environment."""
    monkeypatch.setenv("OJS_BRIDGE_CANARY", '{"*": 100, "mail.*": 2.5}')
    app = Celery("told", broker="memory://", set_as_current=False)
    install(app, Bridge())
    app.task(shared=False, name="mail.send")(failing)
    check_app(app)
    assert "canary: under the bridge are 100 % of *, 2.5 % of mail.*; Celery itself" in caplog.text
