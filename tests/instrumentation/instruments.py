"""The instruments of a fleet's bridge: what they report is noted for the tests."""

from __future__ import annotations

import json
import logging
from typing import Any

import sentry_sdk
import sentry_sdk.envelope
import sentry_sdk.transport
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.integrations.dramatiq import DramatiqIntegration

from ojs_bridge import Bridge
from ojs_bridge.instrumentation.sentry import instrument as instrument_sentry
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


class Transport(sentry_sdk.transport.Transport):
    """Notes each event that Sentry would be sent."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.noting = Noting("")

    def capture_envelope(self, envelope: sentry_sdk.envelope.Envelope) -> None:
        """Note the event of an envelope."""
        event = envelope.get_event()
        if event is not None:
            self.noting.note("sentry", event.get("tags", {}).get("ojs.job_id", ""), event)


def sentry(bridge: Bridge, settings: Settings) -> None:
    """Report to a Sentry that notes."""
    sentry_sdk.init(
        "http://key@localhost/1",
        transport=Transport,
        auto_enabling_integrations=False,
        integrations=[CeleryIntegration(), DramatiqIntegration()],
    )
    sentry_sdk.get_client().transport.noting = Noting(settings.backend)
    instrument_sentry(bridge)
