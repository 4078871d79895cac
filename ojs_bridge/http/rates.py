"""The route of rates: how many runs came to which outcome over time."""

from __future__ import annotations

from typing import cast

from ..bridge import Bridge
from . import shapes
from .requests import RatesQuery
from .routes import Operation, answers

RATES: list[Operation] = []


class Rates:
    """Serves the rates of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(RATES, "GET", "/rates")
    def get(self, query: RatesQuery) -> shapes.Rates:
        """Count runs by the minute or by the hour; of the last 14 days at most."""
        return cast(shapes.Rates, self._bridge.rates(**dict(query)).to_ojs())
