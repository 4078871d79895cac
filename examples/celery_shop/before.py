"""The shop as it was before the bridge: on Celery alone."""

import os

import outside
from celery import Celery

app = Celery("before", broker=os.environ["BROKER_URL"])


@app.task(bind=True, acks_late=True, max_retries=5, throws=(outside.CardStolen, outside.Declined))
def charge(self, order: int, card: str) -> None:
    """Charge the customer's card; ask a busy bank again."""
    try:
        outside.charge(order, card)
    except outside.Busy as error:
        raise self.retry(exc=error, countdown=0.5) from error


@app.task(bind=True, default_retry_delay=1, max_retries=8)
def send_receipt(self, order: int, address: str) -> None:
    """Send the receipt, once the order is packed."""
    if not outside.is_packed(order):
        raise self.retry(exc=outside.NotPacked(order))
    outside.send_mail(order, address)


@app.task(autoretry_for=(ConnectionError,), retry_backoff=4, retry_backoff_max=4, max_retries=40)
def sync_crm(order: int) -> None:
    """Tell the sales department."""
    outside.tell_crm(order)


@app.task
def book(order: int) -> None:
    """Enter the order in the books: never twice."""
    outside.book(order)
