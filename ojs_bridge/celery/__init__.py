"""The Celery adapter: `@ojs_task`, `OJSTask`, and `install` for a whole app."""

from .decorator import ojs_task
from .install import install
from .task import OJSTask

__all__ = ["OJSTask", "install", "ojs_task"]
