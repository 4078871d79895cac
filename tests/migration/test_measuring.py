"""`plan --verify`: what was read is run in memory, with failures in place of bodies that nobody calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import Celery, Task
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.celery import install
from ojs_bridge.migration.plan import NOT_KNOWN, NativeRetries, Planned
from ojs_bridge.migration.plan.celery import measured
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.migration.plan.dramatiq import measured as measured_on_dramatiq
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from tests.cli.running import spawn

#: There is no server: a plan that sends or stores anything fails.
NOWHERE = "redis://127.0.0.1:1/0"


class Odd(Exception):
    """An error that takes more than a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


def never(*_args: Any) -> None:
    """A body."""
    raise AssertionError("no body is run")


def asks(self: Task) -> None:
    """A body that asks."""
    raise self.retry(exc=OSError())


def asks_later(self: Task) -> None:
    """A body that asks, and waits longer each time: its policy is empty."""
    raise self.retry(exc=OSError(), countdown=2**self.request.retries)


CELERY: dict[str, tuple[dict[str, Any], str]] = {
    "once": ({}, "measured"),
    "unread": ({"max_retries": 9}, "measured"),
    "steady": ({"autoretry_for": (OSError,), "default_retry_delay": 700}, "measured"),
    "growing": ({"autoretry_for": (Odd,), "retry_backoff": 4, "max_retries": 30}, "measured"),
    "endless": ({"autoretry_for": (OSError,), "max_retries": None}, "read"),
    "late": ({"acks_late": True}, "measured"),
    "asking": ({"bind": True}, "read"),
    "asking_later": ({"bind": True}, "read"),
}
BODIES = {"asking": asks, "asking_later": asks_later}
DRAMATIQ: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "measured"),
    "once": ({"max_retries": 0}, "measured"),
    "short": ({"max_retries": 3, "min_backoff": 10, "throws": (OSError,)}, "measured"),
    "endless": ({"max_retries": None, "max_backoff": 9000}, "read"),
    "asked": ({"retry_when": never}, NOT_KNOWN),
}


def shop() -> Celery:
    """An app whose broker and results are nowhere."""
    app = Celery("shop", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    app.conf.update(task_store_eager_result=True, task_eager_propagates=True)
    for name, (options, _) in CELERY.items():
        app.task(shared=False, name=name, **options)(BODIES.get(name, never))
    return app


def broker() -> RedisBroker:
    """A broker that is nowhere."""
    found = RedisBroker(url=NOWHERE)
    for name, (options, _) in DRAMATIQ.items():
        dramatiq.actor(never, broker=found, actor_name=name, **options)
    return found


def verdicts(found: list[Planned]) -> dict[str, str]:
    """The verdict on each task; nothing that was measured may differ from what was read."""
    assert not [text for one in found for text in one.differences if text.startswith("measured")]
    return {one.name: one.verdict for one in found}


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Natively and under the policies: as often and as long as was read, whatever the settings."""
    monkeypatch.setenv("OJS_BRIDGE_STORE", NOWHERE)
    monkeypatch.setenv("OJS_BRIDGE_CANARY", "0")
    app = shop()
    assert verdicts(measured(app, of_celery(app))) == {name: told for name, (_, told) in CELERY.items()}
    actors = broker()
    found = verdicts(measured_on_dramatiq(actors, of_dramatiq(actors)))
    assert found == {name: told for name, (_, told) in DRAMATIQ.items()}


def test_a_plan_that_is_wrong_is_found_out() -> None:
    """A task that was read wrongly becomes unknown; other run counts under the policy are a difference."""
    app = shop()
    read = {one.name: one for one in of_celery(app)}
    wrong = read["steady"]
    assert wrong.native is not None
    often = replace(wrong, native=replace(wrong.native, runs=9))
    other = replace(read["growing"], policy={**(read["growing"].policy or {}), "max_attempts": 3})
    first, second = measured(app, [often, other])
    assert (first.native, first.policy, first.verdict) == (NativeRetries.unknown(), None, NOT_KNOWN)
    assert str(first.open[0]) == "measured: it ran 4 times, not as it was read"
    assert "measured under the policy: it ran 3 times" in second.differences


def test_what_is_under_the_bridge_is_not_measured() -> None:
    """Natively it does nothing any more."""
    app = shop()
    install(app, Bridge())
    with pytest.raises(ConfigurationError, match="the app is under the bridge already"):
        measured(app, of_celery(app))


class Hidden(Middleware):
    """It sets a limit as no reader of its code sees, and sends a message for each failure."""

    told: Any

    def before_process_message(self, broker: Any, message: Any) -> None:
        getattr(self, "_".join(("", "limit")))(message)

    def after_process_message(self, broker: Any, message: Any, **_: Any) -> None:
        self.told.send()

    def _limit(self, message: Any) -> None:
        message.options["max_retries"] = 1


def test_what_is_measured_has_all_that_the_app_has() -> None:
    """A limit that only the user's middleware, or a task's own hook, sets is found out; nothing is sent."""
    actors, hidden = broker(), Hidden()
    hidden.told = actors.actors["once"]
    actors.add_middleware(hidden)
    read = [one for one in of_dramatiq(actors) if one.name in ("plain", "short")]
    assert [one.verdict for one in read] == ["read", "read"]
    for one in measured_on_dramatiq(actors, read):
        assert [str(x) for x in one.open] == ["measured: it ran 2 times, not as it was read"]

    class Own(Task):
        def before_start(self, *_: Any) -> None:
            setattr(self, "_".join(("max", "retries")), 8)

    app = shop()
    app.task(shared=False, name="hidden", base=Own, autoretry_for=(OSError,))(never)
    (found,) = measured(app, of_celery(app, ["hidden"]))
    assert [str(x) for x in found.open] == ["measured: it ran 9 times, not as it was read"]


SHOP = """
from celery import Celery
app = Celery("shop", broker="redis://127.0.0.1:1/0")
@app.task(name="mail", autoretry_for=(OSError,), max_retries=2, default_retry_delay=30, shared=False)
def mail(order):
    print("called")
"""


def test_on_the_command_line(tmp_path: Path) -> None:
    """The command shows the measured plan."""
    (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
    lines = ("plan", "shop:app", "--verify", "--all")
    text = spawn(*lines, cwd=tmp_path)
    assert (text.code, text.err) == (0, "")
    told = " ".join(text.out.split())
    assert "1 do exactly what they do today; 1 measured" in told
    assert "mail verdict measured runs 3 waits" in told
    (found,) = spawn(*lines, "--format", "json", cwd=tmp_path).json
    assert (found["verdict"], found["native"]["runs"]) == ("measured", 3)
