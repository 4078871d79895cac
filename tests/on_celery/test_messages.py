"""A retry keeps most of its message and drops some parts."""

from __future__ import annotations

import datetime
import json
from importlib.metadata import version
from uuid import uuid4

import pytest
from celery import Celery
from celery.result import AsyncResult

from ojs_bridge import Retry
from ojs_bridge.errors import Unpublishable
from tests.contract.steps import KEEP, OPAQUE, raises
from tests.on_celery.conftest import Fleets
from tests.on_celery.fleet import LATE, Fleet
from tests.servers import eventually

PICKLE = "application/x-python-serialize"


def test_a_retry_keeps_everything_of_its_message(fleet: Fleet) -> None:
    stamps = {"stamped_headers": ["team"], "team": "red"}
    argument = datetime.datetime(2026, 11, 21)
    job = fleet.task("act_kept").apply_async(
        (*[raises(OSError, "down")] * 2, argument),
        serializer="pickle",
        compression="zlib",
        priority=5,
        headers={"x-mine": "yes"},
        time_limit=50,
        soft_time_limit=40,
        shadow="shown",
        expires=600,
        root_id="the-root",
        parent_id="the-parent",
        reply_to="somebody",
        **stamps,
    )
    assert fleet.end(job) == "FAILURE"
    first, second = fleet.runs(job)
    message = fleet.bridge.dead_letters.get(job.id).message  # the message of the second run
    assert (message["content_type"], message["content_encoding"]) == (PICKLE, "binary")
    assert message["headers"]["compression"] == "application/x-gzip"
    assert message["headers"]["x-mine"] == "yes"
    assert "'x-mine': 'yes'" in second.more["headers"]
    assert {key: message["properties"][key] for key in ("priority", "reply_to", "correlation_id")} == {
        "priority": 5,
        "reply_to": "somebody",
        "correlation_id": job.id,
    }
    same = ("delivery", "parent", "root", "expires", "timelimit", "shadow", "stamps", "args")
    assert {key: second.more[key] for key in same} == {key: first.more[key] for key in same}
    assert (second.more["root"], second.more["parent"], second.more["shadow"]) == (
        "the-root",
        "the-parent",
        "shown",
    )
    assert second.more["timelimit"] == [50, 40]
    assert second.more["stamps"] == {"team": "red"}
    assert second.more["expires"]


def test_a_pickled_letter_is_replayed_as_it_is(fleet: Fleet) -> None:
    argument = datetime.datetime(2026, 11, 21)
    job = fleet.task("act_kept").apply_async(
        (*[raises(OSError, "down")] * 4, argument), serializer="pickle", headers={"x-mine": "yes"}
    )
    assert fleet.end(job) == "FAILURE"
    message = fleet.bridge.dead_letters.get(job.id).message
    reading = fleet.bridge.dead_letters.get(job.id).reading
    assert (reading.args, reading.meta["x-mine"]) == (None, "yes")
    assert reading.note.endswith("pickled, which is not opened here")
    with pytest.raises(Unpublishable, match=r"^args: those of dead letter .* cannot be replaced: .* pickled"):
        fleet.bridge.dead_letters.replay(job.id, args=[1])
    fleet.bridge.dead_letters.replay(job.id)
    assert fleet.ending(job, nth=2)["total_attempts"] == 2
    again = fleet.bridge.dead_letters.get(job.id).message
    for kind in ("body", "content_type", "content_encoding", "properties"):
        assert again[kind] == message[kind], kind


def test_a_retry_drops_what_the_broker_added(fleet: Fleet) -> None:
    added = {
        "redelivered": True,
        "x-delivery-count": 3,
        "x-death": [{"count": 1}],
        "x-first-death-queue": "q",
    }
    job = fleet.send("act_kept", raises(OSError), headers={**added, "x-mine": "yes"})
    assert fleet.end(job) == "FAILURE"
    first, second = fleet.runs(job)
    assert "x-first-death-queue" in first.more["headers"]
    assert second.more["headers"] == "{'x-mine': 'yes'}"


