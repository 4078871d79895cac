"""Shadow mode: the framework decides, the bridge decides beside it, and the store counts differences."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ...bridge import Bridge
from ...config.policy_files import PoliciesOrFile
from ...engine.runs import TaskPolicy
from ...errors import ConfigurationError
from ...spec.patterns import matches
from .comparing import BRIDGED
from .recording import FailedRun, Recorder, harmless

logger = logging.getLogger("ojs_bridge")

__all__ = ["shadow"]

#: The attribute of a Celery app for its shadow, and the attribute that marks a shadow.
SHADOW = "_ojs_shadow"
#: The switch that workers read at their start: `on` or empty, `off`, or name patterns between commas.
VARIABLE = "OJS_BRIDGE_SHADOW"
_ON = {"", "1", "on", "true"}
_OFF = {"0", "off", "false"}


def shadow(
    app_or_broker: Any, bridge: Bridge | None = None, *, policies: PoliciesOrFile | None = None
) -> None:
    """Compare the failed runs of a Celery app or Dramatiq broker to the decisions of a bridge.

    `policies` are those of an `install`; tasks that no pattern names are not shadowed. A worker reads them at
    its start, and OJS_BRIDGE_SHADOW, which may say `off` or name patterns of tasks. It tells errors of these
    in its log. Raises ConfigurationError for any other object, and for one that has a shadow already.
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
    """Return the bridge of an app's or broker's shadow, if it has one."""
    found = [getattr(app_or_broker, SHADOW, None), *getattr(app_or_broker, "middleware", ())]
    return next((one.bridge for one in found if getattr(one, SHADOW, False)), None)


def _is(found: Any, module: str, name: str) -> bool:
    """Return whether an object is of a framework's class, without importing that framework."""
    return module in sys.modules and isinstance(found, getattr(sys.modules[module], name))


class Switch:
    """The switch of shadow mode; false when it shadows nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        text = environment.get(VARIABLE, "").strip()
        self._patterns = [pattern for part in text.split(",") if (pattern := part.strip())]
        if text.lower() in _ON | _OFF:
            self._patterns = ["*"] if text.lower() in _ON else []

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def covers(self, name: str) -> bool:
        """Return whether a task or actor is shadowed."""
        return any(matches(name, pattern) for pattern in self._patterns)


class Shadow:
    """The shadow of an app or broker: it has the failed runs of a worker compared."""

    _ojs_shadow = True

    def __init__(self, bridge: Bridge | None, policies: PoliciesOrFile | None) -> None:
        self._bridge = bridge
        self._policies = policies
        #: None while shadow mode is off.
        self._recorder: Recorder | None = None
        self._switch = Switch({VARIABLE: "off"})
        self._shadowed: dict[str, TaskPolicy | None] = {}

    @property
    def bridge(self) -> Bridge:
        """The bridge whose policies decide beside the framework, and whose store keeps the tallies."""
        if self._bridge is None:
            self._bridge = Bridge()
        return self._bridge

    def _begin(self, framework: str) -> None:
        """Start shadow mode, unless the worker has it off or the settings are wrong."""
        self._recorder, self._shadowed, self._switch = None, {}, Switch()
        with harmless("it stays off"):
            if not self._switch:
                return
            if self.bridge.store is None:
                raise ConfigurationError("shadow mode needs a store: Bridge(store=...), or OJS_BRIDGE_STORE")
            count = sum(map(self._switch.covers, self._named()))
            logger.info("shadow mode is on for %d tasks: their failed runs are compared, nothing else", count)
            self._recorder = Recorder(framework, self.bridge)

    def _named(self) -> Iterable[str]:
        """Read the policies; return the names of their tasks or actors."""
        raise NotImplementedError

    def _resolved(self, name: str) -> TaskPolicy | None:
        """Return the policy that `install` would give a task; None for a task that it would not move."""
        raise NotImplementedError

    def _policy(self, name: str, *, is_bridged: bool) -> TaskPolicy | None:
        """Return the policy for comparing a failed run; None for a run that is not compared.

        A run of a shadowed task is counted even then.
        """
        if name not in self._shadowed:
            self._shadowed[name] = None
            if self._switch.covers(name):
                self._shadowed[name] = self._resolved(name)
        policy = self._shadowed[name]
        if policy is None or self._recorder is None:
            return None
        pending = self._recorder.pending
        if is_bridged:
            pending.count(name, BRIDGED)
            return None
        return policy if pending.takes(name) else None

    def _compare(self, failed: FailedRun) -> None:
        if self._recorder is not None:
            self._recorder.pending.add(failed)

    def _end(self, **_: Any) -> None:
        """Write the pending tallies."""
        if self._recorder is not None:
            with harmless("the last tallies are not written"):
                self._recorder.close()
