"""What `django_dramatiq` shows of a job that waits, in a process of its own: settings are made once.

The arguments are the URLs of the broker and of the store, or "" for Dramatiq alone, then the folder of the
database, and how the job's first run ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import django
from django.conf import settings

RETRIES = "dramatiq.middleware.Retries"
#: In the order of docs/how-to/django.md.
MIDDLEWARE = [
    "dramatiq.middleware.AgeLimit",
    "dramatiq.middleware.TimeLimit",
    "dramatiq.middleware.Callbacks",
    "ojs_bridge.dramatiq.OJSRetries",
    "django_dramatiq.middleware.AdminMiddleware",
    "django_dramatiq.middleware.DbConnectionsMiddleware",
]


def configure(broker: str, store: str, folder: str) -> None:
    """Set Django and its broker up."""
    native = [RETRIES if "ojs_bridge" in path else path for path in MIDDLEWARE]
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/django.db"}
    settings.configure(
        INSTALLED_APPS=["django_dramatiq"],
        DATABASES={"default": {**sqlite, "OPTIONS": {"timeout": 30}}},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        USE_TZ=True,
        OJS_BRIDGE={"store": store, "park_after": "PT1S"} if store else {},
        DRAMATIQ_BROKER={
            "BROKER": "dramatiq.brokers.redis.RedisBroker",
            "OPTIONS": {"url": broker, "namespace": f"admin-{time.time()}"},
            "MIDDLEWARE": MIDDLEWARE if store else native,
        },
    )
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def until(condition: Callable[[], Any]) -> Any:
    """Return what is true in the end."""
    while not (found := condition()):
        time.sleep(0.05)
    return found


def main(broker_url: str, store: str, folder: str, ends: str) -> None:
    """Run a job twice; print what is shown while it waits."""
    configure(broker_url, store, folder)
    import dramatiq
    from django_dramatiq.models import Task

    from ojs_bridge import Snooze

    broker = dramatiq.get_broker()
    runs: list[int] = []

    @dramatiq.actor(max_retries=2, min_backoff=3000, max_backoff=3000)
    def job() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise Snooze("PT3S") if ends == "snooze" else OSError("down")

    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    job.send()

    def shown() -> Any:
        return Task.tasks.values_list("status", flat=True).first()

    until(lambda: runs)
    waits = until(lambda: (shown() == "delayed" and "delayed") or (len(runs) == 2 and "never delayed"))
    until(lambda: len(runs) == 2)
    print(waits)
    worker.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
