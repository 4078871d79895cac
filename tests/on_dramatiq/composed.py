"""Members of pipelines and groups that stop where their arguments say, for their worker to be killed."""

from __future__ import annotations

import os
import time
from typing import Any

import dramatiq
from dramatiq.middleware import GroupCallbacks, Middleware
from dramatiq.rate_limits.backends import RedisBackend

from ojs_bridge import DeadLetter
from tests.on_dramatiq.app import QUEUE, bridge, broker, note, run

#: Due so late that it is parked.
PARKED = {"initial_interval": "PT2S", "backoff_strategy": "none"}


def halt(message: Any, place: str) -> None:
    """Stop, the first time that a job comes to the place it names."""
    word, where = (*message.args, "", "")[:2]
    if where == place and run(f"{word}-halted") == 1:
        time.sleep(120)


class Halts(Middleware):
    """Stops jobs before what follows them is sent, or before they are acknowledged."""

    def after_process_message(self, broker: Any, message: Any, *, exception: Any = None, **_: Any) -> None:
        """Stop before GroupCallbacks and Pipelines have heard of a success."""
        if exception is None:
            halt(message, "before what follows")

    def before_ack(self, broker: Any, message: Any) -> None:
        """Stop when they have."""
        if not message.queue_name.endswith(".DQ"):
            halt(message, "before the acknowledgement")


broker.add_middleware(GroupCallbacks(RedisBackend(url=os.environ["APP_LIMITS"])))
broker.add_middleware(Halts())


@dramatiq.actor(queue_name=QUEUE, ojs_retry={"max_attempts": 4})
def member(word: str, fault: str) -> str:
    """Do as the fault says at the first run."""

    again = run(word) > 1
    if fault == "at work":
        halt(dramatiq.Message(QUEUE, "member", (word, fault), {}, {}), fault)
    if again:
        return word
    if fault == "replayed":
        raise DeadLetter("a.b")
    if fault in ("retried", "parked"):
        raise OSError("down")
    return word


@dramatiq.actor(queue_name=QUEUE)
def follows(word: str) -> None:
    """Follow a member of a pipeline."""
    note(f"{word}-followed")


@dramatiq.actor(queue_name=QUEUE)
def completes(word: str) -> None:
    """Follow a whole group."""
    note(f"{word}-followed")


def replay_all() -> None:
    """Replay every dead letter."""
    for letter in bridge.dead_letters.list().letters:
        bridge.dead_letters.replay(letter.id)


def send(role: str, fault: str) -> None:
    """Send a pipeline, or a group of three, one member of which something befalls."""
    word = f"{role}-{fault}".replace(" ", "_")
    options = {"ojs_retry": PARKED} if fault == "parked" else {}
    struck = member.message_with_options(args=(word, fault), **options)
    if role == "pipeline":
        dramatiq.pipeline([struck, follows.message()]).run()
        return
    others = [member.message(f"{word}-{n}", "") for n in range(2)]
    group = dramatiq.group([struck, *others])
    group.add_completion_callback(completes.message(word))
    group.run()
