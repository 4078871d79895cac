"""The settings of a fleet, which one environment variable carries to all its processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from ojs_bridge import Breaker, Bridge, Budget, Dependency, Event
from tests.chaos.fates import RESERVATION
from tests.chaos.ledger import Ledger

VARIABLE = "OJS_CHAOS"
QUEUE = "chaos"
#: RabbitMQ 4 drops a message of a quorum queue after so many deliveries, unless told otherwise.
DELIVERY_LIMIT = 20
#: The slots of slow jobs, and of long ones.
SLOTS, LONG_SLOTS = 3, 5
#: Of the bank's jobs, which have too few attempts for its outage.
BREAKER = Breaker(least=10, window="PT10S", cool_down="PT2S", probes=2, ramp="40/s")
QUORUM = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}


@dataclass(frozen=True)
class Settings:
    """A fleet's broker, its store (None for a fleet without the bridge) and its ledger.

    A fleet is hasty, so that a storm of minutes shows what hours would; else the defaults decide how soon
    the job of a dead worker comes again. `heartbeat` is RabbitMQ's, in seconds.
    """

    broker: str
    store: str | None
    ledger: str
    hasty: bool = True
    heartbeat: int | None = None
    #: Whether jobs that fail have a rate, slow and long ones slots, and those of the bank a breaker.
    limited: bool = False

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

    def bridge(self, ledger: Ledger | None = None) -> Bridge:
        """Make the bridge of the fleet; a listener writes its events into the ledger."""

        def note(event: Event) -> None:
            attempt = event.data.get("attempt", event.data.get("total_attempts"))
            if ledger is not None and attempt is not None:
                ledger.note(event.type, event.subject, attempt)

        reservation = f"PT{RESERVATION}S" if self.hasty else None
        limits = (
            Dependency("slots", jobs=["slow"], concurrency=SLOTS),
            Dependency("long", jobs=["long"], concurrency=LONG_SLOTS),
            Dependency("rate", jobs=["doomed"], rate="30/s"),
            Dependency(
                *("bank", ["*.BankDown"], ["bank"], BREAKER),
                budget=Budget(0.5, least="5/s"),
                rate="30/s",
                concurrency=SLOTS,
            ),
        )
        return Bridge(
            self.store,
            listeners=[note] if ledger else [],
            reservation=reservation,
            dependencies=limits if self.limited else (),
        )
