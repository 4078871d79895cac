"""The instruments of a fleet's bridge: what they report is noted for the tests."""

from __future__ import annotations

import json
import logging
from typing import Any

from ojs_bridge import Bridge
from tests.contract.notes import Noting, Settings
from tests.instrumentation.snippets import snippet


class Lines(logging.Handler):
    """Notes each line of the log as the formatter of the docs writes it."""

    def __init__(self, noting: Noting) -> None:
        super().__init__()
        self._noting = noting
        self.setFormatter(snippet("json_logs.py")["Json"]())

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        told: dict[str, Any] = json.loads(self.format(record))
        self._noting.note("lines", told.get("job_id", ""), told)


def logs(bridge: Bridge, settings: Settings) -> None:
    """Note the log."""
    logging.getLogger("ojs_bridge").addHandler(Lines(Noting(settings.backend)))
