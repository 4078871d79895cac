"""Many parked jobs, and a word on each publication."""

from __future__ import annotations

from typing import Any

import dramatiq
from dramatiq.middleware import Middleware

from ojs_bridge.store import Parked
from tests.on_dramatiq.app import FAULT, QUEUE, bridge, broker, note, run


@dramatiq.actor(queue_name=QUEUE)
def many(word: str) -> None:
    """Run."""
    run(word)


def park_many(count: int) -> None:
    """Park so many jobs that are due now."""
    store, now = bridge.store, bridge.engine.now()
    assert store is not None
    for _ in range(count):
        message = many.message("many")
        key = message.message_id
        store.parked.park(
            Parked(
                id=key,
                key=key,
                fence=1,
                type=message.actor_name,
                queue=QUEUE,
                framework="dramatiq",
                attempt=2,
                max_attempts=3,
                next_retry_at=now,
                parked_at=now,
                reason="",
                state={"v": 1, "attempt": 2},
                message={"encoded": message.encode().decode(), "encoding": "utf-8"},
            )
        )


class NotesPublications(Middleware):
    """Writes down what this process puts on its queue."""

    def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        """Note it beside the runs."""
        note(f"published-{message.message_id}")


if FAULT == "published":
    broker.add_middleware(NotesPublications())
