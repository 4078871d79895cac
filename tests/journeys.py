"""Journeys of jobs: what the package calls in real runs, between one moment of a job's life and another.

`scripts/journeys` prints them, and `tests/test_architecture.py` limits them. Make them in a process of their
own: the threads, caches and imports of other tests are not in them then.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import dramatiq
from celery import Celery
from dramatiq.brokers.stub import StubBroker
from starlette.testclient import TestClient

import ojs_bridge
from ojs_bridge import Bridge
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.http.app import guarded
from ojs_bridge.http.guarding import LOOPBACK, Access
from tests.on_celery.fleet import worker_here
from tests.servers import Valkey
from tests.servers.process import eventually

PACKAGE = f"{Path(ojs_bridge.__file__).parent}/"
#: Python 3.12 calls no function for these; a generator expression is called by all versions.
INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>"}
SCHEDULER = "ojs-scheduler"
#: How many functions of the package a scheduler is within when it rests: two that keep it, and its round.
RESTING = 3
POLICY = {"max_attempts": 5, "initial_interval": "PT0.2S", "backoff_strategy": "none", "jitter": False}
#: With it a retry of that policy waits in the store; without it, in the broker.
PARKED = {"park_after": "PT0.1S"}
#: And with this a failing job dies at once.
DIES = {"max_attempts": 1, "on_exhaustion": "dead_letter"}


class Stop(NamedTuple):
    """A call of a function of the package; `depth` is the number of the package's functions that it is in."""

    thread: str
    file: str
    function: str
    line: int
    depth: int


class Figures(NamedTuple):
    """How far a reader walks: the files, the functions, and the moves from file to file."""

    files: int
    functions: int
    moves: int


def figures(stops: list[Stop]) -> Figures:
    """Count a journey's stops; a move leads from a call to the next one of its thread, in another file."""
    moves = sum(a.file != b.file for a, b in pairwise(stops) if a.thread == b.thread)
    return Figures(len({stop.file for stop in stops}), len({stop[1:4] for stop in stops}), moves)


@dataclass
class Trace:
    """The calls while it is on, in this thread and in those that started while it was on watch."""

    calls: list[Stop] = field(default_factory=list)
    is_on: bool = False

    @contextmanager
    def on_watch(self) -> Iterator[None]:
        """Watch this thread, and the threads that start in here."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and is_ours(frame) and code.co_name not in INLINED:
            name = getattr(code, "co_qualname", code.co_name).replace(".<locals>", "")
            place = code.co_filename.removeprefix(PACKAGE), name, code.co_firstlineno
            self.calls.append(Stop(threading.current_thread().name, *place, depth_of(frame)))

    def stops(self) -> list[Stop]:
        """Return the calls on the job's path, thread by thread.

        A thread goes round and round. A round is a call from outside the package, with all that it calls; one
        that repeats an earlier one to the letter counts once. The bridge's own threads (`ojs-…`), which serve
        all jobs at once, are not on the path, but for the rounds in which the scheduler publishes: those that
        reach an adapter.
        """
        path: dict[tuple[Stop, ...], None] = {}
        for thread in dict.fromkeys(stop.thread for stop in self.calls):
            for made in rounds([stop for stop in self.calls if stop.thread == thread]):
                publishes = any(stop.file.startswith(("celery/", "dramatiq/")) for stop in made)
                if not thread.startswith("ojs-") or (thread == SCHEDULER and publishes):
                    path[made] = None
        return [stop for made in path for stop in made]


def is_ours(frame: FrameType) -> bool:
    """Return whether the package has the function of a frame."""
    return frame.f_code.co_filename.startswith(PACKAGE)


def depth_of(frame: FrameType | None) -> int:
    """Return how many functions of the package a frame is in, itself among them."""
    depth = 0
    while frame is not None:
        depth, frame = depth + is_ours(frame), frame.f_back
    return depth


def rounds(calls: list[Stop]) -> Iterator[tuple[Stop, ...]]:
    """Yield the calls of a thread, each outermost one with all that it calls."""
    outermost = min(stop.depth for stop in calls)
    starts = [n for n, stop in enumerate(calls) if n == 0 or stop.depth == outermost]
    for start, end in pairwise([*starts, len(calls)]):
        yield tuple(calls[start:end])


@dataclass
class Handler:
    """A job's handler: each run waits until the journey lets it go on, and the first two may fail."""

    fails: bool
    runs: int = 0
    _begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _goes_on: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self) -> None:
        """Run, and fail if it should."""
        self._begun.release()
        self._goes_on.acquire()
        self.runs += 1
        if self.fails and self.runs < 3:
            raise OSError("down")

    def follow(self, trace: Trace) -> None:
        """Trace what is called between the second run and the third; the first one fills the caches."""
        for is_on in (False, True, False):
            assert self._begun.acquire(timeout=60)
            eventually(scheduler_rests)
            trace.is_on = is_on
            self._goes_on.release()


def scheduler_rests() -> bool:
    """Return whether no scheduler is in the midst of a round: it waits there for the next one."""
    frames = sys._current_frames()
    threads = [thread.ident for thread in threading.enumerate() if thread.name == SCHEDULER]
    return all(depth_of(frames.get(ident or 0)) <= RESTING for ident in threads)


def celery_runs(trace: Trace, bridge: Bridge, *, fails: bool = True, broker: str = "memory://") -> None:
    """Follow a task, or three that succeed, on a solo worker."""
    app, handler = celery_app(broker), Handler(fails)

    @app.task(shared=False, name="job")
    def task() -> None:
        handler.run()

    install(app, bridge, policies={"*": POLICY})
    for _ in range(1 if fails else 3):
        task.delay()

    def work() -> None:
        with worker_here(app, pool="solo"):
            threading.Event().wait()

    # It ends with the process: to stop it would take seconds.
    threading.Thread(target=work, daemon=True).start()
    handler.follow(trace)


