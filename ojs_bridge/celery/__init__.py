"""The Celery adapter: `@ojs_task`, `OJSTask`, and `install` for a whole app."""

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[celery]'") from None

from .install import install, ojs_task
from .task import OJSTask

__all__ = ["OJSTask", "install", "ojs_task"]


def __getattr__(name: str) -> object:
    if name in ("Task", "shared_task", "ojs_shared_task"):
        raise ImportError(f"ojs_bridge.celery has no {name}: from ojs_bridge.celery import ojs_task")
    if name in ("OJSRetries", "OJSMiddleware"):
        raise ImportError(f"ojs_bridge.celery has no {name}: from ojs_bridge.dramatiq import OJSRetries")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
