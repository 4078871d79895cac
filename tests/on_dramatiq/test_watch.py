"""A worker's threads live, or its process ends: no job waits for a consumer that has died."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name
from dramatiq.threading import raise_thread_exception
from dramatiq.worker import ConsumerThread, WorkerThread
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge.dramatiq import watch
from tests.on_dramatiq.application import Application
from tests.on_dramatiq.fleet import Fleet
from tests.servers import Valkey, eventually

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.1)


@pytest.fixture
def mortal() -> Iterator[Valkey]:
    """A Valkey of the test's own."""
    with Valkey() as server:
        yield server


def fails_once(n: int) -> None:
    if n == 1:
        raise OSError("down")


def freeze(server: Valkey) -> Callable[[], None]:
    os.kill(server.pid, signal.SIGSTOP)
    return lambda: os.kill(server.pid, signal.SIGCONT)


def fill(server: Valkey) -> Callable[[], None]:
    client = redis.Redis.from_url(server.url)
    client.config_set("maxmemory", "1")
    return lambda: client.config_set("maxmemory", "0")


@pytest.mark.parametrize("trouble", [freeze, fill])
def test_retries_come_after_redis_did_not_answer(
    mortal: Valkey, unique: str, tmp_path: Path, trouble: Callable[[Valkey], Callable[[], None]]
) -> None:
    """A frozen server carries out later what its client has given up: only a store drops the second copy."""
    client = redis.Redis.from_url(mortal.url, socket_timeout=1, retry=RedisRetry(NoBackoff(), 0))
    store, policy = f"sqlite:///{tmp_path}/ojs.db", {"initial_interval": "PT1S", "jitter": False}
    fleet = Fleet(RedisBroker(client=client), unique, store=store, retry=policy)
    actor = fleet.actor(fails_once)
    with fleet.working(threads=2) as worker:
        jobs = [fleet.send(actor) for _ in range(6)]
        eventually(lambda: all("job.retrying" in fleet.heard.types(job.id) for job in jobs))
        before = [worker.consumers[unique], worker.consumers[dq_name(unique)]]
        ends = trouble(mortal)
        time.sleep(4)
        ends()
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
        assert all(thread.is_alive() for thread in before)
    assert [len(job.runs) for job in jobs] == [2] * 6
    assert fleet.left() == 0


def test_threads_that_die_of_whatever_it_is_are_begun_again(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique, retry={"initial_interval": "PT1S", "jitter": False})
    actor = fleet.actor(fails_once)
    with fleet.working(threads=2) as worker:
        waiting = fleet.send(actor)
        eventually(lambda: "job.retrying" in fleet.heard.types(waiting.id))
        threads = [*worker.consumers.values(), *worker.workers]
        kill(threads)
        jobs = [waiting, *(fleet.send(actor) for _ in range(3))]
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
        assert len(worker.consumers) + len(worker.workers) == len(threads)
    assert [len(job.runs) for job in jobs] == [2] * 4
    assert fleet.left() == 0


def test_threads_that_die_in_a_pause_are_begun_again_and_stay_paused(stub: StubBroker, unique: str) -> None:
    fleet = Fleet(stub, unique)
    actor = fleet.actor(lambda n: None)
    with fleet.working(threads=1) as worker:
        worker.pause()
        threads = [*worker.consumers.values(), *worker.workers]
        kill(threads)
        eventually(lambda: all(t.is_alive() for t in (*worker.consumers.values(), *worker.workers)))
        job = fleet.send(actor)
        time.sleep(0.3)
        assert job.runs == []
        worker.resume()
        assert fleet.end(job).type == "job.completed"


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kinds", [[ConsumerThread], [WorkerThread], [ConsumerThread, WorkerThread]])
def test_threads_that_cannot_be_started_are_begun_again_as_soon_as_they_can(
    broker: dramatiq.Broker, unique: str, kinds: list[type[threading.Thread]]
) -> None:
    """A process at its limit of memory starts no thread; meanwhile the dead ones keep their places."""
    fleet = Fleet(broker, unique)
    actor = fleet.actor(lambda n: None)
    with fleet.working(threads=2) as worker:
        threads = [*worker.consumers.values(), *worker.workers]
        with pytest.MonkeyPatch.context() as limit:
            for kind in kinds:
                limit.setattr(kind, "start", no_thread)
            # Dramatiq puts this one in its place before it starts it.
            with suppress(RuntimeError):
                broker.declare_queue(f"{unique}-late")
            kill([thread for thread in threads if isinstance(thread, tuple(kinds))])
            jobs = [fleet.send(actor) for _ in range(5)]
            time.sleep(0.5)
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
        eventually(lambda: all(each.is_alive() for each in (*worker.consumers.values(), *worker.workers)))
    assert fleet.left() == 0


