"""Apps of a test's own, and the plan of one task of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from ojs_bridge.migration.plan import NativeRetries, Planned
from ojs_bridge.migration.plan.celery import plans as of_celery

Body = Callable[..., Any]


def app_with(body: Body, conf: dict[str, Any] | None = None, **options: Any) -> Celery:
    """An app whose only task is `job`."""
    app = Celery("planned", set_as_current=False)
    app.conf.update({"broker_url": "memory://", **(conf or {})})
    app.task(shared=False, name="job", **options)(body)
    return app


def only(app: Celery) -> Planned:
    """The plan of an app's only task."""
    (found,) = of_celery(app, ["job"])
    assert not found.unreadable
    return found


def native(app: Celery) -> NativeRetries:
    """Celery's own behaviour for an app's only task, as the plan reads it."""
    found = only(app).native
    assert found is not None
    return found
