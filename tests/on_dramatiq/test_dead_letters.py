"""Dead letters: in the store, in the broker's dead queue without one, and replayed from elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import (
    Bridge,
    ConfigurationError,
    DeadLetter,
    StorageRetry,
    Store,
    open_store,
)
from ojs_bridge.dramatiq import install
from ojs_bridge.errors import Unstorable
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, broker_of
from tests.servers import eventually

KEEP = {"max_attempts": 2, "on_exhaustion": "dead_letter"}


def fails(n: int) -> None:
    raise OSError(f"down for the {n}. time")


def graveless(url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that can never write a dead letter, and takes everything else."""

    def no_room(*_: Any) -> bool:
        raise Unstorable("no room")

    store = open_store(url)
    monkeypatch.setattr(store.letters, "bury", no_room)
    return store


@pytest.mark.requirement("RET-14", "RET-17")
def test_where_the_store_takes_no_dead_letter_the_dead_queue_holds_the_final_state(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = graveless(f"sqlite:///{tmp_path}/ojs.db", monkeypatch)
    fleet = Fleet(broker, unique, store=store, storage_retry=StorageRetry.disabled())
    kept = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    dropped = fleet.send(fleet.actor(fails, ojs_retry={"max_attempts": 2}))
    with fleet.working(threads=2):
        for job in (kept, dropped):
            fleet.end(job)
    eventually(lambda: fleet.dead(kept))
    (message,) = fleet.dead(kept)
    state = message.options["ojs"]
    assert [e["message"] for e in state["errors"]] == ["down for the 1. time", "down for the 2. time"]
    assert (state["attempt"], message.options["retries"]) == (2, 2)
    assert "down for the 2. time" in message.options["traceback"]
    assert "next_retry_at" not in state
    assert fleet.dead(dropped) == []
    if not isinstance(broker, StubBroker):
        assert fleet.left() == 0


def test_a_process_without_the_broker_says_so(stubbed: Callable[..., Fleet], tmp_path: Path) -> None:
    fleet = stubbed()
    job = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    with fleet.working():
        fleet.end(job)
    stranger = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    with pytest.raises(ConfigurationError, match="dramatiq"):
        stranger.dead_letters.replay(job.id)
    assert stranger.dead_letters.get(job.id).framework == "dramatiq"


def test_a_letter_whose_publication_fails_stays(
    valkey: Any, unique: str, stubbed: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet = stubbed()
    job = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    with fleet.working():
        fleet.end(job)
    operator = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    install(RedisBroker(url="redis://127.0.0.1:1/0", namespace=unique), operator)
    with pytest.raises(Exception, match="onnect"):
        operator.dead_letters.replay(job.id)
    assert operator.dead_letters.get(job.id).replay_count == 0


def test_a_dead_letter_keeps_the_message_as_it_was_delivered(fleet: Fleet) -> None:
    from ojs_bridge.dramatiq.translate import restored

    def dies(key: str, card: Any, *, amount: int = 1) -> None:
        raise DeadLetter("a.b")

    job = fleet.send(fleet.declare(dies), {"naïve": [1, None, "ü"]}, tenant="t1", pipe_ignore=True)
    fleet.end(job)
    letter = fleet.bridge.dead_letters.get(job.id)
    assert letter.reading.names == ("key", "card")
    message = restored(letter.message)
    assert message.args[1] == {"naïve": [1, None, "ü"]}
    assert (message.message_id, message.options["tenant"]) == (job.id, "t1")
    assert "ojs" not in message.options
    assert "traceback" not in message.options


def test_messages_of_other_encoders_are_kept_too(stubbed: Callable[..., Fleet]) -> None:
    from dramatiq.encoder import JSONEncoder, PickleEncoder

    dramatiq.set_encoder(PickleEncoder())
    try:
        fleet = stubbed()
        job = fleet.send(fleet.actor(lambda n, given: fails(n) if n <= 2 else None, ojs_retry=KEEP), {1, 2})
        with fleet.working():
            fleet.end(job)
            fleet.bridge.dead_letters.replay(job.id)
            assert fleet.end(job, nth=2).type == "job.completed"
    finally:
        dramatiq.set_encoder(JSONEncoder())


def test_options_that_cannot_travel_stay_behind(
    stubbed: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    class Span(dramatiq.Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            message.options["span"] = object()

    fleet = stubbed()
    fleet.broker.add_middleware(Span())
    job = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    with fleet.working():
        fleet.end(job)
    assert len(job.runs) == 2
    assert fleet.bridge.dead_letters.get(job.id).attempt == 2
    assert "its options span cannot be encoded" in caplog.text


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_arguments_that_cannot_travel_any_more_are_in_the_dead_queue_as_they_were_sent(
    request: pytest.FixtureRequest, kind: str, unique: str
) -> None:
    fleet = Fleet(broker_of(kind, url_of(request, kind), unique), unique)

    def spoils(n: int, given: dict[str, Any]) -> None:
        given["x"] = object()
        raise OSError("down")

    job = fleet.send(fleet.actor(spoils, ojs_retry=KEEP), {})
    with fleet.working(threads=2):
        eventually(lambda: fleet.dead(job))
    (message,) = fleet.dead(job)
    assert (len(job.runs), message.args[1], fleet.left()) == (2, {}, 0)
    fleet.broker.close()


def test_a_replay_that_fails_before_the_old_letter_is_deleted_leaves_the_new_one(
    stubbed: Callable[..., Fleet],
) -> None:
    class Slow:
        def __init__(self, publisher: Any) -> None:
            self.publisher = publisher

        def knows(self, type_: str) -> bool:
            return True

        def republish(self, *args: Any) -> None:
            self.publisher.republish(*args)
            fleet.end(job, nth=2)

    fleet = stubbed()
    job = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    fleet.bridge.engine.context.publishers["dramatiq"] = Slow(
        fleet.bridge.engine.context.publishers["dramatiq"]
    )
    with fleet.working():
        fleet.end(job)
        fleet.bridge.dead_letters.replay(job.id)
    assert fleet.bridge.dead_letters.get(job.id).replay_count == 1


def test_a_letter_whose_actor_is_gone_is_not_published(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    job = fleet.send(fleet.actor(fails, ojs_retry=KEEP))
    with fleet.working():
        fleet.end(job)
    del fleet.broker.actors[fleet.bridge.dead_letters.get(job.id).type]
    fleet.actor(fails)
    with pytest.raises(ConfigurationError, match="which dramatiq here does not know"):
        fleet.bridge.dead_letters.replay(job.id)
    assert fleet.bridge.dead_letters.get(job.id).id == job.id
