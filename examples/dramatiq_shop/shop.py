"""An online shop on Dramatiq."""

import os

import dramatiq
import outside
from dramatiq.brokers.redis import RedisBroker

from ojs_bridge import Bridge, Discard, Event, Fail, Retry, Snooze
from ojs_bridge.dramatiq import OJSRetries


def page(event: Event) -> None:
    """Page somebody for a job that needs a human."""
    if event.type == "dead_letter.added":
        print(f"PAGER: {event.data['job_type']} {event.subject}")


bridge = Bridge(
    store="sqlite:///dead-letters.db",
    retry={"initial_interval": "PT0.5S", "on_exhaustion": "dead_letter"},
    errors={
        ConnectionError: "external.unreachable",
        outside.CardStolen: ("payment.card_stolen", "DEAD_LETTER"),
    },
    listeners=[page],
)
broker = RedisBroker(url=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
broker.add_middleware(OJSRetries(bridge))
dramatiq.set_broker(broker)


@dramatiq.actor(ojs_retry={"max_attempts": 5})
def charge(order: int, card: str) -> None:
    """Charge the customer's card."""
    try:
        outside.charge(order, card)
    except outside.Declined as error:
        raise Discard("payment.declined", str(error)) from error
    except outside.Busy as error:
        raise Retry("payment.busy", str(error), after=error.retry_after) from error


@dramatiq.actor(ojs_retry={"max_attempts": 8, "backoff_strategy": "linear", "on_exhaustion": "discard"})
def send_receipt(order: int, address: str) -> None:
    """Send the receipt, once the order is packed."""
    if "@" not in address:
        raise Fail("validation.address", address)
    if not outside.is_packed(order):
        raise Snooze("PT1S")
    outside.send_mail(order, address)


@dramatiq.actor
def sync_crm(order: int) -> None:
    """Tell the sales department."""
    outside.tell_crm(order)
