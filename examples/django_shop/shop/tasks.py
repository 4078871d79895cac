"""The jobs."""

import bank
from celery import shared_task

from .models import Order


@shared_task
def charge(order: int) -> None:
    """Charge an order's card."""
    placed = Order.objects.get(pk=order)
    bank.charge(order, placed.card)
    Order.objects.filter(pk=order).update(charged=True)
