"""One side of the Dramatiq comparison: a worker in this process ends a number of jobs."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries, default_middleware

from benchmarks.work import call_the_other_side
from ojs_bridge import Bridge
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.migration import shadow

SIDE, KIND, URL = os.environ["BENCH_SIDE"], os.environ["BENCH_KIND"], os.environ.get("BENCH_URL")
JOBS, STORE = int(os.environ["BENCH_JOBS"]), os.environ.get("BENCH_STORE")
RUNS = 4 if KIND == "fails" else 1
THREADS = int(os.environ.get("BENCH_THREADS", "8"))

logging.disable(logging.CRITICAL)


def _broker() -> dramatiq.Broker:
    middleware = [m() for m in default_middleware if m is not Retries]
    broker = RedisBroker(url=URL, middleware=middleware) if URL else StubBroker(middleware=middleware)
    policy = {
        "max_attempts": RUNS,
        "initial_interval": "PT0.001S",
        "backoff_strategy": "none",
        "jitter": False,
    }
    if SIDE in ("native", "shadowed"):
        broker.add_middleware(Retries(max_retries=RUNS - 1, min_backoff=1, max_backoff=1))
    if SIDE == "shadowed":
        shadow(broker, Bridge(STORE), policies={"*": policy})
    elif SIDE != "native":
        broker.add_middleware(OJSRetries(Bridge(STORE if SIDE == "reserved" else None, policy)))
    return broker


broker = _broker()
dramatiq.set_broker(broker)
lock = threading.Lock()
runs = 0
ended = threading.Event()


def _count() -> None:
    global runs  # noqa: PLW0603 - the whole process is one measurement
    with lock:
        runs += 1
        if runs >= JOBS * RUNS:
            ended.set()


@dramatiq.actor
def succeeds() -> None:
    """Do nothing."""
    _count()


@dramatiq.actor
def fails() -> None:
    """Fail, every time."""
    _count()
    call_the_other_side()


def main() -> None:
    """Enqueue first, then measure from the worker's start to the last job's end."""
    actor = succeeds if KIND == "succeeds" else fails
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=THREADS)
    for _ in range(JOBS):
        actor.send()
    cpu, wall = time.process_time(), time.perf_counter()
    worker.start()
    if not ended.wait(300):
        raise SystemExit(f"only {runs} runs ended")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    worker.stop()
    print(json.dumps({"jobs": JOBS, "wall": wall, "cpu": cpu}))


main()
