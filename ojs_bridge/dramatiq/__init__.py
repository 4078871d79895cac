"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

try:
    import dramatiq  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[dramatiq]'") from None

from .middleware import OJSRetries, bridge_of, install

__all__ = ["OJSRetries", "bridge_of", "install"]


def __getattr__(name: str) -> object:
    if name in ("OJSMiddleware", "OJSRetry", "OjsRetries", "Retries", "Middleware"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: from ojs_bridge.dramatiq import OJSRetries")
    if name in ("actor", "ojs_actor"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: @dramatiq.actor(ojs_retry=...) has a policy")
    if name in ("ojs_task", "OJSTask"):
        raise ImportError(f"ojs_bridge.dramatiq has no {name}: from ojs_bridge.celery import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
