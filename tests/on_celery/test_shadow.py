"""Shadow mode beside Celery's own retries."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore

from ojs_bridge import Bridge, ConfigurationError, DeadLetter, Snooze, open_store
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.migration import shadow
from ojs_bridge.migration.shadowing import SHADOW, bridge_of_shadow
from ojs_bridge.migration.shadowing.comparing import TaskReport, reports
from tests.forking import ROOT, started
from tests.servers import Valkey, eventually

AUTO = {"autoretry_for": (OSError,), "max_retries": 2, "retry_backoff": 10, "retry_jitter": False}
KEEP = {"on_exhaustion": "dead_letter"}


class Unpicklable(OSError):
    """Celery shows a base of it in its place."""

    def __init__(self, what: str, handle: object) -> None:
        super().__init__(what)
        self.handle = lambda: handle


class Hostile(Exception):
    """An error whose text and repr raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


def raises(make: Callable[[], BaseException]) -> Callable[[Task], None]:
    def body(task: Task) -> None:
        raise make()

    return body


def retries(error: BaseException | None = None, **options: Any) -> Callable[[Task], None]:
    """A task body that asks for a retry itself, because of an error or without one."""

    def body(task: Task) -> None:
        if error is None:
            task.retry(**options)
        try:
            raise error
        except type(error):
            task.retry(**options)

    return body


def in_an_hour(task: Task) -> None:
    task.retry(eta=task.app.now() + timedelta(hours=1))


def asks_or_raises(task: Task) -> None:
    """A task body that asks for a retry in the first run, and raises an error in the next."""
    if task.request.retries:
        raise KeyError("sold out")
    task.retry(countdown=7)


#: task options, its body, its partial policy -> what its failed runs came to
COMPARED: dict[str, tuple[dict[str, Any], Callable[[Task], None], dict[str, Any], dict[str, int]]] = {
    "alike": (AUTO, raises(OSError), {}, {"same": 3}),
    "kept": (AUTO, raises(OSError), KEEP, {"same": 2, "end": 1}),
    "slower": (AUTO, raises(OSError), {"initial_interval": "PT1M", "max_interval": "PT5M"},
               {"delay": 2, "same": 1}),
    "earlier": (AUTO, raises(OSError), {"max_attempts": 2}, {"same": 2, "ends_earlier": 1}),
    "longer": ({}, raises(OSError), {"max_attempts": 2}, {"retries_longer": 1}),
    "asks_for_nothing": ({}, raises(OSError), {}, {"same": 1}),
    "asks_for_another": ({"max_retries": 1}, asks_or_raises, {}, {"same": 2}),
    "asks_for_more": ({"max_retries": 1}, retries(countdown=7, max_retries=2), {}, {"same": 3}),
    "gives_up_earlier": ({}, retries(OSError(), exc=OSError(), countdown=7, max_retries=1), {}, {"same": 2}),
    "not_named": (AUTO, raises(KeyError), {}, {"same": 1}),
    "ruled_out": (AUTO, raises(OSError), {"non_retryable_errors": ["OSError"]},
                  {"non_retryable": 2, "same": 1}),
    "asks": ({"max_retries": 1}, retries(countdown=7), {}, {"same": 2}),
    "asks_for_an_error": ({"max_retries": 1}, retries(KeyError("k"), countdown=7),
                          {"non_retryable_errors": ["KeyError"]}, {"non_retryable": 1, "same": 1}),
    "asks_by_default": ({"max_retries": 1}, retries(), {}, {"same": 2}),
    "asks_by_default_within_autoretry": ({**AUTO, "max_retries": 1}, retries(), {}, {"same": 2}),
    "asks_for_an_hour": ({"max_retries": 1}, in_an_hour, {}, {"same": 2}),
    "asks_too_much": ({"max_retries": 1}, in_an_hour, {"max_interval": "PT5M"}, {"delay": 1, "same": 1}),
    "asks_within_autoretry": ({**AUTO, "max_retries": 1}, retries(OSError(), countdown=3), {}, {"same": 2}),
    "response": ({}, raises(lambda: DeadLetter("a.b")), {}, {"end": 1}),
    "pause": ({}, raises(lambda: Snooze("PT1S")), {}, {"snoozes": 1}),
    "unpicklable": (AUTO, raises(lambda: Unpicklable("x", 1)), {"max_attempts": 1},
                    {"ends_earlier": 2, "same": 1}),
    "hostile": ({}, raises(Hostile), {"retry_on": "failure"}, {"retries_longer": 1}),
    "ignored": ({}, raises(Ignore), {}, {}),
    "succeeds": ({}, lambda task: None, {}, {}),
}  # fmt: skip


