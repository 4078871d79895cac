"""Django: jobs that are sent on commit, and middleware by its dotted path."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import ConfigurationError
from ojs_bridge.celery import ojs_task
from ojs_bridge.dramatiq import OJSRetries, bridge_of
from tests.shops import EXAMPLES

pytest.importorskip("django")
pytest.importorskip("django_dramatiq")
from django_dramatiq.utils import load_middleware

ON_COMMIT = """
    import contextlib, json, os, sys, types
    import django
    from celery import Celery, shared_task, signals
    from celery.contrib.django.task import DjangoTask
    from django.db import transaction

    settings = sys.modules["settings_here"] = types.ModuleType("settings_here")
    settings.DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    settings.CELERY_BROKER_URL = "memory://"
    settings.OJS_BRIDGE = {"retry": {"max_attempts": 4}, "store": sys.argv[1], "park_delays": True}
    os.environ["DJANGO_SETTINGS_MODULE"] = "settings_here"

    from ojs_bridge import InvalidRetryPolicy
    from ojs_bridge.celery import install, ojs_task
    from ojs_bridge.celery.installation import is_bridged, task_policy

    app = Celery("shop")
    app.config_from_object("django.conf:settings", namespace="CELERY")
    bridge = install(app)

    @shared_task
    def installed(order): ...

    @ojs_task(app)
    def own(order): ...

    @ojs_task
    def shared(order): ...

    django.setup()
    sent = []

    @signals.before_task_publish.connect(weak=False)
    def note(body, headers, **_):
        sent.append([body[0][0], json.loads(headers.get("ojs", "{}")).get("retry")])

    def use(task):
        sent.clear()
        told = {
            "django": isinstance(task, DjangoTask),
            "bridged": is_bridged(task),
            "attempts": task_policy(app, task).policy.max_attempts,
        }
        with transaction.atomic():
            task.delay_on_commit(1)
            task.apply_async_on_commit((2,), ojs_retry={"max_attempts": 2})
            told["within"] = list(sent)
        told["after"] = list(sent)
        problems, wrong = [], {"max_attempts": -1}
        linked = app.signature(task.name, (4,)).set(ojs_retry=wrong)
        for options in ({"ojs_retry": wrong}, {"link": linked}):
            try:
                with transaction.atomic():
                    task.apply_async_on_commit((3,), **options)
            except InvalidRetryPolicy as error:
                problems.append(error.problems[0].partition(": ")[2])
        told["rolled back"] = sent == told["after"]
        with contextlib.suppress(KeyError), transaction.atomic():
            task.apply_async_on_commit((4,), countdown=7200)
            raise KeyError
        with transaction.atomic():
            task.apply_async_on_commit((5,), countdown=7200)
            told["parked"] = [bridge.scheduled.count(type=task.name)]
        told["parked"].append(bridge.scheduled.count(type=task.name))
        return {**told, "problems": problems}

    told = {task.name: use(app.tasks[task.name]) for task in (installed, own, shared)}
    print(json.dumps(told))
"""


def test_what_is_sent_on_commit(tmp_path: Path) -> None:
    """`install` and both forms of `@ojs_task` send after the commit, and refuse a wrong policy before it.

    A delayed job waits in the store from the commit on, and a transaction that is rolled back has sent none.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_COMMIT), f"sqlite:///{tmp_path}/ojs.db"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.keys() == {"shop.installed", "shop.own", "shop.shared"}
    for found in told.values():
        assert found == {
            "django": True,
            "bridged": True,
            "attempts": 4,
            "within": [],
            "after": [[1, None], [2, {"max_attempts": 2}]],
            "parked": [0, 1],
            "problems": ["max_attempts: -1 must be >= 0"] * 2,
            "rolled back": True,
        }


def test_a_middleware_by_its_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`django_dramatiq` makes it without arguments: bridge and policies are the configured ones."""
    monkeypatch.setenv("OJS_BRIDGE_RETRY", '{"jitter": false}')
    monkeypatch.setenv("OJS_BRIDGE_POLICIES", str(EXAMPLES / "fastapi_shop" / "policies.toml"))
    broker = StubBroker(middleware=[load_middleware("ojs_bridge.dramatiq.OJSRetries")])
    for name in ("charge", "ship"):
        dramatiq.actor(print, actor_name=name, broker=broker)
    [middleware] = broker.middleware
    assert isinstance(middleware, OJSRetries)
    task = middleware.actors.tasks["charge"]
    assert task is not None
    assert (task.policy.max_attempts, task.policy.jitter, task.policy.on_exhaustion) == (
        5,
        False,
        "dead_letter",
    )
    assert middleware.actors.tasks["ship"] is None
    assert bridge_of(broker) is middleware.bridge
    with pytest.raises(ConfigurationError, match="has no bridge: add the middleware OJSRetries to it"):
        bridge_of(StubBroker())


def test_a_task_that_is_not_djangos() -> None:
    """The task gets no method that it cannot carry out."""
    app = Celery("plain", set_as_current=False)
    assert not hasattr(ojs_task(app)(print), "apply_async_on_commit")
