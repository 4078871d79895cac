"""The Dramatiq broker and actors that are measured, with the framework's defaults.

As a program it is a worker whose queue is in its own memory, and which jobs its standard input counts.
"""

from __future__ import annotations

import logging
import sys

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Retries, default_middleware

from benchmarks.side import Counts, Side
from benchmarks.work import call_the_other_side
from ojs_bridge.dramatiq import OJSRetries

side = Side.from_env()
counts = Counts(side.counts)
logging.getLogger("dramatiq").setLevel(logging.CRITICAL)

middleware = [kind() for kind in default_middleware if kind is not Retries]
broker: dramatiq.Broker
if side.broker is None:
    broker = StubBroker(middleware=middleware)
elif side.broker.startswith("amqp"):
    broker = RabbitmqBroker(url=side.broker, middleware=middleware)
else:
    broker = RedisBroker(url=side.broker, middleware=middleware)
if side.bridged:
    policy = {
        "max_attempts": side.runs, "initial_interval": "PT0.001S", "backoff_strategy": "none",
        "jitter": False,
    }  # fmt: skip
    broker.add_middleware(OJSRetries(side.bridge(policy)))
else:
    broker.add_middleware(Retries(max_retries=side.runs - 1, min_backoff=1, max_backoff=1))
dramatiq.set_broker(broker)


def succeeds() -> None:
    """Do nothing."""
    counts.note()


def fails() -> None:
    """Fail, every time."""
    counts.note()
    call_the_other_side()


actors = [
    dramatiq.actor(
        fails if side.fails else succeeds, actor_name=f"{name}.job", queue_name=name, broker=broker
    )
    for name in side.queue_names
]


def main() -> None:
    """Work in this process: each line that is read brings so many jobs, all at once."""
    assert isinstance(broker, StubBroker)
    worker = dramatiq.Worker(broker, worker_threads=side.width)
    worker.start()
    for line in sys.stdin:
        bodies = [actors[n % len(actors)].message().encode() for n in range(int(line))]
        worker.pause()
        for n, body in enumerate(bodies):
            broker.queues[side.queue_names[n % len(actors)]].put(body)
        worker.resume()


if __name__ == "__main__":
    main()
