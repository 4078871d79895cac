"""The Dramatiq adapter: `OJSRetries`, a middleware in place of the stock `Retries`."""

from .middleware import OJSRetries, install

__all__ = ["OJSRetries", "install"]
