"""Shadow mode: the native behaviour stays in charge, and the bridge decides beside it."""

from __future__ import annotations

import sys
from typing import Any

from ...bridge import Bridge
from ...config.policy_files import PoliciesOrFile
from ...errors import ConfigurationError
from .switch import SHADOW

__all__ = ["shadow"]


def shadow(
    app_or_broker: Any, bridge: Bridge | None = None, *, policies: PoliciesOrFile | None = None
) -> None:
    """Have the failed runs of a Celery app or Dramatiq broker compared to what a bridge would decide.

    `policies` are those of an `install`; tasks that no pattern names are not shadowed. Nothing is read before
    a worker starts, whose OJS_BRIDGE_SHADOW may say `off` or name patterns of tasks; what is wrong then is
    told in its log. Raises ConfigurationError for anything else, and for what is shadowed already.
    """
    if _is(app_or_broker, "celery", "Celery"):
        from .on_celery import shadow_app

        shadow_app(app_or_broker, bridge, policies)
    elif _is(app_or_broker, "dramatiq", "Broker"):
        from .on_dramatiq import shadow_broker

        shadow_broker(app_or_broker, bridge, policies)
    else:
        raise ConfigurationError(f"shadow: {app_or_broker!r} is neither a Celery app nor a Dramatiq broker")


def bridge_of_shadow(app_or_broker: Any) -> Bridge | None:
    """Return the bridge that decides beside an app's or broker's own behaviour, if shadow mode was set up."""
    found = [getattr(app_or_broker, SHADOW, None), *getattr(app_or_broker, "middleware", ())]
    return next((one.bridge for one in found if getattr(one, SHADOW, False)), None)


def _is(found: Any, module: str, name: str) -> bool:
    """Return whether something is of a framework's class, without importing what was not."""
    return module in sys.modules and isinstance(found, getattr(sys.modules[module], name))
