"""Queues: whether the jobs of one wait too long, and in which words that is told."""

from __future__ import annotations

from datetime import datetime, timedelta

from .facts import QueueFacts
from .notations import spoken
from .words import jobs_wait, number_of

#: A job that has waited for longer is late, whether or not its queue keeps up. So is a queue of many jobs if
#: the time that its oldest has waited, and the time that all of them will take, are longer together.
LATE, MANY = timedelta(minutes=10), 20


def is_behind(queue: QueueFacts, at: datetime) -> bool:
    """Return whether a queue falls behind, does not get shorter, or is late."""
    if not queue.depth or queue.paused or not queue.workers:
        return False
    if queue.keeps_up is False:
        return True
    waited = (at - queue.oldest_at).total_seconds() if queue.oldest_at else 0.0
    return waited + _takes(queue) > LATE.total_seconds()


def behind(queue: QueueFacts, at: datetime) -> str:
    """Return how a queue is behind."""
    told = list[str]()
    if queue.oldest_at:
        told.append(f"the oldest job waits for {spoken((at - queue.oldest_at).total_seconds())}")
    if queue.keeps_up is not False:
        if takes := _takes(queue):
            told.insert(0, f"{jobs_wait(queue.depth or 0)}, and they take {spoken(float(round(takes)))}")
        return f"The queue {queue.queue} is late: {'; '.join(told)}"
    grows = (queue.in_per_second or 0) - queue.out_per_second
    if grows > 0 or queue.in_per_second is None:
        by = f" by {number_of(grows)} jobs a second" if grows > 0 else ""
        return "; ".join([f"The queue {queue.queue} falls behind{by}", *told])
    waiting = jobs_wait(queue.depth or 0)
    return "; ".join([f"The queue {queue.queue} does not get shorter: {waiting}", *told])


def _takes(queue: QueueFacts) -> float:
    """Return how many seconds the jobs of a queue take, if there are many and their pace is known."""
    depth = queue.depth or 0
    return depth / queue.out_per_second if queue.keeps_up and queue.out_per_second and depth >= MANY else 0.0
