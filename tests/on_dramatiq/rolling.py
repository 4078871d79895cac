"""An application in two versions, the old one plain, the new one under a bridge, and its jobs' ledger.

APP_FAULT says which version a process is.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import dq_name
from dramatiq.middleware import CurrentMessage, GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend

URL, QUEUE = os.environ["APP_BROKER"], os.environ["APP_QUEUE"]
RUNS, STOP = Path(os.environ["APP_RUNS"]), Path(os.environ["APP_STOP"])
VERSION = os.environ["APP_FAULT"]

POLICIES: dict[str, Any] = {
    "*": {"initial_interval": "PT0.2S", "backoff_strategy": "none", "on_exhaustion": "dead_letter"},
    "narrow": {"max_attempts": 3},
    "patient": {"initial_interval": "PT8S", "jitter": False},
}
#: Seconds between two rounds of jobs.
PAUSE = 0.4
#: A producer waits while so many messages are there: on a slow machine the workers would never catch up.
MANY = 150

broker = RedisBroker(url=URL, namespace=QUEUE, heartbeat_timeout=20_000, maintenance_chance=1_000_000)
broker.add_middleware(CurrentMessage())
broker.add_middleware(GroupCallbacks(RedisBackend(url=URL)))
if VERSION == "new":
    from ojs_bridge import Bridge
    from ojs_bridge.dramatiq import install

    install(broker, Bridge(park_after="PT1S"), policies=POLICIES)
dramatiq.set_broker(broker)


def note(*words: object) -> None:
    """Write a line into the ledger."""
    with RUNS.open("a") as ledger:
        ledger.write(" ".join(map(str, words)) + "\n")


def run(word: str) -> int:
    """Note a run of a job and its native counter, which is returned."""
    message = CurrentMessage.get_current_message()
    assert message is not None
    retries: int = message.options.get("retries", 0)
    note("run", word, VERSION, retries, time.time(), "ojs" in message.options)
    return retries


def actor(name: str, fails: int, **options: Any) -> dramatiq.Actor[..., Any]:
    """Declare an actor whose jobs fail so many times."""

    def fail_or_end(word: str) -> None:
        if run(word) < fails:
            raise OSError("down")
        note("end", word)

    options = {"min_backoff": 150, "max_backoff": 300, **options}
    return dramatiq.actor(fail_or_end, actor_name=name, queue_name=QUEUE, broker=broker, **options)


instant = actor("instant", 0)
flaky = actor("flaky", 2, max_retries=4)
hopeless = actor("hopeless", 1000, max_retries=4)
#: Six runs natively, three under its policy.
narrow = actor("narrow", 1000, max_retries=5)
patient = actor("patient", 1, min_backoff=1500, max_backoff=60_000)


def send_round(name: str) -> None:
    """Send one job of each kind, and one with a policy of its own, which plain workers do not know."""
    for kind in (instant, flaky, hopeless, narrow, patient):
        kind.send(f"{name}-{kind.actor_name}")
    hopeless.send_with_options(args=(f"{name}-wishing",), ojs_retry={"max_attempts": 3})

    def step(kind: dramatiq.Actor[..., Any], word: str) -> dramatiq.Message[Any]:
        return kind.message_with_options(args=(f"{name}-{word}",), pipe_ignore=True)

    dramatiq.pipeline([step(instant, "step1"), step(flaky, "step2"), step(flaky, "step3")]).run()
    group = dramatiq.group([step(flaky, "member1"), step(instant, "member2"), step(flaky, "member3")])
    group.add_completion_callback(step(instant, "callback"))
    group.run()
    note("sent", name)


def produce() -> None:
    """Send round after round until somebody says stop."""
    for n in itertools.count():
        while backlog() > MANY and not STOP.exists():
            time.sleep(PAUSE)
        if STOP.exists():
            return
        send_round(f"{VERSION}{n}")
        time.sleep(PAUSE)


def backlog() -> int:
    """The number of messages in the queue, with the delayed ones."""
    return sum(broker.client.hlen(f"{QUEUE}:{name}.msgs") for name in (QUEUE, dq_name(QUEUE)))
