"""Which bridge a broker is under, for code that did not make it: Django's settings may have."""

from __future__ import annotations

from dramatiq.broker import Broker

from ..bridge import Bridge
from ..errors import ConfigurationError
from .middleware import OJSRetries


def bridge_of(broker: Broker) -> Bridge:
    """Return a broker's bridge, ready to replay its dead letters; raises ConfigurationError without one."""
    for middleware in broker.middleware:
        if isinstance(middleware, OJSRetries):
            middleware.after_process_boot(broker)
            return middleware.bridge
    raise ConfigurationError(f"broker: {broker!r} has no bridge: add the middleware OJSRetries to it")
