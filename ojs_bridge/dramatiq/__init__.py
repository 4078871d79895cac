"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

from .install import bridge_of, install
from .middleware import OJSRetries

__all__ = ["OJSRetries", "bridge_of", "install"]
