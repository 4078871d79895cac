"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

try:
    import dramatiq  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"{error.name} is not installed: pip install 'ojs-bridge[dramatiq]'") from None

from .install import bridge_of, install
from .middleware import OJSRetries

__all__ = ["OJSRetries", "bridge_of", "install"]
