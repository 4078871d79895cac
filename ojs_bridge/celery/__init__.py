"""The Celery adapter: `@ojs_task`, `OJSTask`, and `install` for a whole app."""

try:
    import celery  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[celery]'") from None

from .install import install, ojs_task
from .task import OJSTask

__all__ = ["OJSTask", "install", "ojs_task"]
