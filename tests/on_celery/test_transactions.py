"""Celery's own ways to send, within a transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group
from kombu.exceptions import OperationalError

from ojs_bridge import Bridge, ConfigurationError, NotInTransaction
from ojs_bridge.celery import install, ojs_task
from tests.on_celery.fleet import Fleet
from tests.servers import Postgres, eventually
from tests.transactions import HAS_DJANGO, WAYS, Undone, atomic, django_alias, fail, of_psycopg

needs_django = pytest.mark.skipif(not HAS_DJANGO, reason="needs Django")


@pytest.fixture(scope="module")
def url(postgres: Postgres) -> Iterator[str]:
    """The URL of a database for these tests."""
    name = f"t{uuid4().hex[:10]}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield postgres.url_of(name)
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def fleet(separate: Callable[..., Fleet], url: str) -> Iterator[Fleet]:
    """A fleet with a store in PostgreSQL."""
    fleet = separate(store=url)
    fleet.start("-c", "2").await_ready()
    yield fleet
    fleet.bridge.engine.close()


@pytest.mark.parametrize("way", [name for name, (store, _) in WAYS.items() if store == "postgres"])
def test_groups_and_chains_and_chords_are_sent_with_the_transaction(fleet: Fleet, way: str) -> None:
    act, collect = fleet.task("act"), fleet.task("collect")
    _, begin = WAYS[way]
    with begin(fleet.settings.store) as given:
        chained = chain(act.si("ok"), collect.s("end")).apply_async(ojs_in=given)
        grouped = group(act.si(1), act.si(2)).apply_async(ojs_in=given)
        time.sleep(0.2)
        assert fleet.runs(chained.parent) == []
        chorded = chord([act.si(1), act.si(2)], collect.s()).apply_async(ojs_in=lambda: given)
    assert chained.get(timeout=90) == ["ok", "end"]
    assert [job.get(timeout=90) for job in grouped] == [1, 2]
    assert chorded.get(timeout=90) == [[1, 2]]


def test_a_job_is_sent_though_the_broker_is_away(url: str) -> None:
    """It waits in the store until the broker is back."""
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"socket_connect_timeout": 0.2}
    bridge = install(app, Bridge(url, namespace="away"))

    @app.task(name="act")
    def act() -> None: ...

    with pytest.raises(OperationalError):
        act.delay()
    with of_psycopg(url) as given:
        job = act.apply_async(ojs_in=given)
    bridge.engine.close()
    assert [each.id for each in bridge.scheduled.list().jobs] == [job.id]


def test_what_cannot_be_a_part_of_a_transaction_is_refused(url: str, tmp_path: Any) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    bridge = install(app, Bridge(url, namespace="refused"))
    bare, elsewhere = (Celery("shop", broker="memory://", set_as_current=False) for _ in range(2))
    install(elsewhere, Bridge())
    bridge.store.prepare()

    @ojs_task(app, name="act")
    def act(*given: object) -> None: ...

    @ojs_task(elsewhere, name="act")
    def without_store() -> None: ...

    @ojs_task(bare, name="act")
    def without_bridge() -> None: ...

    with of_psycopg(url) as given:
        with pytest.raises(ValueError, match="eta: 'soon' must be a datetime"):
            act.apply_async(ojs_in=given, eta="soon")
        with pytest.raises(TypeError):
            act.apply_async(ojs_in=given, countdown="soon")
        with pytest.raises(OverflowError):
            act.apply_async(ojs_in=given, countdown=1e20)
        with pytest.raises(Exception, match="not JSON serializable"):
            act.apply_async((object(),), ojs_in=given)
        with pytest.raises(ConfigurationError, match="jobs of a transaction need a store"):
            without_store.apply_async(ojs_in=given)
        with pytest.raises(ConfigurationError, match="ojs_in of act: no bridge is installed here"):
            without_bridge.apply_async(ojs_in=given)
        given.rollback()
    for wrong in (7, object(), "default"):
        with pytest.raises(NotInTransaction, match="ojs_in: "):
            act.apply_async(ojs_in=wrong)
    with pytest.raises(NotInTransaction, match="the connection is closed"):
        act.apply_async(ojs_in=given)
    assert bridge.scheduled.count() == 0


def in_broker(app: Celery) -> int:
    """Count the messages that an app has published."""
    with app.connection_for_read() as connection:
        return int(connection.default_channel.queue_declare(app.main).message_count)


def of_outbox(url: str, *, of_bridge: bool = False, **options: Any) -> tuple[Celery, Bridge]:
    """An app whose queue has its name, and its bridge; the tables of its store are there."""
    app = Celery(f"outbox-{uuid4().hex}", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = app.main
    bridge = install(app, Bridge(url, namespace=app.main, outbox=of_bridge), **options)
    bridge.store.prepare()
    return app, bridge


@needs_django
@pytest.mark.parametrize("said", [{"of_bridge": True}, {"outbox": True}], ids=["bridge", "app"])
def test_an_outbox_takes_what_is_sent_within_a_transaction_of_django(
    url: str, tmp_path: Any, said: dict[str, bool]
) -> None:
    app, bridge = of_outbox(url, **said)

    @app.task
    def act() -> None: ...

    @app.task(ojs_outbox=False)
    def at_once() -> None: ...

    with django_alias(url) as alias, django_alias(f"sqlite:///{tmp_path}/other.db", "other") as other:
        act.delay()
        with atomic(other):
            act.delay()
        assert in_broker(app) == 2
        with suppress(Undone), atomic(alias):
            act.delay()
            at_once.delay()
            assert (in_broker(app), bridge.scheduled.count()) == (3, 0)
            raise Undone
        with atomic(other), atomic(alias):
            act.delay()
            act.apply_async(countdown=3600)
            # A job that goes on is told by an error, which may roll the transaction back.
            act.apply_async(retries=1)
            act.apply_async(replaced_task_nesting=1)
            assert (in_broker(app), bridge.scheduled.count()) == (5, 0)
        eventually(lambda: in_broker(app) == 6, seconds=8)
        eventually(lambda: bridge.scheduled.count() == 1, what="the job that is due in an hour")
        with suppress(Undone), atomic(alias):
            fail(alias)
            with pytest.raises(NotInTransaction, match="the transaction has failed"):
                act.delay()
            raise Undone
    bridge.engine.close()


@needs_django
def test_a_task_may_have_an_outbox_alone(url: str) -> None:
    """What the app says counts before what its bridge says."""
    app, bridge = of_outbox(url, of_bridge=True, outbox=False)

    @ojs_task(app, outbox=True)
    def act() -> None: ...

    @ojs_task(app)
    def at_once() -> None: ...

    with django_alias(url) as alias:
        with atomic(alias):
            act.delay()
            at_once.delay()
            assert in_broker(app) == 1
        eventually(lambda: in_broker(app) == 2, seconds=8)
    bridge.engine.close()


@needs_django
def test_a_task_that_is_not_under_the_bridge_is_in_no_outbox(url: str) -> None:
    """Published twice, its job would run twice."""
    app, bridge = of_outbox(url, outbox=True, policies={"ours": {}})

    @app.task(name="theirs")
    def theirs() -> None: ...

    with django_alias(url) as alias, atomic(alias):
        theirs.delay()
        assert in_broker(app) == 1
    bridge.engine.close()


@pytest.mark.parametrize("store", [None, "valkey"])
def test_an_outbox_needs_a_store_in_a_database(store: str | None, request: pytest.FixtureRequest) -> None:
    given = store and request.getfixturevalue("valkey_url")
    app = Celery("shop", broker="memory://", set_as_current=False)
    for wrong in (lambda: Bridge(given, outbox=True), lambda: install(app, Bridge(given), outbox=True)):
        with pytest.raises(ConfigurationError, match="outbox: True needs a store in the database"):
            wrong()
    with pytest.raises(ConfigurationError, match="outbox: 'yes' must be true or false"):
        install(app, Bridge(given), outbox="yes")  # type: ignore[arg-type]
    install(app, Bridge(given), outbox=False)


def test_an_eager_task_runs_at_once(url: str) -> None:
    app, _ = of_outbox(url)
    app.conf.task_always_eager = True

    @ojs_task(app)
    def act() -> str:
        return "ok"

    with of_psycopg(url) as given:
        assert act.apply_async(ojs_in=given).get() == "ok"
