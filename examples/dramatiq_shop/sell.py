"""Customers place orders, 20 or as many as you say: `python sell.py 5`. It knows the actors by name only."""

import os
import sys

import outside
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=os.environ["BROKER_URL"])


def send(actor: str, *args: object) -> None:
    """Send a message to an actor of the shop."""
    broker.enqueue(Message("default", actor, args, {}, {}))


for order, card in outside.new_orders(int(sys.argv[1]) if sys.argv[1:] else 20):
    send("charge", order, card)
    send("send_receipt", order, f"customer-{order}@example.org")
    send("sync_crm", order)
    send("book", order)
