"""The jobs."""

import bank
import dramatiq

from .models import Order


@dramatiq.actor
def charge(order: int) -> None:
    """Charge an order's card."""
    placed = Order.objects.get(pk=order)
    bank.charge(order, placed.card)
    Order.objects.filter(pk=order).update(charged=True)
