"""Without a store, with one that fails, and with a broker that is down: no job is lost."""

from __future__ import annotations

import json
import time

import pytest

from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, Valkey, eventually


def dead(fleet: Fleet) -> list:
    found: list = []
    eventually(
        lambda: found.extend(fleet.buried(fleet.settings.queue)) or found, seconds=20, what="a dead letter"
    )
    return found


@pytest.mark.requirement("RET-17", "DLQ-001")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_without_a_store_a_dead_letter_goes_whole_to_the_dead_queue(
    separate, broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(store=None, broker=request.getfixturevalue(broker).url)
    worker = fleet.start("-c", "2")
    job = fleet.task("act_kept").apply_async(
        ("OSError('down')",), serializer="pickle", compression="zlib", priority=3, headers={"x-mine": "yes"}
    )
    assert fleet.end(job) == "FAILURE"
    (message,) = dead(fleet)
    assert message.content_type == "application/x-python-serialize"
    assert message.payload[0] == ("OSError('down')",)
    assert (message.headers["id"], message.headers["task"]) == (job.id, "act_kept")
    assert (message.headers["x-mine"], message.properties["priority"]) == ("yes", 3)
    state = json.loads(message.headers["ojs"])
    assert (state["attempt"], [error["attempt"] for error in state["errors"]]) == (2, [1, 2])
    assert "next_retry_at" not in state
    assert fleet.ending(job)["dead_lettered"]
    assert "no store: dead letters go to `<queue>.dead`" in worker.log
    discarded = fleet.send("act", "OSError()")
    huge = json.dumps({"v": 1, "retry": {"non_retryable_errors": ["x" * 100] * 200}})
    unwritable = fleet.send("act", "OSError()", headers={"ojs": huge})
    assert [fleet.end(discarded), fleet.end(unwritable)] == ["FAILURE", "FAILURE"]
    (message,) = dead(fleet)
    assert (message.headers["id"], message.headers["ojs"]) == (unwritable.id, huge)


def test_a_store_that_fails_leaves_the_dead_letter_in_the_dead_queue(separate) -> None:
    fleet = separate(store="sqlite:////nowhere/at/all.db")
    worker = fleet.start("-c", "2")
    job = fleet.send("act_kept", "OSError()")
    long = fleet.send("act_kept", "OSError()", ojs_retry={"max_attempts": 13, "max_interval": "PT0.1S"})
    assert [fleet.end(job), fleet.end(long)] == ["FAILURE", "FAILURE"]
    assert len(fleet.runs(long)) == 13
    messages = {message.headers["id"]: message for message in dead(fleet)}
    assert set(messages) == {job.id, long.id}
    assert len(json.loads(messages[long.id].headers["ojs"])["errors"]) == 10
    assert "kept in the broker's dead queue, not in the store" in worker.log


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("broker", [Valkey, RabbitMQ])
def test_a_retry_that_cannot_be_published_is_not_lost(separate, broker: type[Valkey | RabbitMQ]) -> None:
    with broker() as server:
        late = separate(broker=server.url)
        early = separate(broker=server.url, acks_late=False)
        for fleet in (late, early):
            fleet.start("-c", "2").await_ready()
        jobs = [
            (fleet, fleet.send("act_kept", "time.sleep(0.7) or OSError()", "OSError()"))
            for fleet in (late, early)
        ]
        for fleet, job in jobs:
            eventually(lambda fleet=fleet, job=job: fleet.runs(job), seconds=20, what="a run")
        if isinstance(server, RabbitMQ):
            server.await_declared(late.settings.queue)
        server.kill()
        for fleet in (late, early):
            said = "goes back to its queue" if fleet is late else "cannot be carried out"
            eventually(lambda fleet=fleet, said=said: said in fleet.worker.log, seconds=40, what=said)
        store = early.bridge.store
        eventually(lambda: store.get(jobs[1][1].id), seconds=20, what="a dead letter")
        kept = early.bridge.dead_letters.get(jobs[1][1].id)
        assert (kept.cause, kept.attempt) == ("invalid", 1)
        server.start()
        if isinstance(server, Valkey):
            return  # Redis gives an unacknowledged job out again after its visibility timeout, an hour
        assert late.end(jobs[0][1], seconds=60) == "FAILURE"
        assert late.bridge.dead_letters.get(jobs[0][1].id).attempt == 2
        early.bridge.dead_letters.retry(kept.id)
        eventually(lambda: len(early.runs(jobs[1][1])) >= 2, seconds=40, what="the replay")


def test_a_listener_that_blocks_delays_no_job(separate) -> None:
    fleet = separate()
    fleet.app.conf.task_always_eager = True
    fleet.bridge._events._listeners = (lambda event: time.sleep(60),)
    began = time.monotonic()
    assert fleet.send("act", "OSError()", "OSError()", "'ok'").get() == "ok"
    assert time.monotonic() - began < 5
