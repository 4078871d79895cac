"""The bridge of the demonstration's Celery app and Dramatiq broker, and the record of its events."""

from __future__ import annotations

import json
import os

import redis
from jobs import DEFAULT_POLICY, ERRORS, JOBS, REPLAYED

from ojs_bridge import Bridge, Event

VALKEY_URL = os.environ.get("OJS_DEMO_VALKEY", "redis://127.0.0.1:6379/0")
EVENTS = "demo:events"
MENDED = "demo:mended"

valkey: redis.Redis = redis.Redis.from_url(VALKEY_URL, decode_responses=True)


def record(event: Event) -> None:
    """A listener: hand every event to the demonstration's own process."""
    valkey.rpush(EVENTS, json.dumps(event.to_ojs()))


bridge = Bridge(retry=DEFAULT_POLICY, errors=ERRORS, listeners=[record])


def has_begun(framework: str, name: str) -> bool:
    """Return whether the handler of a job has begun a run."""
    return bool(valkey.exists(f"demo:runs:{framework}:{name}"))


def perform(framework: str, name: str) -> str:
    """The handler of both frameworks: behave as the job of that name does on this run."""
    run = int(valkey.incr(f"demo:runs:{framework}:{name}"))
    mended = name == REPLAYED and valkey.exists(MENDED)
    exc = None if mended else JOBS[name].behaviour(run)
    if exc is not None:
        raise exc
    return f"{name}: done"
