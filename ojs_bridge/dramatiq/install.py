"""The installation: a broker is put under a bridge, and the bridge of a broker is found."""

from __future__ import annotations

from dramatiq.broker import Broker
from dramatiq.middleware import Retries

from ..bridge import Bridge
from ..config.policies import PoliciesOrFile
from ..config.settings import InFlight
from ..engine.canary import Percentages
from ..errors import ConfigurationError
from .middleware import OJSRetries


def install(
    broker: Broker,
    bridge: Bridge | None = None,
    *,
    policies: PoliciesOrFile | None = None,
    canary: Percentages | None = None,
    in_flight: InFlight = "counted",
) -> OJSRetries:
    """Put a whole broker, or the actors that `policies` names, under the bridge; return the middleware.

    The arguments are those of OJSRetries. Raises InvalidRetryPolicy and ConfigurationError.
    """
    middleware = OJSRetries(bridge, policies=policies, canary=canary, in_flight=in_flight)
    if not any(isinstance(m, Retries) for m in broker.middleware):
        middleware.expect_no_retries()
    broker.add_middleware(middleware)
    middleware.take_over(broker)
    return middleware


def bridge_of(broker: Broker) -> Bridge:
    """Return a broker's bridge, ready to replay its dead letters; raises ConfigurationError."""
    for middleware in broker.middleware:
        if isinstance(middleware, OJSRetries):
            middleware.take_over(broker)
            return middleware.bridge
    raise ConfigurationError(f"broker: {broker!r} has no bridge: add the middleware OJSRetries to it")
