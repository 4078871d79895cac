"""A task or an actor says what its jobs need; both adapters refuse an unknown name."""

from __future__ import annotations

import logging

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, Dependency
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.installation import task_policy
from ojs_bridge.dramatiq import OJSRetries

UNKNOWN = "ojs_depends: 'bnk' is not the name of a dependency; there are: bank, mail"


@pytest.fixture
def bridge() -> Bridge:
    return Bridge(dependencies=[Dependency("bank", ["bank.*"]), Dependency("mail", jobs=["*.send"])])


def test_a_task_of_celery(bridge: Bridge) -> None:
    app = Celery("shop", broker="memory://")
    install(app, bridge)

    @ojs_task(app, depends="bank")
    def pay() -> None: ...

    @app.task(name="mail.send", ojs_depends=["bank"])  # type: ignore[untyped-decorator]
    def send() -> None: ...

    @ojs_task(app, depends=["bank", "bnk"])
    def refund() -> None: ...

    for task in (pay, send):
        task_policy(app, task)
    assert bridge.engine.dependencies.names_of(pay.name) == ["bank"]
    assert bridge.engine.dependencies.names_of("mail.send") == ["bank", "mail"]
    with pytest.raises(ConfigurationError, match=f"^task {refund.name}: {UNKNOWN}$"):
        refund.delay()


def test_an_actor_of_dramatiq(bridge: Bridge, caplog: pytest.LogCaptureFixture) -> None:
    broker = StubBroker()
    broker.add_middleware(OJSRetries(bridge))
    dramatiq.actor(lambda: None, actor_name="pay", broker=broker, ojs_depends=["bank"])
    assert bridge.engine.dependencies.names_of("pay") == ["bank"]
    with pytest.raises(ConfigurationError, match=f"^actor refund: {UNKNOWN}$"):
        dramatiq.actor(lambda: None, actor_name="refund", broker=broker, ojs_depends="bnk")
    with caplog.at_level(logging.WARNING):
        bridge.engine.tell_unused(broker.actors, "actor of this broker")
    assert "dependency mail: jobs: '*.send' matches no actor of this broker" in caplog.text
