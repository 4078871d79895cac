"""The sides of a Dramatiq comparison: workers in one process, which end a slice of jobs in turn."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries, default_middleware

from benchmarks.sides import Result
from benchmarks.tracing import bridge_of
from benchmarks.work import call_the_other_side
from ojs_bridge.dramatiq import OJSRetries

KIND, URL, STORE = os.environ["BENCH_KIND"], os.environ.get("BENCH_URL"), os.environ.get("BENCH_STORE")
JOBS, ROUNDS = int(os.environ["BENCH_JOBS"]), int(os.environ["BENCH_ROUNDS"])
THREADS = int(os.environ.get("BENCH_THREADS", "8"))
RUNS = 4 if KIND == "fails" else 1
POLICY = {"max_attempts": RUNS, "initial_interval": "PT0.001S", "backoff_strategy": "none", "jitter": False}


class Side:
    """A worker of its own; a slice lasts from its first job to the last run of its last job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._broker = _broker(name, name)
        self._lock = threading.Lock()
        self._runs = 0
        self._begun = self._result = (0.0, 0.0)
        self._ended = threading.Event()
        self._actor = dramatiq.actor(self._run, actor_name=KIND, broker=self._broker)
        dramatiq.Worker(self._broker, worker_threads=THREADS).start()

    def slice(self) -> Result:
        """Have the worker end so many jobs, which are there all at once."""
        self._runs = 0
        self._ended.clear()
        self._fill()
        if not self._ended.wait(120):
            raise SystemExit(f"only {self._runs} runs of {self._name} ended")
        wall, cpu = (end - begin for begin, end in zip(self._begun, self._result, strict=True))
        return Result(JOBS, wall, cpu)

    def _run(self) -> None:
        with self._lock:
            if self._runs == 0:
                self._begun = (time.perf_counter(), time.process_time())
            self._runs += 1
            if self._runs == JOBS * RUNS:
                self._result = (time.perf_counter(), time.process_time())
                self._ended.set()
        if KIND == "fails":
            call_the_other_side()

    def _fill(self) -> None:
        """Put all jobs into the worker's queue at once; otherwise it would begin before the last is there."""
        if URL is None:
            for data in [self._actor.message().encode() for _ in range(JOBS)]:
                self._broker.queues["default"].put(data)
            return
        stock = _broker("native", f"stock-{self._name}")
        stock.declare_queue("default")
        for _ in range(JOBS):
            stock.enqueue(self._actor.message())
        there, here = f"{stock.namespace}:default", f"{self._broker.namespace}:default"
        self._until_acknowledged(stock.client, f"{here}.msgs")
        stock.client.rename(f"{there}.msgs", f"{here}.msgs")
        stock.client.rename(there, here)
        stock.close()

    def _until_acknowledged(self, client: Any, messages: str) -> None:
        deadline = time.monotonic() + 60
        while client.exists(messages):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._name} has not acknowledged {client.hgetall(messages)}")
            time.sleep(0.005)


def _broker(side: str, namespace: str) -> Any:
    middleware = [m() for m in default_middleware if m is not Retries]
    if URL is None:
        broker: dramatiq.Broker = StubBroker(middleware=middleware)
    else:
        broker = RedisBroker(url=URL, namespace=namespace, middleware=middleware)
    if side == "native":
        broker.add_middleware(Retries(max_retries=RUNS - 1, min_backoff=1, max_backoff=1))
    else:
        broker.add_middleware(OJSRetries(bridge_of(side, STORE, POLICY)))
    return broker


def main() -> None:
    """Run the slices of all sides in turn, and print what each took."""
    logging.disable(logging.CRITICAL)
    if URL is not None:
        redis.Redis.from_url(URL).flushall()
    sides = [Side(name) for name in os.environ["BENCH_SIDES"].split(",")]
    results: list[list[Any]] = [[] for _ in sides]
    for n in range(ROUNDS):
        for k in range(len(sides)):
            at = (k + n) % len(sides)
            results[at].append(vars(sides[at].slice()))
    print(json.dumps(results), flush=True)
    os._exit(0)


main()
