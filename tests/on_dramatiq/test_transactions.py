"""Dramatiq's own ways to send, within a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, NotInTransaction
from ojs_bridge.dramatiq import OJSRetries, install
from tests.servers import eventually
from tests.transactions import HAS_DJANGO, Undone, atomic, django_alias, of_sqlalchemy

needs_django = pytest.mark.skipif(not HAS_DJANGO, reason="needs Django")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a database."""
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture
def under(url: str) -> Iterator[Callable[..., Bridge]]:
    """Puts a broker under a bridge with a store whose tables are there."""
    made: list[Bridge] = []

    def put(broker: dramatiq.Broker, *, of_bridge: bool = False, **options: Any) -> Bridge:
        made.append(Bridge(url, outbox=of_bridge))
        made[-1].store.prepare()
        install(broker, made[-1], **options)
        return made[-1]

    yield put
    for bridge in made:
        bridge.engine.close()


def actor(broker: dramatiq.Broker, name: str = "act", **options: Any) -> Any:
    """An actor that does nothing."""

    def act(*_: object) -> str:
        return name

    return dramatiq.actor(act, actor_name=name, broker=broker, **options)


def queued(broker: StubBroker) -> list[str]:
    """The actors of the messages in the queue."""
    return [dramatiq.Message.decode(data).actor_name for data in [*broker.queues["default"].queue]]


def test_groups_and_pipelines_are_sent_with_the_transaction(url: str, under: Callable[..., Bridge]) -> None:
    broker = StubBroker()
    bridge = under(broker)
    first, second = actor(broker, "first"), actor(broker, "second")
    with of_sqlalchemy(url) as given:
        message = first.message_with_options(ojs_in=given)
        dramatiq.pipeline([message, second.message()], broker=broker).run()
        dramatiq.group([second.message_with_options(ojs_in=given) for _ in range(2)], broker=broker).run()
        assert (queued(broker), bridge.scheduled.count()) == ([], 0)
    eventually(lambda: queued(broker) == ["first", "second", "second"], seconds=8)
    (data, *_) = broker.queues["default"].queue
    assert dramatiq.Message.decode(data).options["pipe_target"]["actor_name"] == "second"
    assert "ojs_in" in message.options  # it may be sent again


def test_a_message_that_is_sent_twice_is_two_jobs(url: str, under: Callable[..., Bridge]) -> None:
    broker = StubBroker()
    bridge = under(broker)
    act = actor(broker)
    with of_sqlalchemy(url) as given:
        message = act.message_with_options(ojs_in=given)
        broker.enqueue(message)
        broker.enqueue(message, delay=3_600_000)
    eventually(lambda: queued(broker) == ["act"], seconds=8)
    eventually(lambda: [each.id for each in bridge.scheduled.list().jobs] == [message.message_id])


def test_a_message_is_sent_though_the_broker_is_away(url: str, under: Callable[..., Bridge]) -> None:
    broker = RedisBroker(url="redis://127.0.0.1:1", socket_connect_timeout=0.2)
    bridge = under(broker)
    act = actor(broker)
    with of_sqlalchemy(url) as given:
        message = act.send_with_options(ojs_in=given)
    bridge.engine.close()
    assert [each.id for each in bridge.scheduled.list().jobs] == [message.message_id]


def test_what_cannot_be_a_part_of_a_transaction_is_refused(url: str, under: Callable[..., Bridge]) -> None:
    broker, bare = StubBroker(), StubBroker()
    bridge = under(broker)
    install(bare, Bridge())
    act, without_store = actor(broker), actor(bare)
    with of_sqlalchemy(url) as given:
        for wrong in (7, "nowhere"):
            with pytest.raises(NotInTransaction, match="ojs_in: "):
                act.send_with_options(ojs_in=wrong)
        with pytest.raises(ConfigurationError, match="jobs of a transaction need a store"):
            without_store.send_with_options(ojs_in=given)
        with pytest.raises(ValueError, match="delay: 1e\\+20 must be milliseconds"):
            act.send_with_options(ojs_in=given, delay=1e20)
        with pytest.raises(TypeError, match="not JSON serializable"):
            act.send_with_options(args=(object(),), ojs_in=given)
    with pytest.raises(NotInTransaction, match="This Connection is closed"):
        act.send_with_options(ojs_in=given)
    with pytest.raises(ConfigurationError, match="ojs_outbox: 'yes' must be true or false"):
        actor(broker, "odd", ojs_outbox="yes")
    assert (queued(broker), queued(bare), bridge.scheduled.count()) == ([], [], 0)


@needs_django
@pytest.mark.parametrize("of", ["bridge", "broker", "actor"])
def test_an_outbox_takes_what_is_sent_within_a_transaction_of_django(
    url: str, under: Callable[..., Bridge], tmp_path: Path, of: str
) -> None:
    broker = StubBroker()
    # What the broker says counts before what its bridge says.
    said = {"bridge": {"of_bridge": True}, "broker": {"outbox": True}}
    bridge = under(broker, **said.get(of, {"of_bridge": True, "outbox": False}))
    act = actor(broker, **{"ojs_outbox": True} if of == "actor" else {})
    at_once = actor(broker, "at_once", **{} if of == "actor" else {"ojs_outbox": False})
    with django_alias(url) as alias, django_alias(f"sqlite:///{tmp_path}/other.db", "other") as other:
        act.send()
        with atomic(other):
            act.send()
        with suppress(Undone), atomic(alias):
            act.send()
            at_once.send()
            raise Undone
        assert queued(broker) == ["act", "act", "at_once"]
        with atomic(alias):
            act.send()
            act.send_with_options(delay=3_600_000)
            assert len(queued(broker)) == 3
        eventually(lambda: len(queued(broker)) == 4, seconds=8)
    assert bridge.scheduled.count() == 1


@pytest.mark.parametrize("store", [None, "valkey"])
def test_an_outbox_needs_a_store_in_a_database(store: str | None, request: pytest.FixtureRequest) -> None:
    bridge = Bridge(store and request.getfixturevalue("valkey_url"))
    for wrong in (
        lambda: OJSRetries(bridge, outbox=True),
        lambda: install(StubBroker(), bridge, outbox=True),
    ):
        with pytest.raises(ConfigurationError, match="outbox: True needs a store in the database"):
            wrong()
    OJSRetries(bridge, outbox=False)
