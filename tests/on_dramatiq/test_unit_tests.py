"""In a user's unit tests, a bridged StubBroker keeps failed jobs as dead letters, and `join` raises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, DeadLetter, Discard
from ojs_bridge.dramatiq import install
from tests.on_dramatiq.fleet import QUICK


def fails() -> None:
    raise OSError("down")


def discards() -> None:
    raise Discard("payment.declined", "no")


def dies() -> None:
    raise DeadLetter("payment.stolen", "no")


def bridged(broker: StubBroker, folder: Path, *, store: bool, on_exhaustion: str) -> Bridge:
    """The bridge of a broker, with quick retries."""
    retry = {**QUICK, "max_attempts": 2, "on_exhaustion": on_exhaustion}
    bridge = Bridge(f"sqlite:///{folder}/ojs.db" if store else None, retry=retry)
    install(broker, bridge)
    return bridge


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("on_exhaustion", ["discard", "dead_letter"])
@pytest.mark.parametrize(
    ("handler", "options"),
    [(fails, {}), (fails, {"throws": OSError}), (discards, {}), (dies, {})],
    ids=["fails", "throws", "discards", "dies"],
)
def test_join_raises_what_a_job_has_ended_with(
    stub: StubBroker,
    tmp_path: Path,
    handler: Callable[[], None],
    options: Any,
    on_exhaustion: str,
    store: bool,
) -> None:
    bridge = bridged(stub, tmp_path, store=store, on_exhaustion=on_exhaustion)
    actor = dramatiq.actor(handler, broker=stub, **options)
    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    try:
        sent = actor.send()
        with pytest.raises((OSError, Discard, DeadLetter), match=r"down|no"):
            stub.join(actor.queue_name, timeout=10_000)
        stub.join(actor.queue_name, timeout=10_000, fail_fast=False)
        assert [m.message_id for m in stub.dead_letters] == [sent.message_id]
        is_letter = handler is dies or (handler is fails and on_exhaustion == "dead_letter")
        kept = bridge.dead_letters if store else bridge.broker_letters
        assert [letter.id for letter in kept.list().letters] == [sent.message_id] * is_letter
        if store:
            assert bridge.broker_letters.list().letters == ()
    finally:
        worker.stop()


def test_join_passes_once_the_replay_has_succeeded(stub: StubBroker, tmp_path: Path) -> None:
    bridge = bridged(stub, tmp_path, store=True, on_exhaustion="dead_letter")
    runs: list[int] = []

    @dramatiq.actor(broker=stub)
    def recovers() -> None:
        runs.append(1)
        if len(runs) <= 2:
            raise OSError("down")

    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    try:
        sent = recovers.send()
        with pytest.raises(OSError, match="down"):
            stub.join(recovers.queue_name, timeout=10_000)
        bridge.dead_letters.replay(sent.message_id)
        stub.join(recovers.queue_name, timeout=10_000)
        assert (len(runs), stub.dead_letters) == (3, [])
    finally:
        worker.stop()
