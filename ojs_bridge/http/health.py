"""The route of the health, for probes. Without a token it tells the status alone."""

from __future__ import annotations

from starlette.requests import Request

from ..bridge import Bridge
from . import shapes
from .answers import Refusal
from .guarding import ANONYMOUS
from .routes import Operation, answers

HEALTH: list[Operation] = []


class Health:
    """Serves the health of a bridge's fleet."""

    def __init__(self, bridge: Bridge) -> None:
        self._probe = bridge.health

    @answers(HEALTH, "GET", "/health")
    def get(self, request: Request) -> shapes.Health:
        """Tell the health of store, broker, workers and parked retries; 503 if store or broker are away."""
        found = self._probe.check()
        told: shapes.Health = {"status": found.status}
        if ANONYMOUS not in request.scope:
            told["checks"] = found.to_ojs()["checks"]
        if found.status == "away":
            message = "the store or the broker is away"
            raise Refusal(503, "backend_error", message, retryable=True, details={**told})
        return told