def test_a_retry_goes_where_its_message_came_from(fleet: Fleet) -> None:
    name = fleet.settings.queue
    assert fleet.worker
    fleet.worker.await_ready()  # the worker declares the exchanges
    sent = {
        f"{name}-topic": fleet.send(
            "act_kept", raises(OSError), queue=f"{name}-topic", routing_key=f"{name}.orders.new"
        ),
        f"{name}-other": fleet.send(
            "act_kept",
            raises(OSError),
            queue=f"{name}-other",
            exchange=f"{name}-x",
            routing_key="strange.key",
        ),
        name: fleet.send("act_kept", raises(OSError)),
    }
    for queue, job in sent.items():
        assert fleet.end(job) == "FAILURE"
        first, second = fleet.runs(job)
        assert first.more["delivery"] == second.more["delivery"]
        assert first.more["delivery"]["exchange"] == {
            f"{name}-topic": f"{name}-topic",
            f"{name}-other": f"{name}-x",
        }.get(queue, "")
        assert fleet.bridge.dead_letters.get(job.id).queue == queue
        fleet.bridge.dead_letters.replay(job.id)
        assert fleet.ending(job, nth=2)["queue"] == queue


def test_publish_signals_are_sent_for_retries_too(fleet: Fleet) -> None:
    job = fleet.send("act", raises(OSError))
    assert fleet.end(job) == "FAILURE"
    # The retry may have run in another process before its publisher has noted both signals.
    for name in ("before_publish", "after_publish"):
        eventually(lambda name=name: len(fleet.calls(job, name)) >= 2, what=f"two calls of {name}")
        assert len(fleet.calls(job, name)) == 2


def test_what_users_pass_on_to_other_jobs_holds_nothing_of_ours(fleet: Fleet) -> None:
    job = fleet.send("passes_on", headers={"x-mine": "yes"})
    assert fleet.end(job) == "SUCCESS"
    assert [run.more["headers"] for run in fleet.runs(job)] == ["{'x-mine': 'yes'}"] * 2
    assert "ojs_wire" not in fleet.runs(job)[1].more["properties"]
    other = fleet.app.AsyncResult(job.get())
    assert fleet.end(other) == "SUCCESS"
    (run,) = fleet.runs(other)
    assert (run.state, run.more["headers"]) == (None, "{'x-mine': 'yes'}")


@pytest.mark.requirement("RET-11")
def test_a_retry_that_would_come_after_expiry_is_exhausted_now(fleet: Fleet) -> None:
    naive = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None) + datetime.timedelta(seconds=40)
    policy = {"initial_interval": "PT1M", **KEEP}
    for expires in (40, naive):
        job = fleet.send("act", raises(OSError), expires=expires, ojs_retry=policy)
        assert fleet.end(job) == "FAILURE"
        assert fleet.ending(job)["cause"] == "expired"
        assert len(fleet.runs(job)) == 1
        assert fleet.bridge.dead_letters.get(job.id).cause == "expired"


