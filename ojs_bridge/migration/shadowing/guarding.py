"""What keeps shadow mode from affecting a job or a worker."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from ...bridge import Bridge
from ...errors import ConfigurationError, InvalidRetryPolicy

logger = logging.getLogger("ojs_bridge")

#: Seconds from one line in the log to the next of its kind.
_SILENT_SECONDS = 60.0
_said: dict[str, float] = {}


class harmless:  # noqa: N801 - reads as the statement that it is
    """Logs whatever is raised in its block, once a minute, and goes on; even what a `__str__` exits with."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Log an error, without its message unless it is our own: it may hold arguments, or raise."""
        if error is None:
            return False
        now = time.monotonic()
        if now - _said.get(self._what, float("-inf")) >= _SILENT_SECONDS:
            _said[self._what] = now
            with suppress(BaseException):
                logger.error("shadow mode: %s: %s", self._what, _told(error))
        return True


def _told(error: BaseException) -> str:
    known = isinstance(error, ConfigurationError | InvalidRetryPolicy)
    return f"{type(error).__name__}: {error}" if known else type(error).__name__


def ready(bridge: Bridge) -> Bridge:
    """Return the bridge; raises ConfigurationError for one that has nowhere to keep tallies."""
    if bridge.store is None:
        raise ConfigurationError("shadow mode needs a store: Bridge(store=...), or OJS_BRIDGE_STORE")
    return bridge