def own() -> None:
    raise OSError


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the switch of shadow mode from the environment of the tests."""
    monkeypatch.delenv("OJS_BRIDGE_SHADOW", raising=False)


@pytest.fixture
def app() -> Iterator[Celery]:
    """An app whose tasks are applied here and now."""
    app = Celery("shadowed", set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def bridge(tmp_path: Path) -> Bridge:
    """The bridge that decides beside."""
    return Bridge(f"sqlite:///{tmp_path}/ojs.db")


def declare(app: Celery, name: str, body: Callable[[Task], None], **options: Any) -> Task:
    def act(self: Task) -> None:
        body(self)

    return app.task(name=name, bind=True, shared=False, **options)(act)


def apply(app: Celery, *names: str) -> list[str]:
    """Start the app's shadow as its worker does, apply tasks, and end; return their states."""
    watching = vars(app)[SHADOW]
    watching.start()
    states = [app.tasks[name].apply().state for name in names]
    watching._end()
    return states


def found(bridge: Bridge) -> dict[str, TaskReport]:
    """The store's report of each task."""
    assert bridge.store is not None
    return {report.task: report for report in reports(bridge.store.shadows())}


def test_comparing(app: Celery, bridge: Bridge) -> None:
    """Shadow mode compares what Celery did about each failed run with the policy's decision."""
    shadow(app, bridge, policies={name: policy for name, (_, _, policy, _) in COMPARED.items()})
    for name, (options, body, _, _) in COMPARED.items():
        declare(app, name, body, **options)
    declare(app, "unnamed", raises(OSError))
    states = dict(zip([*COMPARED, "unnamed"], apply(app, *COMPARED, "unnamed"), strict=True))
    assert {name for name, state in states.items() if state != "FAILURE"} == {"ignored", "succeeds"}
    assert bridge.store is not None
    counts: dict[str, dict[str, int]] = {}
    for tally in bridge.store.shadows():
        counts.setdefault(tally.task, {})[tally.kind] = tally.count
    assert counts == {name: kinds for name, (*_, kinds) in COMPARED.items() if kinds}


def test_examples(app: Celery, bridge: Bridge) -> None:
    """The error as it was raised, not as Celery shows it; both decisions in words."""
    shadow(app, bridge)
    declare(app, "one", raises(lambda: Unpicklable("x", 1)), **AUTO)
    declare(app, "two", retries(Unpicklable("x", 1), exc=Unpicklable("y", 2)), max_retries=0)
    apply(app, "one", "two")
    for name in ("one", "two"):
        for tally in found(bridge)[name].differences:
            assert {example["error_type"] for example in tally.examples} == {f"{__name__}.Unpicklable"}