def celery_on_redis(trace: Trace, bridge: Bridge) -> None:
    """Follow a task that fails, and whose messages are on a server of its own."""
    server = Valkey()
    server.start()
    # The worker ends with the process, and needs its broker until then.
    atexit.register(server.stop)
    celery_runs(trace, bridge, broker=server.url)


def dramatiq_runs(trace: Trace, bridge: Bridge, *, fails: bool = True) -> None:
    """Follow a message, or three that succeed, on a worker of one thread, whose consumers wait for long."""
    broker, handler = dramatiq_broker(bridge), Handler(fails)

    @dramatiq.actor(broker=broker, actor_name="job", ojs_retry=POLICY)
    def job() -> None:
        handler.run()

    for _ in range(1 if fails else 3):
        job.send()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=60_000)
    # All are received before the first run ends.
    worker.queue_prefetch = 3
    worker.start()
    handler.follow(trace)


def replay(trace: Trace, bridge: Bridge) -> None:
    """Trace a replay by the HTTP API, from the request to the answer, after another one."""
    broker = dramatiq_broker(bridge)

    @dramatiq.actor(broker=broker, actor_name="job", ojs_retry={**POLICY, **DIES})
    def job() -> None:
        raise OSError("down")

    ids = [job.send().message_id for _ in range(2)]
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=100)
    worker.start()
    eventually(lambda: len(bridge.dead_letters.list().letters) == len(ids))
    worker.stop()
    with TestClient(guarded(bridge, Access(hosts=LOOPBACK)), base_url="http://127.0.0.1") as client:
        for letter in ids:
            trace.is_on = letter == ids[-1]
            answer = client.post(f"/ojs/v1/dead-letter/{letter}/retry", headers={"X-OJS-Bridge": "1"})
            assert answer.status_code == 200, answer.text
        trace.is_on = False


def declaration(trace: Trace, declare: Callable[[str], object]) -> None:
    """Trace the declaration of a task or actor, after another one."""
    declare("first")
    trace.is_on = True
    declare("second")
    trace.is_on = False


def actor_declaration(trace: Trace, bridge: Bridge) -> None:
    """Declare an actor that has a policy."""
    actor = partial(dramatiq.actor, broker=dramatiq_broker(bridge), ojs_retry=POLICY)
    declaration(trace, lambda name: actor(actor_name=name)(nothing))


def task_declaration(trace: Trace, bridge: Bridge) -> None:
    """Declare a task that has a policy, in an app that makes it at once."""
    app = celery_app()
    install(app, bridge, policies={})
    app.finalize()
    declaration(trace, lambda name: ojs_task(app, name=name, retry=POLICY)(nothing))


def nothing() -> None:
    """Do nothing."""


def celery_app(broker: str = "memory://") -> Celery:
    """Return an app, whose broker is in memory unless it has another."""
    app = Celery("journeys", broker=broker, backend="cache+memory://", set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_default_queue=f"journey-{id(app)}",
        broker_transport_options={"polling_interval": 0.05},
        worker_timer_precision=0.05,
        worker_hijack_root_logger=False,
    )
    return app


def dramatiq_broker(bridge: Bridge) -> StubBroker:
    """Return a broker in memory."""
    broker = StubBroker()
    broker.add_middleware(OJSRetries(bridge))
    return broker


#: Each journey, and the options of its bridge.
JOURNEYS: dict[str, tuple[Callable[[Trace, Bridge], None], dict[str, Any]]] = {
    "Celery: a failing run, retried": (celery_runs, {}),
    "Celery: a failing run, parked": (celery_runs, PARKED),
    "Celery: a success": (partial(celery_runs, fails=False), {}),
    "Celery on Redis: a failing run, retried": (celery_on_redis, {}),
    "Celery: a task's policy": (task_declaration, {}),
    "Dramatiq: a failing run, retried": (dramatiq_runs, {}),
    "Dramatiq: a failing run, parked": (dramatiq_runs, PARKED),
    "Dramatiq: a success": (partial(dramatiq_runs, fails=False), {}),
    "Dramatiq: an actor's policy": (actor_declaration, {}),
    "HTTP: a replay": (replay, {}),
}


def travelled(name: str) -> list[Stop]:
    """Make a journey with a new store, and return its stops."""
    journey, options = JOURNEYS[name]
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder, trace.on_watch():
        bridge = Bridge(f"sqlite:///{folder}/ojs.db", **options)
        journey(trace, bridge)
        bridge.stop()
    return trace.stops()


def show(name: str, stops: list[Stop]) -> None:
    """Print a journey, one line a stop, each beneath the one that calls it."""
    print("\n{}: {} files, {} functions, {} moves".format(name, *figures(stops)))
    for thread, called in groupby(stops, lambda stop: stop.thread):
        made = [*called]
        outermost = min(stop.depth for stop in made)
        print(f"  [{thread}]")
        for stop in made:
            print(f"  {'  ' * (stop.depth - outermost)}{stop.file}:{stop.function}")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asked = [name for name in JOURNEYS if all(word in name for word in sys.argv[1:] if word != "--json")]
    found = {name: travelled(name) for name in asked}
    if "--json" in sys.argv:
        print(json.dumps(found))
    else:
        for name, stops in found.items():
            show(name, stops)
