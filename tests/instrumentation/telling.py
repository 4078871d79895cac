"""What others hear of a job: signals, hooks, and the rows of Django's apps, noted in the order of time."""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import dramatiq
from celery import current_app, signals

from ojs_bridge import Bridge
from ojs_bridge.celery.installation import attach
from ojs_bridge.dramatiq.middleware import bridge_of
from tests.contract.notes import VARIABLE, Noting, Settings

SIGNALS = (
    *("task_prerun", "before_task_publish", "after_task_publish", "task_retry"),
    *("task_success", "task_failure", "task_revoked", "task_rejected", "task_unknown", "task_postrun"),
)
#: The table of each app of Django that shows jobs, and the column of their ids.
SHOWN = {
    "celery": ("django_celery_results_taskresult", "task_id"),
    "dramatiq": ("django_dramatiq_task", "id"),
}
_heard: list[Any] = []


def heard(bridge: Bridge, settings: Settings) -> None:
    """Note each of Celery's signals about a job, with its error or its state."""
    noting = Noting(settings.backend)

    def hears(name: str) -> Callable[..., None]:
        def receiver(sender: Any = None, **told: Any) -> None:
            request = told.get("request") or getattr(sender, "request", None)
            job = told.get("task_id") or (told.get("headers") or {}).get("id") or getattr(request, "id", "")
            reason = getattr(told.get("reason"), "exc", None) or told.get("exception")
            more = told.get("state") or (type(reason).__name__ if reason is not None else "")
            noting.note("told", job, f"{name}({more})" if more else name)

        return receiver

    for name in SIGNALS:
        _heard.append(hears(name))
        getattr(signals, name).connect(_heard[-1])


def _hook(name: str) -> Callable[..., None]:
    def hook(self: Any, broker: Any, message: Any, delay: Any = None, **told: Any) -> None:
        more = "delay" if delay else type(told["exception"]).__name__ if told.get("exception") else ""
        more = more or ("failed" if getattr(message, "failed", False) else "")
        self.noting.note("told", message.message_id, f"{name}({more})" if more else name)

    return hook


class Hooks(dramatiq.Middleware):
    """Notes each hook about a job, with its delay or its error."""

    def __init__(self) -> None:
        self.noting = Noting(Settings.from_env().backend)

    def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
        """Note it, after what sent the message has heard so: the message may run before that."""
        job = message.message_id
        while self.noting.read("told", job)[-1:] in (["before_enqueue"], ["before_enqueue(delay)"]):
            time.sleep(0.01)
        self.noting.note("told", job, "before_process_message")

    before_enqueue, after_enqueue = _hook("before_enqueue"), _hook("after_enqueue")
    before_delay_message = _hook("before_delay_message")
    after_process_message, after_skip_message = _hook("after_process_message"), _hook("after_skip_message")
    before_ack, after_ack = _hook("before_ack"), _hook("after_ack")
    before_nack, after_nack = _hook("before_nack"), _hook("after_nack")


def database_of(settings: Settings) -> str:
    """Return the file of Django's database."""
    return f"{(settings.store or '').removeprefix('sqlite:///')}.django"


def django(bridge: Bridge, settings: Settings) -> None:
    """Set Django up in a worker, with its apps for results and for Dramatiq; each new state is noted."""
    if VARIABLE not in os.environ:
        return
    from django import VERSION, setup
    from django.conf import settings as of_django

    is_celery = _is_celery()
    table, column = SHOWN["celery" if is_celery else "dramatiq"]
    options: dict[str, Any] = {"timeout": 30}
    if VERSION >= (5, 1):
        # Otherwise threads that first read and then write break each other's transactions.
        options["transaction_mode"] = "IMMEDIATE"
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": database_of(settings), "OPTIONS": options}
    of_django.configure(
        INSTALLED_APPS=["django_celery_results" if is_celery else "django_dramatiq"],
        # django_dramatiq makes a broker, which that of the fleet takes the place of.
        DRAMATIQ_BROKER={"BROKER": "dramatiq.brokers.stub.StubBroker", "OPTIONS": {}, "MIDDLEWARE": []},
        DATABASES={"default": database},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        USE_TZ=True,
    )
    setup()
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", verbosity=0)
    connections.close_all()
    with closing(sqlite3.connect(database_of(settings), timeout=30)) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS told (job TEXT, state TEXT)")
        for event in ("INSERT", "UPDATE"):
            connection.execute(
                f"CREATE TRIGGER IF NOT EXISTS told_{event} AFTER {event} ON {table} BEGIN "
                f"INSERT INTO told VALUES (REPLACE(NEW.{column}, '-', ''), NEW.status); END"
            )
        connection.commit()


def shown(settings: Settings, job: str) -> list[str]:
    """Return the states that Django's app has shown of a job, each once until it changes."""
    with closing(sqlite3.connect(database_of(settings), timeout=30)) as connection:
        found = connection.execute(
            "SELECT state FROM told WHERE job = ? ORDER BY rowid", [job.replace("-", "")]
        )
        states = [state for (state,) in found]
    return [state for before, state in zip([None, *states], states, strict=False) if state != before]


def operate(group: str, action: str, job: str) -> None:
    """Do in a worker what an operator does with a job."""
    bridge = attach(current_app) if _is_celery() else bridge_of(dramatiq.get_broker())
    getattr(getattr(bridge, group), action)(job)


def _is_celery() -> bool:
    return "tests.on_celery.worker" in sys.modules