def test_off(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose shadow mode is off reads neither its policies nor the URL of a store."""
    monkeypatch.setenv("OJS_BRIDGE_SHADOW", "off")
    monkeypatch.setenv("OJS_BRIDGE_STORE", "nonsense")
    shadow(app, policies="no-such-file.toml")
    declare(app, "dies", raises(OSError))
    assert apply(app, "dies") == ["FAILURE"]
    assert vars(app)[SHADOW]._recorder is None


def test_what_is_wrong_with_it_stops_no_worker(
    app: Celery, bridge: Bridge, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shadow mode stays off, and the log says why."""
    monkeypatch.setattr("ojs_bridge.migration.shadowing.recording._said", {})
    shadow(app, bridge, policies={"nobody": {}})
    declare(app, "dies", raises(OSError))
    assert apply(app, "dies") == ["FAILURE"]
    assert "shadow mode: it stays off: ConfigurationError: policies['nobody'] names no task" in caplog.text


def test_a_store_that_is_down(app: Celery, tmp_path: Path) -> None:
    """The jobs end as ever."""
    shadow(app, Bridge(f"sqlite:///{tmp_path}/nowhere/ojs.db"))
    declare(app, "dies", raises(OSError), **AUTO)
    assert apply(app, "dies", "dies") == ["FAILURE"] * 2


def test_some_tasks_only(app: Celery, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's environment names the tasks; tasks of another app are left out."""
    monkeypatch.setenv("OJS_BRIDGE_SHADOW", "mail.*")
    shadow(app, bridge)
    for name in ("mail.send", "billing.charge"):
        declare(app, name, raises(OSError))
    other = Celery("other", set_as_current=False)
    declare(other, "mail.other", raises(OSError)).apply()
    vars(app)[SHADOW].start()
    declare(other, "mail.another", raises(OSError)).apply()
    apply(app, "mail.send", "billing.charge")
    assert {name: report.failed for name, report in found(bridge).items()} == {"mail.send": 1}


def test_beside_a_canary(app: Celery, bridge: Bridge) -> None:
    """A run under the bridge is counted, and not compared."""
    install(
        app, bridge, policies={"moved": {"max_attempts": 2}, "partly": {}}, canary={"moved": 100, "partly": 0}
    )
    shadow(app, bridge)
    ojs_task(app, name="own", shared=False, retry={"max_attempts": 1})(own)
    for name in ("moved", "partly", "native"):
        declare(app, name, raises(OSError), **AUTO)
    apply(app, "own", "moved", "partly", "native")
    numbers = {name: (report.failed, report.bridged) for name, report in found(bridge).items()}
    assert numbers == {"own": (0, 1), "moved": (0, 2), "partly": (3, 0), "native": (3, 0)}


def test_once(app: Celery, bridge: Bridge) -> None:
    """A second shadow is a mistake."""
    shadow(app, bridge)
    assert bridge_of_shadow(app) is bridge
    with pytest.raises(ConfigurationError, match="already"):
        shadow(app)


def test_in_a_real_worker(valkey: Valkey, unique: str, tmp_path: Path) -> None:
    """Each pool child compares its runs, and writes what is pending when the worker is told to stop."""
    url, runs = f"sqlite:///{tmp_path}/ojs.db", tmp_path / "runs"
    known = {"SHADOWED_QUEUE": unique, "SHADOWED_BROKER": valkey.url, "SHADOWED_RUNS": str(runs)}
    command = ["celery", "-A", "tests.on_celery.shadowed", "worker", "-c", "2"]
    sender = Celery(broker=valkey.url, set_as_current=False)
    for _ in range(6):
        sender.send_task("hopeless", queue=unique)
    runs.touch()
    environment = {**os.environ, **known, "OJS_BRIDGE_STORE": url}
    worker = started(command, env=environment, log=tmp_path / "log", cwd=ROOT)
    try:
        eventually(lambda: len(runs.read_text().split()) >= 18, seconds=50)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(40) == 0, (tmp_path / "log").read_text()
    finally:
        worker.kill()
        worker.wait()
    (report,) = reports(open_store(url).shadows())
    assert (report.framework, report.task, report.failed, report.compared) == ("celery", "hopeless", 18, 18)
    kinds = {tally.kind: tally.count for tally in report.differences}
    assert kinds == {"ends_earlier": 6}
    assert len(set(runs.read_text().split())) == 2
