"""Servers that die exactly when a job is to be sent on: it ends all the same as its policy says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from celery.result import AsyncResult

from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, Server, Valkey, eventually

#: How a job is sent on -> its task, its first step, and the policy that asks for it.
WAYS = {
    "retried": ("act_kept", "OSError()", {"initial_interval": "PT0.5S"}),
    "parked": ("act_kept", "OSError()", {"initial_interval": "PT15S", "max_attempts": 2}),
    "buried": ("act_kept", "DeadLetter('a', 'b')", {}),
    "discarded": ("act", "Discard('a', 'b')", {}),
    "succeeded": ("act", "'ran'", {}),
}
Made = Callable[..., Fleet]


@contextmanager
def frozen(fleet: Fleet, jobs: Iterable[AsyncResult]) -> Iterator[None]:
    """Stop the processes that run jobs for as long as the context lasts, in the middle of a run."""
    pids = []
    for job in jobs:
        eventually(lambda job=job: fleet.runs(job), seconds=40, what="a run")
        pids.append(fleet.runs(job)[0].more["pid"])
        os.kill(pids[-1], signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def sent_every_way(fleet: Fleet) -> dict[str, AsyncResult]:
    return {
        name: fleet.send(task, f"time.sleep(5) or {step}", step, ojs_retry={"max_attempts": 3, **policy})
        for name, (task, step, policy) in WAYS.items()
    }


def assert_ended(fleet: Fleet, sent: dict[str, AsyncResult], *, lost: bool) -> None:
    """Every job ended as its policy says, in no more starts than that; a lost attempt is one of them."""
    for name, job in sent.items():
        assert fleet.end(job, seconds=90) == ("SUCCESS" if name == "succeeded" else "FAILURE"), name
    # What is published leaves the store a moment later, and its job may have ended by then.
    # A worker that was killed in between had claimed it for a minute.
    eventually(lambda: fleet.bridge.retries.count() == 0, seconds=90, what="no parked retry")
    starts = {name: [run.attempt for run in fleet.runs(job)] for name, job in sent.items()}
    assert (starts["retried"], starts["parked"]) == ([1, 2, 3], [1, 2])
    for name in ("buried", "discarded", "succeeded"):
        assert starts[name] in ([[1], [1, 2]] if lost else [[1]]), name
    buried = {message.headers["id"] for message in fleet.buried(fleet.settings.queue)}
    for name in ("retried", "parked", "buried"):
        assert fleet.bridge.store.get(sent[name].id) or sent[name].id in buried, name


@pytest.mark.requirement("RET-01", "RET-12")
@pytest.mark.timeout(240)  # a minute more where a killed worker had claimed a retry
@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_what_is_sent_on_while_a_server_is_down_ends_as_its_policy_says(
    separate: Made, kind: str, request: pytest.FixtureRequest
) -> None:
    up: Server = request.getfixturevalue(kind)
    with type(up)() as broker, Valkey() as store, Valkey() as good_store, ExitStack() as stack:
        fleets = {
            gone: separate(
                broker=(up if gone == "store" else broker).url,
                store=(good_store if gone == "broker" else store).url[:-1] + database,
                reservation="PT4S",
                visibility=6,
                park_after="PT2S",
                insist=2,
            )
            for gone, database in (("broker", "0"), ("store", "1"), ("both", "2"))
        }
        for fleet in fleets.values():
            fleet.start("-c", str(len(WAYS)))
        for fleet in fleets.values():
            fleet.worker.await_ready()
            if isinstance(broker, RabbitMQ) and fleet.settings.broker == broker.url:
                broker.await_declared(fleet.settings.queue)
        sent = {gone: sent_every_way(fleet) for gone, fleet in fleets.items()}
        for gone, fleet in fleets.items():
            stack.enter_context(frozen(fleet, sent[gone].values()))
        broker.kill()
        store.kill()
        stack.close()
        time.sleep(6)  # for what is to be done to fail
        broker.start()
        store.start()
        for gone, fleet in fleets.items():
            if gone != "store" and kind == "valkey":  # Celery 5.7 ends workers that lose their connection
                if gone == "broker":  # no attempt is lost, so that the kill must not come before their ends
                    for name in ("buried", "discarded", "succeeded"):
                        fleet.ending(sent[gone][name])
                fleet.replace("-c", str(len(WAYS)))
            assert_ended(fleet, sent[gone], lost=gone != "broker")


@pytest.mark.requirement("RET-01")
def test_a_message_that_cannot_be_encoded_becomes_a_dead_letter(separate: Made) -> None:
    fleet = separate()
    fleet.start("-c", "1")
    job = fleet.send("act_kept", "self.retry(args=[lambda: None], exc=OSError('odd'))")
    assert fleet.end(job) == "FAILURE"
    letter = fleet.bridge.dead_letters.get(job.id)
    assert (letter.cause, letter.attempt, len(letter.errors)) == ("invalid", 1, 1)
    assert len(fleet.runs(job)) == 1
    assert json.dumps(dict(letter.message))
