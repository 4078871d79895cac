"""The Celery adapter: `@ojs_task`, `OJSTask`, and `install` for a whole app."""

from .install import install
from .task import OJSTask, ojs_task

__all__ = ["OJSTask", "install", "ojs_task"]
