"""An online shop on Celery."""

import os

import outside
from celery import Celery

from ojs_bridge import Bridge, Discard, Event, Fail, Retry, Snooze
from ojs_bridge.celery import install, ojs_task


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
app = Celery("shop", broker=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
install(app, bridge)


@ojs_task(app, retry={"max_attempts": 5})
def charge(order: int, card: str) -> None:
    """Charge the customer's card."""
    try:
        outside.charge(order, card)
    except outside.Declined as error:
        raise Discard("payment.declined", str(error)) from error
    except outside.Busy as error:
        raise Retry("payment.busy", str(error), after=error.retry_after) from error


@ojs_task(app, retry={"max_attempts": 8, "backoff_strategy": "linear", "on_exhaustion": "discard"})
def send_receipt(order: int, address: str) -> None:
    """Send the receipt, once the order is packed."""
    if "@" not in address:
        raise Fail("validation.address", address)
    if not outside.is_packed(order):
        raise Snooze("PT1S")
    outside.send_mail(order, address)


@ojs_task(app)
def sync_crm(order: int) -> None:
    """Tell the sales department."""
    outside.tell_crm(order)
