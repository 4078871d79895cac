"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

from __future__ import annotations

from types import FunctionType
from typing import Any

try:
    import dramatiq  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[dramatiq]'") from None

from dramatiq import Broker, get_broker

from ..adapters import Framework
from . import compat
from .middleware import OJSRetries, bridge_of, install
from .translate import NAME, LostAttempt, Refused

__all__ = ["LostAttempt", "OJSRetries", "Refused", "bridge_of", "install"]


def _find(name: str, setting_up: bool) -> Any:
    from dramatiq.cli import import_object

    _, named = import_object(name)
    if named is None:
        # `get_broker` would make a broker if there is none.
        return compat.global_broker.find()
    if setting_up and isinstance(named, FunctionType):
        named()
        return get_broker()
    return named if isinstance(named, Broker) else None


FRAMEWORK = Framework(
    name=NAME,
    packages=frozenset({"dramatiq"}),
    kind=Broker,
    find=_find,
    tasks_of=lambda broker: broker.actors,
    bridge_of=bridge_of,
)


def __getattr__(name: str) -> object:
    if name in ("OJSMiddleware", "OJSRetry", "OjsRetries", "Retries", "Middleware"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: from ojs_bridge.dramatiq import OJSRetries")
    if name in ("actor", "ojs_actor"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: @dramatiq.actor(ojs_retry=...) has a policy")
    if name in ("ojs_task", "OJSTask"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: from ojs_bridge.celery import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
