"""The Celery adapter: `@ojs_task`, `OJSTask`, and `install` for a whole app."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[celery]'") from None

from celery import Celery
from celery.app.utils import find_app

from ..adapters import Framework
from ..bridge import Bridge
from ..errors import ConfigurationError
from . import compat, installation
from .ends import LostAttempt, RefusedJob
from .install import install, ojs_task
from .task import OJSTask
from .wire import NAME

__all__ = ["LostAttempt", "OJSTask", "RefusedJob", "install", "ojs_task"]


def _find(name: str, _: bool) -> Celery | None:
    with suppress(AttributeError, ImportError):
        app = find_app(name)
        return app if isinstance(app, Celery) else None
    return None


def _tasks_of(app: Celery) -> Mapping[str, Any]:
    app.loader.import_default_modules()
    app.finalize()
    return {**app.tasks}


def _bridge_of(app: Celery) -> Bridge:
    # A proxy such as `celery.current_app` stands for another object.
    app = compat.get_current_object(app, lambda: app)()
    app.finalize()
    if not installation.installation(app).is_prepared:
        raise ConfigurationError(
            f"the Celery app {app.main!r} has no bridge: call ojs_bridge.celery.install(app, bridge), or "
            "define its tasks with @ojs_task(app)"
        )
    return installation.attach(app)


FRAMEWORK = Framework(
    name=NAME,
    packages=frozenset({"celery", "kombu", "amqp", "billiard", "vine"}),
    kind=Celery,
    find=_find,
    tasks_of=_tasks_of,
    bridge_of=_bridge_of,
)


def __getattr__(name: str) -> object:
    if name in ("Task", "shared_task", "ojs_shared_task"):
        raise ImportError(f"ojs_bridge.celery has no {name}: from ojs_bridge.celery import ojs_task")
    if name in ("OJSRetries", "OJSMiddleware"):
        raise ImportError(f"ojs_bridge.celery has no {name}: from ojs_bridge.dramatiq import OJSRetries")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
