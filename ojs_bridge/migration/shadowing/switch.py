"""Shadow mode's switch, which workers read when they start: OJS_BRIDGE_SHADOW."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterable, Mapping

logger = logging.getLogger("ojs_bridge")

#: `on` or nothing, `off`, or name patterns of tasks with commas between them.
VARIABLE = "OJS_BRIDGE_SHADOW"

#: Where a Celery app keeps its shadow, and what a shadow is known by.
SHADOW = "_ojs_shadow"

_ON = {"", "1", "on", "true"}
_OFF = {"0", "off", "false"}


class Switch:
    """Which tasks or actors are shadowed, of those that the policies name; false when none are."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        text = environment.get(VARIABLE, "").strip()
        self._patterns: tuple[str, ...] = ("*",)
        if text.lower() in _OFF:
            self._patterns = ()
        elif text.lower() not in _ON:
            self._patterns = tuple(pattern for part in text.split(",") if (pattern := part.strip()))

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def say(self, names: Iterable[str]) -> None:
        """Say in the log how many of the tasks or actors that the policies name are shadowed."""
        count = sum(map(self.covers, names))
        logger.info("shadow mode is on for %d tasks: their failed runs are compared, nothing else", count)

    def covers(self, name: str) -> bool:
        """Return whether a task or actor is shadowed."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)
