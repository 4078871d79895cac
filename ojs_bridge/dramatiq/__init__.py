"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

from .installed import bridge_of
from .middleware import OJSRetries, install

__all__ = ["OJSRetries", "bridge_of", "install"]
