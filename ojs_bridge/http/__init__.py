"""The HTTP API for dead letters and what waits, by the routes of the Open Job Spec, and its page."""

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[http]'") from None

from .app import app_for, serve

__all__ = ["app_for", "serve"]
