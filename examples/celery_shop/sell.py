"""Customers place orders, 20 or as many as you say: `python sell.py 5`. It knows the tasks by name only."""

import os
import sys

import outside
from celery import Celery

app = Celery(broker=os.environ["BROKER_URL"])
for order, card in outside.new_orders(int(sys.argv[1]) if sys.argv[1:] else 20):
    app.send_task("before.charge", (order, card))
    app.send_task("before.send_receipt", (order, f"customer-{order}@example.org"))
    app.send_task("before.sync_crm", (order,))
    app.send_task("before.book", (order,))