@pytest.mark.parametrize("kind", [ConsumerThread, WorkerThread])
def test_threads_that_will_not_live_end_the_process(
    stub: StubBroker, unique: str, monkeypatch: pytest.MonkeyPatch, kind: type[threading.Thread]
) -> None:
    """Its supervisor starts another one, which may have memory for its threads."""
    monkeypatch.setattr(watch, "GIVE_UP_SECONDS", 0.5)
    fleet = Fleet(stub, unique)
    fleet.declare(lambda: None)
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with pytest.raises(SystemExit), fleet.working(threads=1) as worker:
            monkeypatch.setattr(kind, "start", no_thread)
            kill([each for each in (*worker.consumers.values(), *worker.workers) if isinstance(each, kind)])
            eventually(lambda: told)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]


def kill(threads: list[Any]) -> None:
    """Have threads die.

    Pika starts a thread when it connects. Up to Python 3.11 an exception that is aimed at a thread may strike
    the thread that this one is starting.
    """
    eventually(lambda: all(getattr(thread, "consumer", thread) is not None for thread in threads))
    for thread in threads:
        assert thread.ident is not None
        raise_thread_exception(thread.ident, SystemExit)
    eventually(lambda: not any(thread.is_alive() for thread in threads))


def test_consumers_that_will_not_live_end_the_process(
    stub: StubBroker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GIVE_UP_SECONDS", 0.5)
    fleet = Fleet(stub, unique)
    fleet.declare(lambda: None)
    told: list[int] = []

    def dies(*args: Any, **options: Any) -> Any:
        raise SystemExit

    before = signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    try:
        with pytest.raises(SystemExit), fleet.working(threads=1):
            stub.consume = dies  # type: ignore[method-assign]
            for thread in fleet_threads(fleet):
                raise_thread_exception(thread, SystemExit)
            eventually(lambda: told)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM]


def fleet_threads(fleet: Fleet) -> list[int]:
    """The ids of the consumer threads of a fleet's only worker."""
    (worker,) = fleet.retries._watches
    return [thread.ident for thread in worker.consumers.values()]


def by_fork_server(folder: Path) -> dict[str, Any]:
    """Have the command start its workers as Python 3.14 and newer do."""
    command = folder / "dramatiq-by-fork-server"
    command.write_text(
        f"#!{sys.executable}\nimport multiprocessing, sys\nfrom dramatiq.cli import main\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('forkserver')\n"
        "    sys.exit(main())\n"
    )
    command.chmod(0o755)
    return {"command": str(command), "fresh": True}


@pytest.mark.parametrize("starting", [lambda _: {}, by_fork_server], ids=["as ever", "fork server"])
def test_a_worker_whose_main_process_was_killed_ends_and_its_jobs_run_elsewhere(
    valkey: Valkey, unique: str, tmp_path: Path, starting: Callable[[Path], dict[str, Any]]
) -> None:
    settings = {"heartbeat": "2000", "reservation": "PT3S"}
    app = Application(valkey.url, unique, tmp_path, "tests.on_dramatiq.app", **settings)
    worker = app.start(**starting(tmp_path))
    eventually(lambda: "ready for action" in app.log.read_text(), what="a ready worker")
    # The main process stops reading the worker's log; the worker's threads block when the pipe is full.
    os.kill(worker.pid, signal.SIGSTOP)
    app.produce("for n in range(100): hopeless.send(f'hopeless-{n}')")
    eventually(lambda: _stands_still(app), what="a full pipe")
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    eventually(lambda: not _lives(worker.pid), seconds=60, what="the end of the orphan")
    with app.working():
        eventually(lambda: len(app.dead()) == 1 and len(app.letters()) == 100, seconds=60, what="the letters")


def _stands_still(app: Application) -> bool:
    before = app.runs.stat().st_size
    time.sleep(2)
    return 0 < before == app.runs.stat().st_size


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
