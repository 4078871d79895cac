"""Arguments that an actor changes in place, and errors whose text an encoder refuses."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import msgpack
import orjson
import pytest
import yaml
from dramatiq.brokers.stub import StubBroker
from dramatiq.encoder import Encoder, JSONEncoder

from ojs_bridge import Bridge, Retry
from ojs_bridge.dramatiq import install
from ojs_bridge.dramatiq.delivery import keep_what_is_delivered

KEEP = {"max_attempts": 4, "initial_interval": "PT0.001S", "jitter": False, "on_exhaustion": "dead_letter"}


class Strict(Encoder):
    """An encoder that a user has given to Dramatiq."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self._encode, self._decode = encode, decode

    def encode(self, data: Any) -> bytes:
        return self._encode(data)

    def decode(self, data: bytes) -> Any:
        return self._decode(data)


ENCODERS = {
    "utf-8": Strict(lambda data: json.dumps(data, ensure_ascii=False).encode(), json.loads),
    "orjson": Strict(orjson.dumps, orjson.loads),
    "msgpack": Strict(msgpack.packb, msgpack.unpackb),
    "yaml": Strict(lambda data: yaml.safe_dump(data).encode(), yaml.safe_load),
}


@pytest.fixture
def encoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dramatiq's encoder while a test runs."""
    dramatiq.set_encoder(ENCODERS[request.param])
    yield
    dramatiq.set_encoder(JSONEncoder())


def worked_off(broker: StubBroker, queue: str) -> None:
    """Run a worker until its queue is empty."""
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    try:
        broker.join(queue, timeout=20_000, fail_fast=False)
    finally:
        worker.stop()


@pytest.mark.parametrize("encoder", ENCODERS, indirect=True)
@pytest.mark.parametrize(
    "error",
    [OSError(os.fsdecode(b"caf\xe9")), Retry("a.b", "x", details={"name": os.fsdecode(b"\xff"), "n": 2**70})],
    ids=["message", "details"],
)
@pytest.mark.usefixtures("encoder")
def test_no_error_changes_how_its_job_is_retried(
    stub: StubBroker, tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy is the job's own, which only its message has."""
    # No process could send Dramatiq's log of these errors to another.
    caplog.set_level(logging.CRITICAL, logger="dramatiq")
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", retry={**KEEP, "max_attempts": 2})
    install(stub, bridge)
    runs: list[int] = []

    def fails() -> None:
        runs.append(1)
        raise error

    actor = dramatiq.actor(fails, broker=stub)
    job = actor.send_with_options(ojs_retry={"max_attempts": 4})
    worked_off(stub, actor.queue_name)
    letter = bridge.dead_letters.get(job.message_id)
    assert (len(runs), len(letter.errors), letter.policy["max_attempts"]) == (4, 4, 4)


@pytest.mark.parametrize("way", ["native", "plain", "policy"])
@pytest.mark.parametrize("store", [True, False])
def test_arguments_that_an_actor_changes_in_place(
    stub: StubBroker, tmp_path: Path, way: str, store: bool
) -> None:
    """Under plain `install` a retry has them as they are then, as natively; a policy keeps what was sent."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db" if store else None)
    if way != "native":
        install(stub, bridge, policies={"*": KEEP} if way == "policy" else None)
    seen: list[Any] = []

    def changes(order: dict[str, Any], *, lines: list[int]) -> None:
        seen.append((dict(order), [*lines]))
        order["seen"] = len(seen)
        lines.clear()
        raise OSError

    options = {} if way == "policy" else {"max_retries": 3, "min_backoff": 1, "max_backoff": 2}
    actor = dramatiq.actor(changes, broker=stub, actor_name="changes", **options)
    job = actor.send({"id": 7}, lines=[1, 2])
    worked_off(stub, actor.queue_name)
    first = ({"id": 7}, [1, 2])
    if way == "policy":
        assert seen == [first] * 4
        kept = bridge.dead_letters if store else bridge.broker_letters
        reading = kept.get(job.message_id).reading
        assert ([*reading.args], reading.kwargs) == ([{"id": 7}], {"lines": [1, 2]})
    else:
        assert seen == [first, *(({"id": 7, "seen": n}, []) for n in (1, 2, 3))]


def test_a_decode_that_somebody_has_wrapped_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge keeps the bytes beside it; and what a foreign message holds does not matter."""
    decode, called = vars(dramatiq.Message)["decode"], list[bytes]()

    def wrapped(kind: Any, data: bytes) -> Any:
        called.append(data)
        return decode.__get__(None, kind)(data)

    monkeypatch.setattr(dramatiq.Message, "decode", classmethod(wrapped))
    keep_what_is_delivered()
    for options in ({}, {"eta": 1}, 7):
        data = dramatiq.Message("q", "a", (1,), {}, options).encode()  # type: ignore[arg-type]
        assert dramatiq.Message.decode(data).options == options
        assert called.pop() == data


@pytest.mark.parametrize("policies", [None, {"*": KEEP}], ids=["plain", "policy"])
def test_a_change_that_no_message_can_carry_loses_no_attempt(
    stub: StubBroker, tmp_path: Path, policies: Any
) -> None:
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    install(stub, bridge, policies=policies)
    seen: list[Any] = []

    def changes(order: dict[str, Any]) -> None:
        seen.append(dict(order))
        order["file"] = object()
        raise OSError

    options = {} if policies else {"max_retries": 3, "min_backoff": 1, "max_backoff": 2}
    actor = dramatiq.actor(changes, broker=stub, actor_name="changes", **options)
    actor.send({"id": 7})
    worked_off(stub, actor.queue_name)
    assert seen == [{"id": 7}] * 4
