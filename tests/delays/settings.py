"""The settings of a fleet whose jobs are delayed, which one environment variable carries to its processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ojs_bridge import Bridge

VARIABLE = "OJS_DELAYS"
QUEUE = "delays"
#: The name of the one task, which notes that it runs, and may ask for a retry first.
TASK = "delays.mark"


@dataclass(frozen=True)
class Settings:
    """A fleet's broker, its store (None for a fleet without the bridge) and its ledger.

    `visibility` is Celery's `visibility_timeout` on Redis, in seconds; None for its default.
    """

    broker: str
    store: str | None
    ledger: str
    park_after: str = "PT1M"
    visibility: int | None = None

    @property
    def on_redis(self) -> bool:
        """Whether the broker speaks Redis' protocol."""
        return self.broker.startswith("redis")

    def to_env(self) -> dict[str, str]:
        """Return the variable that carries them."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Settings:
        """Read them."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def bridge(self) -> Bridge:
        """Make the bridge of the fleet."""
        return Bridge(self.store, park_after=self.park_after, park_delays=True)
