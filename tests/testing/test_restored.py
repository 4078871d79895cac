"""After virtual time everything is as it was, and nothing reaches a server in it."""

from __future__ import annotations

import threading
from abc import ABC
from datetime import timedelta
from typing import Any, Generic, TypeVar

import dramatiq
import pytest
from celery import current_app, signals
from celery._state import _tls
from celery.app.trace import reset_worker_optimizations, setup_worker_optimizations
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from kombu import pools
from starlette.testclient import TestClient

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.celery.installation import attach
from ojs_bridge.dramatiq import install
from ojs_bridge.http import app_for
from ojs_bridge.testing import virtual_time
from tests.testing.conftest import CRM, NOWHERE, Shop, amqp_shop, celery_shop, dramatiq_shop, rabbitmq_shop

T = TypeVar("T")


def down() -> None:
    raise OSError("down")


def looked_at(shop: Shop) -> dict[str, Any]:
    """All that virtual time changes."""
    bridge, target = shop.bridge, shop.target
    found: dict[str, Any] = {
        "kinds": [(type(one), dict(vars(one))) for one in (target, bridge, bridge.engine)],
        "store": bridge.store,
        "letters": bridge.dead_letters,
        "threads": {thread.name for thread in threading.enumerate()},
    }
    if shop.is_celery:
        found |= {
            "tasks": {name: dict(vars(task)) for name, task in target.tasks.items()},
            "eager": target.conf.task_always_eager,
            "postrun": list(signals.task_postrun.receivers),
            "current": _tls.current_app,
            "pools": (list(pools.connections), list(pools.producers)),
            "amqp": dict(vars(target.amqp)),
        }
    else:
        middleware = [(m, dict(vars(m))) for m in target.middleware if type(m).__module__.startswith("drama")]
        found |= {"middleware": middleware, "actors": {n: a.fn for n, a in target.actors.items()}}
    return found


class AbstractFirst(ABC, RedisBroker):
    """A broker whose first base has no dictionary."""


class GenericFirst(Generic[T], Bridge):
    """A bridge whose first base has none."""


def test_classes_of_another_layout() -> None:
    """A broker and a bridge of a user's classes are in memory meanwhile, and what they were afterwards."""
    broker, bridge = AbstractFirst(url=NOWHERE), GenericFirst(retry={**CRM, "max_attempts": 2})
    install(broker, bridge)
    ran: list[int] = []

    def charge() -> None:
        ran.append(1)
        down()

    actor = dramatiq.actor(charge, broker=broker, actor_name="charge")
    with virtual_time(broker) as ojs:
        actor.send()
        ojs.run()
        assert len(ojs.dead_letters) == 1
    assert len(ran) == 2
    assert (type(broker), type(bridge)) == (AbstractFirst, GenericFirst)


@pytest.mark.parametrize("kind", [celery_shop, amqp_shop, dramatiq_shop, rabbitmq_shop])
def test_everything_is_as_it_was(kind: Any) -> None:
    shop = kind(Bridge())
    task = shop.task(down, **CRM)
    if shop.is_celery:
        attach(shop.target)
    with virtual_time(shop.target) as ojs:
        # Celery makes some parts of an app at their first use.
        shop.send(task)
        ojs.run()
    before = looked_at(shop)
    with virtual_time(shop.target) as ojs:
        ojs.fail(task, KeyError, times=1)
        ojs.crash()
        shop.send(task)
        ojs.run()
        assert shop.bridge.store is not None
        assert shop.bridge.dead_letters.list().letters == ojs.dead_letters
    assert looked_at(shop) == before
    assert shop.bridge.store is None


@pytest.mark.parametrize("kind", [celery_shop, dramatiq_shop])
def test_a_page_that_was_made_before_shows_the_letters_of_the_test(kind: Any) -> None:
    shop = kind(Bridge("memory://"))
    page = TestClient(app_for(shop.bridge, open_to_all=True))
    task = shop.task(down, **CRM)

    def shown() -> list[str]:
        return [job["id"] for job in page.get("/ojs/v1/dead-letter").json()["jobs"]]

    with virtual_time(shop.target) as ojs:
        sent = shop.send(task)
        ojs.run()
        assert shown() == [sent]
    assert shown() == []


def test_two_bridges_have_a_time_and_a_store_each() -> None:
    celery, broker = celery_shop(Bridge()), dramatiq_shop(Bridge())
    one, other = celery.task(down, **CRM), broker.task(down, **CRM)
    with virtual_time(celery.target) as outer:
        celery.send(one)
        with virtual_time(broker.target) as inner:
            broker.send(other)
            inner.run()
            assert (outer.elapsed, len(outer.events)) == (timedelta(0), 0)
            assert len(inner.dead_letters) == 1
        assert outer.run().outcome == "dead_letter"
        assert [letter.framework for letter in outer.dead_letters] == ["celery"]


def test_an_error_in_the_test_restores_too() -> None:
    shop = dramatiq_shop(Bridge())
    with pytest.raises(KeyError), virtual_time(shop.target):
        raise KeyError
    assert type(shop.target).__name__ == "RedisBroker"


def test_each_test_begins_with_nothing(shop: Shop) -> None:
    task = shop.task(down, **CRM)
    for _ in range(2):
        with virtual_time(shop.target) as ojs:
            assert (ojs.jobs, ojs.dead_letters, ojs.parked) == ([], (), ())
            shop.send(task)
            ojs.step()
            shop.send(task)


def test_an_actor_of_the_test_stays_declared() -> None:
    shop = dramatiq_shop(Bridge())
    with virtual_time(shop.target):
        dramatiq.actor(down, actor_name="new", queue_name="other", broker=shop.target)
    assert "other" in shop.target.queues
    assert shop.target.get_actor("new").queue_name == "other"


def test_an_eager_app_is_not_eager_in_here() -> None:
    shop = celery_shop(Bridge())
    shop.target.conf.task_always_eager = True
    task = shop.task(down, **CRM)
    with virtual_time(shop.target) as ojs:
        shop.send(task)
        assert ojs.run().attempts == 5
    assert shop.target.conf.task_always_eager is True


def test_the_current_app_is_a_proxy() -> None:
    shop = celery_shop(Bridge())
    task = shop.task(down, **CRM)
    before = _tls.current_app
    shop.target.set_current()
    try:
        with virtual_time(current_app) as ojs:
            shop.send(task)
            assert ojs.run().attempts == 5
    finally:
        _tls.current_app = before


def test_a_worker_of_celerys_was_set_up_in_the_process() -> None:
    """Celery then takes it for granted that each task has a tracer, which the test takes away."""
    shop = celery_shop(Bridge())
    task = shop.task(down, **CRM)
    setup_worker_optimizations(shop.target)
    try:
        with virtual_time(shop.target) as ojs:
            shop.send(task)
            assert ojs.run().attempts == 5
        assert shop.target.use_fast_trace_task is True
    finally:
        reset_worker_optimizations(shop.target)


def test_twice_is_an_error(shop: Shop) -> None:
    with (
        virtual_time(shop.target),
        pytest.raises(ConfigurationError, match="already"),
        virtual_time(shop.target),
    ):
        pass


def test_what_is_no_app(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="'shop:app' is neither a Celery app nor a Dramatiq broker"):
        virtual_time("shop:app").__enter__()


def test_a_broker_without_a_bridge() -> None:
    with pytest.raises(ConfigurationError, match="add the middleware OJSRetries to it"):
        virtual_time(StubBroker()).__enter__()
