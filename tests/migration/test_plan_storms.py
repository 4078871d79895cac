"""The plan names tasks that share what they call, and would all call it again and again while it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dramatiq
import httpx
import pytest
import requests
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Breaker, Bridge, Dependency
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.dramatiq import install as install_on
from ojs_bridge.migration.plan import NOT_KNOWN, NativeRetries, Planned, WaitRange
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from ojs_bridge.migration.plan.storms import runs_in_a_minute

SOON: dict[str, Any] = {"retry_backoff": 4, "retry_jitter": False, "max_retries": 3}


class Client:
    """A client of a shop's own."""

    def charge(self) -> None:
        """Charge a card."""
        requests.post("http://bank")


client = Client()


def charges() -> None:
    """Call a service by the client."""
    client.charge()


def asks() -> None:
    """Call a service by a library."""
    requests.get("http://bank")


def imports() -> None:
    """Import the library itself."""
    import requests as web

    web.get("http://bank")


def caches() -> None:
    """Call two others; one of them it imports itself."""
    import pymongo

    pymongo.MongoClient()
    httpx.get("http://shop")


def works() -> None:
    """Call nobody."""


def storms(planned: list[Planned]) -> dict[str, list[str]]:
    """Return the sentences about storms by the names of their tasks."""
    found = {one.name: [x.text for x in one.hazards if x.name == "storm"] for one in planned}
    return {name: texts for name, texts in found.items() if texts}


def app_with(**tasks: Any) -> Celery:
    """An app with tasks of these bodies and options."""
    app = Celery("storms", set_as_current=False, broker="memory://")
    for name, (body, options) in tasks.items():
        app.task(body, name=name, shared=False, **options)
    return app


def test_tasks_that_retry_what_one_library_raises() -> None:
    """By the classes of `autoretry_for`, or by their code where these are any errors."""
    any_error = {"autoretry_for": (Exception,), **SOON}
    app = app_with(
        by_client=(charges, any_error),
        by_library=(asks, any_error),
        by_import=(imports, {"autoretry_for": (OSError,), **SOON}),
        by_class=(works, {"autoretry_for": (requests.Timeout, requests.ConnectionError), **SOON}),
        own_error=(asks, {"autoretry_for": (httpx.HTTPError,), **SOON}),
        alone=(caches, any_error),
        later=(asks, {"autoretry_for": (Exception,), "retry_backoff": False}),
        never=(asks, {}),
    )
    text = (
        "4 tasks call requests and retry what fails: in the first minute of an outage each job calls about 4 "
        "times, whatever became of the others; if that is one service, Dependency("
        'errors=["external.*"], jobs=[...], breaker=Breaker()) holds them while it is down'
    )
    found = storms(of_celery(app))
    names = [name for name, texts in found.items() if texts == [text]]
    assert names == ["by_class", "by_client", "by_import", "by_library"]
    assert [text.partition(" and ")[0] for text in found["alone"]] == ["2 tasks call httpx"]
    assert "later" not in found
    assert "never" not in found


def test_actors_of_dramatiq_that_share_a_database() -> None:
    broker = StubBroker()
    for name, body in {"one": caches, "two": caches, "other": asks}.items():
        dramatiq.actor(body, actor_name=name, broker=broker, min_backoff=1000, max_retries=5)
    dramatiq.actor(caches, actor_name="once", broker=broker, max_retries=0)
    found = storms(of_dramatiq(broker))
    assert list(found) == ["one", "two"]
    assert [text.partition(" and ")[0] for text in found["one"]] == [
        "2 tasks call httpx",
        "2 tasks call pymongo",
    ]
    assert 'errors=["database.*"]' in found["one"][1]


@pytest.mark.parametrize(
    ("more", "is_told"),
    [({}, True), ({"breaker": Breaker()}, False), ({"rate": "9/s"}, False), ({"budget": 0.1}, False)],
    ids=["nothing", "a breaker", "a rate", "a budget"],
)
def test_tasks_that_need_a_declared_dependency(tmp_path: Path, more: dict[str, Any], is_told: bool) -> None:
    bank = Dependency("bank", ["bank.*"], ["pay.*"], **more)
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", dependencies=[bank])
    tasks = {"pay.one": asks, "pay.two": works}
    app = app_with(**{name: (body, {"autoretry_for": (OSError,), **SOON}) for name, body in tasks.items()})
    install(app, bridge)
    ojs_task(app, name="said", retry={"max_attempts": 3, "jitter": False}, depends="bank")(works)
    broker = StubBroker()
    for name, body in tasks.items():
        dramatiq.actor(body, actor_name=name, broker=broker, min_backoff=1000)
    install_on(broker, bridge)
    for planned, count, times in ((of_celery(app), 3, 4), (of_dramatiq(broker), 2, 6)):
        text = (
            f"{count} tasks need bank and retry what fails: in the first minute of an outage each job calls "
            f"about {times} times, whatever became of the others; the dependency has no breaker and no "
            "limit: give it one"
        )
        expected = {one.name: [text] for one in planned} if is_told else {}
        assert storms(planned) == expected


def test_runs_in_a_minute() -> None:
    """No number is a guess."""
    waits = tuple(map(WaitRange.of, (30.0, 30.0, 1.0)))
    assert runs_in_a_minute(NativeRetries(4, waits, "", "", "")) == 3
    assert runs_in_a_minute(NativeRetries(4, NOT_KNOWN, "", "", "")) == 0
    assert runs_in_a_minute(None) == 0
