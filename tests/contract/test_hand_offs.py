"""Servers that die exactly when a job is to be sent on: the job still ends as its policy says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from ojs_bridge import DeadLetter, Discard
from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, await_runs, end, gaps
from tests.contract.steps import raises, sleeps
from tests.servers import RabbitMQ, Server, Valkey, eventually

Made = Callable[..., Fleet]
#: How a job is sent on -> its task, its first step, and the policy that asks for it.
WAYS = {
    "retried": ("act_kept", raises(OSError), {"initial_interval": "PT0.5S"}),
    "parked": ("act_kept", raises(OSError), {"initial_interval": "PT15S", "max_attempts": 2}),
    "buried": ("act_kept", raises(DeadLetter, "a", "b"), {}),
    "discarded": ("act", raises(Discard, "a", "b"), {}),
    "succeeded": ("act", "ran", {}),
}
#: The databases of the stores, by what goes away.
VICTIMS = {"broker": "0", "store": "1", "both": "2"}


@contextmanager
def frozen(fleet: Fleet, jobs: Iterable[str]) -> Iterator[None]:
    """Stop the processes that run jobs for as long as the context lasts, in the middle of a run."""
    await_runs(fleet, *jobs)
    pids = {fleet.runs(job)[0].pid for job in jobs}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    yield
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def sent_every_way(fleet: Fleet) -> dict[str, str]:
    return {
        name: fleet.send(task, sleeps(5, step), step, policy={"max_attempts": 3, **policy})
        for name, (task, step, policy) in WAYS.items()
    }


def assert_ended(fleet: Fleet, sent: dict[str, str], *, lost: bool) -> None:
    """Every job ended as its policy says, in no more starts than that; a lost attempt is one of them."""
    for name, job in sent.items():
        ending = "job.completed" if name == "succeeded" else "job.discarded"
        assert end(fleet, job, seconds=90).type == ending, name
    # What is published leaves the store a moment later, and its job may have ended by then.
    # A worker that was killed in between had claimed it for a minute.
    eventually(lambda: fleet.bridge.retries.count() == 0, seconds=90, what="no parked retry")
    starts = {name: attempts(fleet, job) for name, job in sent.items()}
    assert (starts["retried"], starts["parked"]) == ([1, 2, 3], [1, 2])
    assert min(gaps(fleet, sent["retried"])) >= 0.5
    assert min(gaps(fleet, sent["parked"])) >= 15
    for name in ("buried", "discarded", "succeeded"):
        assert starts[name] in ([[1], [1, 2]] if lost else [[1]]), name
    buried = {sent[name] for name in ("retried", "parked", "buried")}
    eventually(lambda: kept(fleet) == buried, what="the dead letters")


def kept(fleet: Fleet) -> set[str]:
    """The dead letters in the store and in the broker's dead queue."""
    return fleet.dead() | {letter.id for letter in fleet.bridge.dead_letters.list().letters}


@pytest.mark.requirement("RET-01", "RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_what_is_sent_on_while_a_server_is_down_ends_as_its_policy_says(
    made: Made, kind: str, request: pytest.FixtureRequest
) -> None:
    up: Server = request.getfixturevalue(kind.partition("-")[2])
    with type(up)() as broker, Valkey() as store, Valkey() as good_store, ExitStack() as stack:
        fleets = {
            gone: made(
                kind,
                broker=(up if gone == "store" else broker).url,
                store=(good_store if gone == "broker" else store).url[:-1] + database,
                reservation="PT4S",
                visibility=6,
                park_after="PT2S",
                insist=2,
            )
            for gone, database in VICTIMS.items()
        }
        for fleet in fleets.values():
            fleet.start(len(WAYS))
        for fleet in fleets.values():
            fleet.worker.await_ready()
            if isinstance(broker, RabbitMQ) and fleet.settings.broker == broker.url:
                for queue in fleet.queues:
                    broker.await_declared(queue)
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
            # Celery 5.7 ends workers that lose their connection to Valkey.
            if gone != "store" and kind == "celery-valkey":
                if gone == "broker":  # no attempt is lost, so that the kill must not come before their ends
                    for name in ("buried", "discarded", "succeeded"):
                        end(fleet, sent[gone][name])
                fleet.replace(len(WAYS))
            assert_ended(fleet, sent[gone], lost=gone != "broker")
