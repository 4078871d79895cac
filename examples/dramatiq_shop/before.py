"""The shop as it was before the bridge: on Dramatiq alone."""

import os

import dramatiq
import outside
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=os.environ["BROKER_URL"])
dramatiq.set_broker(broker)


def is_not_packed(retries: int, error: Exception) -> bool:
    """Return whether to ask the warehouse again."""
    return isinstance(error, outside.NotPacked) and retries < 8


@dramatiq.actor(max_retries=5, min_backoff=500, throws=(outside.CardStolen, outside.Declined))
def charge(order: int, card: str) -> None:
    """Charge the customer's card; ask a busy bank again."""
    outside.charge(order, card)


@dramatiq.actor(retry_when=is_not_packed, min_backoff=500, max_backoff=1000)
def send_receipt(order: int, address: str) -> None:
    """Send the receipt, once the order is packed."""
    if not outside.is_packed(order):
        raise outside.NotPacked(order)
    outside.send_mail(order, address)


@dramatiq.actor(max_retries=40, min_backoff=2000, max_backoff=4000)
def sync_crm(order: int) -> None:
    """Tell the sales department."""
    outside.tell_crm(order)


@dramatiq.actor(max_retries=0)
def book(order: int) -> None:
    """Enter the order in the books: never twice."""
    outside.book(order)
