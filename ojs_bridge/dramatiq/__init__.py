"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

try:
    import dramatiq  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[dramatiq]'") from None

from .middleware import OJSRetries, bridge_of, install

__all__ = ["OJSRetries", "bridge_of", "install"]
