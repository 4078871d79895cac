"""`ojs-bridge plan` reads beneath the wrappers that an instrumentation has put into the frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import Ran, spawn_all

INSTRUMENTED = """
import os
kind = os.environ["KIND"]
if kind == "sentry":
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.integrations.dramatiq import DramatiqIntegration
    sentry_sdk.init(
        "http://key@127.0.0.1:1/1", transport=lambda event: None, auto_enabling_integrations=False,
        integrations=[CeleryIntegration(), DramatiqIntegration()],
    )
if kind == "opentelemetry":
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    CeleryInstrumentor().instrument()
if kind == "functools":
    from newrelic import watched
elif kind == "wrapt":
    from ddtrace import watched
else:
    watched = lambda function: function
"""
#: Stands for an agent that wraps by `functools.wraps`, and for one that wraps by wrapt.
BY_FUNCTOOLS = """
import functools
def watched(function):
    @functools.wraps(function)
    def retry(*args, **kwargs):
        return function(*args, **kwargs)
    return retry
"""
BY_WRAPT = """
import wrapt
def _watch(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs)
class Watching(wrapt.FunctionWrapper):
    pass
def watched(function):
    return Watching(function, _watch)
"""
CELERY = """
from celery import Celery, Task
from instrumented import watched

app = Celery("shop", broker="memory://")
Task.apply_async = watched(Task.apply_async)

@app.task(name="charge", autoretry_for=(OSError,), retry_backoff=4, max_retries=5, shared=False)
def charge(order):
    raise OSError

@app.task(name="mail", bind=True, max_retries=2, shared=False)
def mail(self, order):
    try:
        raise OSError
    except OSError as error:
        raise self.retry(exc=error, countdown=30)

@app.task(name="quiet", shared=False)
def quiet(order):
    pass

@app.task(name="unknown", bind=True, shared=False)
def unknown(self, order):
    self.retry(max_retries=order)

for task in (charge, mail, quiet):
    task.apply((7,))  # Sentry wraps a task at its first run
    task.run = watched(task.run)
"""
DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from instrumented import watched

broker = RedisBroker(url="redis://127.0.0.1:1/0")
dramatiq.set_broker(broker)

@dramatiq.actor(max_retries=3, min_backoff=1000)
@watched
def sync(order):
    pass

@dramatiq.actor(max_retries=3)
@watched
def unknown(order):
    raise dramatiq.errors.Retry(delay=order)
"""
OWN = """
import wrapt
from celery import Celery
app = Celery("own", broker="memory://")

@wrapt.decorator
def again(wrapped, instance, args, kwargs):
    task = args[0] if args else instance
    try:
        return wrapped(*args, **kwargs)
    except OSError:
        task.retry(countdown=args[-1])

@app.task(name="own", bind=True, shared=False)
@again
def own(self, order):
    pass
"""
COMMANDS = [
    "plan shop:app --format json",
    "plan actors:broker --format json",
    "plan own:app --format json",
    "plan shop:app --verify --format json",
    "plan actors:broker --verify --format json",
]
KINDS = ["sentry", "opentelemetry", "functools", "wrapt"]


def plans(folder: Path, kind: str) -> list[dict[str, dict[str, Any]]]:
    """Return the plan of each command, by the names of its tasks, in a process of its own."""
    for name, text in {
        "instrumented": INSTRUMENTED, "newrelic": BY_FUNCTOOLS, "ddtrace": BY_WRAPT,
        "shop": CELERY, "actors": DRAMATIQ, "own": OWN,
    }.items():  # fmt: skip
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    ran = spawn_all(*map(str.split, COMMANDS), cwd=folder, KIND=kind)
    return [by_name(one) for one in ran]


def by_name(ran: Ran) -> dict[str, dict[str, Any]]:
    """Return the tasks of a plan."""
    assert ran.code == 0, ran.err
    return {one["name"]: one for one in ran.json}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """The plans without an instrumentation."""
    return plans(tmp_path_factory.mktemp("bare"), "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_reads_through_an_instrumentation(
    kind: str, bare: list[dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    """It is the same plan, read or measured; what is not known without it is not known with it."""
    found = plans(tmp_path, kind)
    for plan, expected in zip(found, bare, strict=True):
        assert plan == expected
    verdicts = [{name: one["verdict"] for name, one in plan.items()} for plan in found]
    assert verdicts == [
        {"charge": "read", "mail": "read", "quiet": "read", "unknown": "not known"},
        {"sync": "read", "unknown": "not known"},
        {"own": "not known"},
        {"charge": "measured", "mail": "read", "quiet": "measured", "unknown": "not known"},
        {"sync": "measured", "unknown": "not known"},
    ]
