"""The frameworks' private names that the Celery adapter needs are there, and a missing one is told of."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version

import kombu.transport.redis
import pytest
from celery import Celery

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.adapters.private_names import PrivateName, missing_vital
from ojs_bridge.celery import compat, install
from ojs_bridge.celery.worker import fit_frameworks
from tests.faults import wrapped

NAMES = {f"{name.place}.{name.name}": name for name in compat.names()}
ALL_USES = {compat.REDIS, compat.FETCH, compat.RESULTS}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_there(name: PrivateName) -> None:
    """The run with the oldest supported versions has this test, too."""
    assert not name.is_missing


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_is_removed_is_missed(name: PrivateName) -> None:
    """Names are methods, attributes set in a method, values of a module, and what a closure shares."""
    removed = replace(name, name=f"{name.name}_as_it_was", since="0")
    assert removed.is_missing
    installed = version(name.framework)
    assert str(removed).startswith(f"{name.framework} {installed} has no {removed.name} in {name.place}")


@pytest.mark.parametrize("name", [name for name in NAMES.values() if name.is_expected], ids=str)
def test_a_name_that_somebody_has_wrapped_is_used_and_told_of(
    name: PrivateName, caplog: pytest.LogCaptureFixture
) -> None:
    """Instrumentation wraps the functions of a framework."""
    with wrapped(name), caplog.at_level(logging.WARNING, "ojs_bridge"):
        assert missing_vital([name], ALL_USES | {compat.TESTING}) == []
        assert name.wrapper in ("", "tests.faults")
    assert name.wrapper == ""
    told = (
        f"{name.name} in {name.place} is wrapped by tests.faults: the bridge uses it as it is to {name.need}"
    )
    assert caplog.messages in ([], [told])
    if name in (compat.task_from_fun, compat.parse_response, compat.fd_to_chan):
        assert caplog.messages == [told]


def test_a_framework_that_no_use_needs_may_not_be_installed() -> None:
    name = PrivateName("name", "not_installed:Place", "do something", True, only=compat.REDIS)
    assert missing_vital([name], set()) == []


@pytest.mark.parametrize("place", ["celery.gone", "celery.app.base:Gone", "celery.app.base:Celery.gone"])
def test_a_place_that_is_removed_is_missed(place: str) -> None:
    assert replace(compat.tasks, place=place).is_missing


def test_a_name_that_only_newer_versions_have_is_not_missed() -> None:
    assert not replace(compat.tasks, name="_to_come", since="99.1").is_missing


def test_a_worker_does_not_start_without_a_vital_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "task_from_fun", replace(compat.task_from_fun, name="_gone"))
    with pytest.raises(ConfigurationError, match=rf"^celery {version('celery')} has no _gone in celery.app"):
        compat.check_names(ALL_USES)


def test_a_worker_warns_of_another_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compat, "mark_as_retry", replace(compat.mark_as_retry, name="_gone"))
    with caplog.at_level(logging.WARNING, "ojs_bridge"):
        compat.check_names(ALL_USES)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"celery {version('celery')} has no _gone in celery.backends.base:Backend")


@pytest.mark.parametrize(
    ("broker", "setting", "starts"),
    [
        ("redis://localhost:1/0", "true", False),
        ("redis://localhost:1/0", "false", True),
        ("memory://", "true", True),
    ],
)
def test_what_only_the_taking_from_redis_needs(
    monkeypatch: pytest.MonkeyPatch, broker: str, setting: str, starts: bool
) -> None:
    """A worker that does not take from Redis in the bridge's way starts without the name."""
    monkeypatch.setenv("OJS_BRIDGE_RELIABLE_FETCH", setting)
    monkeypatch.delattr(kombu.transport.redis.Channel, "_brpop_start")
    app = Celery("compat", broker=broker, set_as_current=False)
    install(app, Bridge())
    if starts:
        fit_frameworks(app)
        return
    told = rf"kombu {version('kombu')} has no _brpop_start in .*; reliable_fetch=false does without it$"
    with pytest.raises(ConfigurationError, match=told):
        fit_frameworks(app)
