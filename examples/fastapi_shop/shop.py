"""An online shop on FastAPI and Dramatiq."""

import os

import bank
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from fastapi import FastAPI

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import OJSRetries

bridge = Bridge(
    errors={TimeoutError: "external.timeout", bank.CardStolen: ("payment.card_stolen", "DEAD_LETTER")}
)
broker = RedisBroker(url=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
broker.add_middleware(OJSRetries(bridge))
dramatiq.set_broker(broker)
web = FastAPI()


@dramatiq.actor
def charge(order: int, card: str) -> None:
    """Charge the customer's card."""
    bank.charge(order, card)


@web.post("/orders/{order}", status_code=201)
def place_order(order: int, card: str) -> dict[str, int]:
    """Place an order."""
    charge.send(order, card)
    return {"order": order}


@web.get("/dead-letters")
def dead_letters() -> dict[str, str]:
    """List the jobs that somebody has to look at."""
    letters = bridge.dead_letters.list().letters
    return {letter.id: f"{letter.type}: {letter.reason}" for letter in letters}
