"""A Dramatiq application in shadow mode, as the tests' worker processes import it."""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from ojs_bridge.migration import shadow

QUEUE, RUNS = os.environ["APP_QUEUE"], Path(os.environ["APP_RUNS"])

broker = RedisBroker(url=os.environ["APP_BROKER"], namespace=QUEUE)
shadow(broker, policies={"hopeless": {"max_attempts": 2}})
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name=QUEUE, max_retries=2, min_backoff=10, max_backoff=10)
def hopeless(word: str) -> None:
    """Always fail."""
    with RUNS.open("a") as file:
        file.write(f"{word} 0\n")
    raise OSError("down")
