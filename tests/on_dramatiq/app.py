"""A Dramatiq application, as the tests' worker processes import it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

from ojs_bridge import Bridge, DeadLetter, Discard, Snooze
from ojs_bridge.dramatiq import OJSRetries

URL, QUEUE = os.environ["APP_BROKER"], os.environ["APP_QUEUE"]
RUNS, FAULT = Path(os.environ["APP_RUNS"]), os.environ.get("APP_FAULT", "")


class OtherRetries(Retries):
    """Another middleware that retries."""


def new_broker() -> dramatiq.Broker:
    """Make the broker; Redis takes a worker for dead as soon as APP_HEARTBEAT milliseconds have passed."""
    if URL.startswith("amqp"):
        return RabbitmqBroker(url=URL)
    heartbeat = int(os.environ.get("APP_HEARTBEAT", "60000"))
    return RedisBroker(url=URL, namespace=QUEUE, heartbeat_timeout=heartbeat, maintenance_chance=1_000_000)


broker = new_broker()
bridge = Bridge(
    retry={"initial_interval": "PT0.05S", "jitter": False},
    reservation=os.environ.get("APP_RESERVATION", "PT1M"),
)
broker.add_middleware(OJSRetries(bridge))
if FAULT == "two":
    broker.add_middleware(OtherRetries())
dramatiq.set_broker(broker)


def note(word: str) -> None:
    """Write a word and the time down, for the test to read."""
    with RUNS.open("a") as file:
        file.write(f"{word} {time.time()}\n")


def run(word: str) -> int:
    """Note a run of a job, and return how many there were."""
    note(word)
    return sum(line.startswith(f"{word} ") for line in RUNS.read_text().splitlines())


@dramatiq.actor(queue_name=QUEUE, ojs_retry={"max_attempts": -1} if FAULT == "policy" else {})
def flaky(word: str) -> None:
    """Fail twice, then succeed."""
    if run(word) <= 2:
        raise OSError("down")


@dramatiq.actor(queue_name=QUEUE, ojs_retry={"max_attempts": 3, "on_exhaustion": "dead_letter"})
def hopeless(word: str) -> None:
    """Always fail."""
    run(word)
    raise OSError("down")


@dramatiq.actor(queue_name=QUEUE)
def outspoken(word: str) -> None:
    """Raise the response that the job names."""
    again = run(word) > 1
    if word == "discard":
        raise Discard("a.b")
    if word == "dead":
        raise DeadLetter("a.b")
    if word == "snooze" and not again:
        raise Snooze("PT0.1S")


@dramatiq.actor(queue_name=QUEUE, time_limit=3000, max_retries=0, ojs_retry={"on_exhaustion": "dead_letter"})
def endless(word: str) -> None:
    """Run into the time limit."""
    run(word)
    while True:
        time.sleep(0.01)
