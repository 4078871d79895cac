"""Messages that no worker can carry out: they are kept, and harm neither the worker nor other jobs."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from tests.on_celery.conftest import Fleets
from tests.on_celery.fleet import Fleet
from tests.servers import eventually

JSON = "application/json"
PLAIN = b"[[\"'ok'\"], {}, {}]"
DEEP = "[" * 950 + "]" * 950

#: What it is -> headers, body, content type.
HOSTILE: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "a fence that no store holds": ({"ojs": f'{{"v": 1, "fence": {10**17}}}'}, PLAIN, JSON),
    "a fence below zero": ({"ojs": '{"v": 1, "fence": -1}'}, PLAIN, JSON),
    "an attempt of 400 digits": ({"ojs": f'{{"v": 1, "attempt": {"9" * 400}}}'}, PLAIN, JSON),
    "a deep policy": ({"ojs": f'{{"v": 1, "retry": {DEEP}}}'}, PLAIN, JSON),
    "an infinite policy": ({"ojs": '{"v": 1, "retry": {"backoff_coefficient": 1e999}}'}, PLAIN, JSON),
    "bytes that are no text": ({"ojs": b"\xff\xfe"}, PLAIN, JSON),
    "a count below zero": ({"retries": -1}, PLAIN, JSON),
    "a huge count": ({"retries": 10**17}, PLAIN, JSON),
    "a count that is text": ({"retries": "many"}, PLAIN, JSON),
    "an id that is a list": ({"id": ["x"]}, PLAIN, JSON),
    "an eta that is no time": ({"eta": "soon"}, PLAIN, JSON),
    "an eta that is an object": ({"eta": {"at": 1}}, PLAIN, JSON),
    "an expiry that is no time": ({"expires": "soon"}, PLAIN, JSON),
    "one time limit": ({"timelimit": 5}, PLAIN, JSON),
    "time limits that are text": ({"timelimit": ["x", "y"]}, PLAIN, JSON),
    "a late job's time limits": ({"timelimit": 5, "eta": "2026-01-01T00:00:00"}, PLAIN, JSON),
    "stamps that are none": ({"stamped_headers": 5}, PLAIN, JSON),
    "a header called headers": ({"headers": 5}, PLAIN, JSON),
    "no JSON": ({}, b"{", JSON),
    "an unknown content": ({}, b"x", "application/x-nonsense"),
    "an object for a body": ({}, b'{"a": 1}', JSON),
    "an empty body": ({}, b"[]", JSON),
    "arguments that are text": ({}, b'["x", {}, {}]', JSON),
    "arguments without names": ({}, b"[[], [], {}]", JSON),
    "a list of callbacks": ({}, b"[[], {}, [1]]", JSON),
    "a third part that is a request": ({}, b'[[], {}, {"delivery_info": null}]', JSON),
}


def publish(fleet: Fleet, headers: dict[str, Any], body: bytes, content_type: str) -> str:
    """Publish a message past Celery's own producer, and return its id."""
    job_id = str(uuid4())
    own = {"lang": "py", "task": "act", "id": job_id, "retries": 0, "timelimit": [None, None], **headers}
    with fleet.app.producer_pool.acquire(block=True) as producer:
        producer.publish(
            body,
            headers={name: value for name, value in own.items() if value is not NOTHING},
            content_type=content_type,
            content_encoding="utf-8",
            exchange=fleet.settings.queue,
            routing_key=fleet.settings.queue,
            declare=[fleet.app.amqp.queues[fleet.settings.queue]],
        )
    return str(own["id"])


NOTHING = object()


@pytest.mark.requirement("RET-16")
def test_what_nobody_can_carry_out_is_a_dead_letter_and_the_rest_runs(fleet: Fleet) -> None:
    sent = {name: publish(fleet, *hostile) for name, hostile in HOSTILE.items()}
    healthy = [fleet.send("ping") for _ in range(20)]
    assert [job.get(timeout=60) for job in healthy] == ["pong"] * 20
    store = fleet.bridge.store
    assert store is not None
    for name, job_id in sent.items():
        eventually(lambda job_id=job_id: store.get(job_id), seconds=30, what=f"the dead letter of {name}")
        letter = store.get(job_id)
        assert letter is not None
        assert (letter.error_type.partition(".")[0], letter.cause) == ("validation", "invalid"), name
        assert (letter.type, letter.queue, len(letter.errors)) == ("act", fleet.settings.queue, 1), name
        json.dumps(letter.to_ojs())
        job = fleet.app.AsyncResult(job_id)
        assert fleet.runs(job) == [], name
        fleet.bridge.dead_letters.delete(job_id)


@pytest.mark.requirement("RET-16")
def test_what_can_be_no_dead_letter_lies_in_the_dead_queue_as_it_came(fleet: Fleet) -> None:
    """It has no id, by which a dead letter is found."""
    publish(fleet, {"id": NOTHING, "x-mine": "yes"}, PLAIN, JSON)
    assert fleet.send("ping").get(timeout=60) == "pong"
    found: list[Any] = []
    eventually(lambda: found.extend(fleet.buried(fleet.settings.queue)) or found, what="a dead message")
    (message,) = found
    assert ("id" not in message.headers, message.headers["x-mine"]) == (True, "yes")
    assert (message.body if isinstance(message.body, bytes) else message.body.encode()) == PLAIN


def test_what_cannot_even_be_handed_to_the_pool_is_kept_and_takes_no_place_there(on_valkey: Fleets) -> None:
    """RabbitMQ's client writes no header that is nested so deep; newer Pythons pickle deeper."""
    fleet, deep = on_valkey("prefork", True), []
    for _ in range(600):
        deep = [deep]
    sent = [publish(fleet, {"x-deep": deep}, PLAIN, JSON) for _ in range(5)]
    sent.append(publish(fleet, {}, json.dumps([[deep], {}, {}]).encode(), JSON))
    assert [fleet.send("ping").get(timeout=60) for _ in range(8)] == ["pong"] * 8
    store = fleet.bridge.store
    assert store is not None
    for job_id in sent:
        job = fleet.app.AsyncResult(job_id)
        eventually(lambda job=job: store.get(job.id) or fleet.runs(job), seconds=30, what="a dead letter")
