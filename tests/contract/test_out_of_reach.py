"""A worker that lives is out of reach: no job of it begins elsewhere, and its outcomes wait for the store."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ojs_bridge import DeadLetter
from tests import zombies
from tests.contract.conftest import SERVED, make
from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.notes import ELSEWHERE, client
from tests.contract.steps import Step, raises, sleeps, waits_for
from tests.servers import Valkey, eventually
from tests.servers.proxy import Proxy

Made = Callable[..., Fleet]


def through(proxy: Proxy, url: str) -> str:
    """Return the URL of a server through its proxy."""
    proxied = proxy.to(url)
    assert proxied != url
    return proxied


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", SERVED)
def test_a_worker_that_stands_still_beside_another_one_keeps_its_jobs(
    made: Made, kind: str, request: pytest.FixtureRequest
) -> None:
    """It has lost its connections, and cannot end the suspicion. On its own machine it is seen to live."""
    url = request.getfixturevalue(kind.partition("-")[2]).url
    with Proxy(port_of(url)) as proxy:
        fleet = made(kind, broker=through(proxy, url))
        zombie, go = fleet.start(2), f"{fleet.queue}-go"
        jobs = [fleet.send("act", waits_for(go, "first"), policy={"max_attempts": n}) for n in (1, 3)]
        await_runs(fleet, *jobs)
        processes = zombie.processes
        zombies.stop(processes, fleet.store)
        try:
            proxy.cut()
            proxy.mend()
            fleet.start(2).await_ready()
            assert end(fleet, fleet.send("act", "beside")).type == "job.completed"
            time.sleep(15)  # longer than any suspicion: for what must not happen
            client(fleet.settings.backend).set(go, "")
        finally:
            zombies.wake(processes)
        for job in jobs:
            assert end(fleet, job).type == "job.completed"
        eventually(lambda: not fleet.left(), seconds=60, what="an empty queue")
        for job in jobs:
            assert attempts(fleet, job) == [1]
            assert fleet.types(job).count("job.completed") == 1
        assert fleet.bridge.dead_letters.list().letters == ()


#: How a run ends -> its task, its step, and the event that tells its end.
ENDS: dict[str, tuple[str, Step, str]] = {
    "succeeded": ("act", "ran", "job.completed"),
    "buried": ("act_kept", raises(DeadLetter, "a", "b"), "job.discarded"),
    "retried": ("act", raises(OSError), "job.retrying"),
}


@pytest.mark.requirement("RET-12", "DLQ-001")
@pytest.mark.parametrize("kind", SERVED)
def test_what_a_run_says_waits_until_the_store_is_back(made: Made, kind: str) -> None:
    """It may have been taken over by the worker's own clock, and the store alone knows."""
    with Valkey() as server, Proxy(port_of(server.url)) as proxy:
        fleet = made(kind, store=through(proxy, server.url), insist=1)
        fleet.start(len(ENDS)).await_ready()
        jobs = {
            name: fleet.send(task, sleeps(7, step), "ok", policy={"max_attempts": 1 + (name == "retried")})
            for name, (task, step, _) in ENDS.items()
        }
        await_runs(fleet, *jobs.values())
        proxy.cut()
        time.sleep(14)  # for what must not happen: an end that nobody may tell
        for name, (_, _, told) in ENDS.items():
            assert told not in fleet.types(jobs[name]), name
        assert fleet.dead() == set()
        proxy.mend()
        for name, (_, _, told) in ENDS.items():
            eventually(lambda job=jobs[name], told=told: told in fleet.types(job), seconds=60, what=told)
        assert end(fleet, jobs["retried"]).type == "job.completed"
        eventually(lambda: not fleet.left(), seconds=60, what="an empty queue")
        found = {name: attempts(fleet, job) for name, job in jobs.items()}
        assert found == {"succeeded": [1], "buried": [1], "retried": [1, 2]}
        assert [letter.id for letter in fleet.bridge.dead_letters.list().letters] == [jobs["buried"]]
        assert fleet.dead() == set()


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_a_run_that_cannot_ask_gives_its_delivery_back_when_its_worker_stops(made: Made, kind: str) -> None:
    """Its attempt is lost. Nobody is told what it has said. The job succeeds once, at its next attempt."""
    with Valkey() as server, Proxy(port_of(server.url)) as proxy:
        fleet = made(kind, store=through(proxy, server.url), insist=1, reservation="PT10S", visibility=6)
        worker = fleet.start(1)
        worker.await_ready()
        job = fleet.send("act", sleeps(6, "first"), "second", followed_by=f"{fleet.queue}-next")
        await_runs(fleet, job)
        proxy.cut()
        time.sleep(9)  # it has ended, and waits
        assert "job.completed" not in fleet.types(job)
        assert worker.stop() == 0
        proxy.mend()
        fleet.start(2)
        assert end(fleet, job, seconds=90).type == "job.completed"
        eventually(lambda: not fleet.left(), seconds=60, what="an empty queue")
        assert attempts(fleet, job) == [1, 2]
        assert fleet.followed(f"{fleet.queue}-next") == ["second"]
        assert fleet.types(job).count("job.completed") == 1


@pytest.mark.requirement("RET-12", "RET-13")
@pytest.mark.parametrize("kind", SERVED)
def test_the_last_attempt_of_a_worker_that_is_cut_off_ends_as_it_says(
    made: Made, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """From another machine it looks dead for 12 s, and no attempt is left: nobody declares it lost."""
    url = request.getfixturevalue(kind.partition("-")[2]).url
    with ExitStack() as stack:
        server, broker = stack.enter_context(Valkey()), stack.enter_context(Proxy(port_of(url)))
        store = stack.enter_context(Proxy(port_of(server.url)))
        near = made(kind, broker=through(broker, url), store=through(store, server.url), insist=1)
        (tmp_path / "far").mkdir()
        far = make(request, kind, tmp_path / "far", queue=near.queue, store=server.url)
        stack.callback(far.close)
        # RabbitMQ refuses a Celery worker of the same name.
        named = ("-n", f"{near.queue}-far@%h") if near.framework == "celery" else ()
        near.start(4).await_ready()
        jobs = {
            (name, seconds): near.send(task, sleeps(seconds, step), "again", policy={"max_attempts": 1})
            for name, (task, step, _) in ENDS.items()
            for seconds in (8, 20)
            if name != "retried"
        }
        await_runs(near, *jobs.values())
        far.start(4, *named, **{ELSEWHERE: "1"}).await_ready()
        broker.cut()
        store.cut()
        time.sleep(12)  # three times as long as a suspicion
        broker.mend()
        store.mend()
        for (name, seconds), job in jobs.items():
            told = ENDS[name][2]
            eventually(
                lambda job=job, told=told: told in near.types(job), seconds=90, what=f"{name} {seconds}"
            )
        eventually(lambda: not near.left(), seconds=90, what="an empty queue")
        for (name, seconds), job in jobs.items():
            assert attempts(near, job) == [1], (name, seconds)
            assert near.types(job).count("job.completed") == (name == "succeeded"), (name, seconds)
        buried = {job for (name, _), job in jobs.items() if name == "buried"}
        assert {letter.id for letter in far.bridge.dead_letters.list().letters} == buried