@pytest.mark.requirement("RET-14")
def test_messages_of_producers_without_the_bridge(fleet: Fleet) -> None:
    producer = Celery("foreign", broker=fleet.settings.broker, set_as_current=False)
    queue = fleet.app.amqp.queues[fleet.settings.queue]

    def send(**options: int) -> AsyncResult:
        return fleet.app.AsyncResult(producer.send_task("act", (raises(OSError),), queue=queue, **options).id)

    plain, retried = send(), send(retries=2)
    assert [fleet.end(plain), fleet.end(retried)] == ["FAILURE", "FAILURE"]
    assert (len(fleet.runs(plain)), len(fleet.runs(retried))) == (3, 1)
    assert fleet.ending(retried)["total_attempts"] == 3


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("job_id", [uuid4().int % 10**12, uuid4()], ids=["a number", "a UUID"])
def test_an_id_that_is_not_text_is_one_job_wherever_it_is_named(on_valkey: Fleets, job_id: object) -> None:
    """On RabbitMQ Celery's own producer refuses such an id."""
    fleet, text = on_valkey("prefork", True), str(job_id)
    policy = {"initial_interval": "PT2M", **KEEP}
    options = {"task_id": job_id, "ignore_result": True, "ojs_retry": policy}
    fleet.task("act_kept").apply_async((raises(OSError, "down"),), **options)
    job = fleet.app.AsyncResult(text)

    def is_parked() -> bool:
        return any(parked.id == text for parked in fleet.bridge.retries.list().jobs)

    eventually(is_parked, seconds=30, what="the parked retry")
    fleet.bridge.retries.run(text)
    assert fleet.ending(job)["total_attempts"] == 2
    letter = fleet.bridge.dead_letters.get(text)
    assert [entry["attempt"] for entry in letter.errors] == [1, 2]
    fleet.bridge.dead_letters.replay(text, retry={"max_attempts": 1})
    assert fleet.ending(job, nth=2)["total_attempts"] == 1
    assert [run.attempt for run in fleet.runs(job)] == [1, 2, 1]


@pytest.mark.requirement("RET-01")
def test_wrong_arguments_are_a_failure_like_others(fleet: Fleet) -> None:
    job = fleet.app.send_task("typed", ("x", "y", "z"))
    assert fleet.end(job) == "FAILURE"
    assert fleet.ending(job)["last_error"]["type"] == "builtins.TypeError"
    assert fleet.ending(job)["total_attempts"] == 3
    assert fleet.send("typed", 2, kwargs={"word": "ab"}).get(timeout=90) == "abab"
    with pytest.raises(TypeError):
        fleet.send("typed", 1, 2, 3)


@pytest.mark.requirement("RET-15")
def test_huge_failures_stay_within_the_header(fleet: Fleet) -> None:
    steps = [raises(Retry, "a.b", "m" * 100000, details={"x": ["y" * 1000] * 50, "o": OPAQUE})]
    steps += [raises(Retry, "a." + "b" * 5000, details={"nan": float("nan")}), "ok"]
    job = fleet.send("act", *steps)
    assert fleet.end(job) == "SUCCESS"
    second, third = fleet.runs(job)[1:]
    assert max(len(second.state), len(third.state)) < 16 * 1024
    error = third.ojs["errors"][0]
    assert len(error["message"]) <= 4000
    assert error["message"].endswith("[cut]")
    assert len(json.dumps(error["details"])) < 5000


@pytest.mark.requirement("RET-11")
@pytest.mark.skipif(version("celery") < "5.5", reason="Celery delays messages in RabbitMQ from 5.5 on")
def test_quorum_queues_delay_in_the_broker(separate, rabbitmq) -> None:
    fleet = separate(broker=rabbitmq.url, quorum=True)
    fleet.start("-c", "4").await_ready()  # the worker declares the exchanges that delay
    topic = {"exchange": f"{fleet.settings.queue}-topic", "routing_key": f"{fleet.settings.queue}.orders.new"}
    delays = (0.3, 4.2, 5.2)  # a retry that is published later has less than its delay to wait
    sent = {}
    for delay in delays:
        policy = {"initial_interval": f"PT{delay}S", "backoff_strategy": "none", **KEEP}
        sent[delay] = fleet.send("act", raises(OSError), ojs_retry=policy, **topic)
    for delay, job in sent.items():
        assert fleet.end(job) == "FAILURE"
        assert len(fleet.runs(job)) == 3
        assert all(delay <= gap < delay + LATE for gap in fleet.gaps(job))
        assert fleet.bridge.dead_letters.get(job.id).queue == f"{fleet.settings.queue}-topic"
        exchange = fleet.runs(job)[1].more["delivery"]["exchange"]
        assert exchange.startswith("celery_delayed_") == (delay >= 1.1)
    job = sent[5.2]
    fleet.bridge.dead_letters.replay(job.id)
    eventually(lambda: len(fleet.runs(job)) == 4, what="the replay")
