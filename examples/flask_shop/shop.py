"""An online shop on Flask and Celery."""

import os

import bank
from celery import Celery
from flask import Flask, request

from ojs_bridge.celery import install

web = Flask("shop")
app = Celery("shop", broker=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
app.conf.task_acks_late = True  # without it Celery forgets a job before it runs
bridge = install(app)


@app.task
def charge(order: int, card: str) -> None:
    """Charge the customer's card."""
    bank.charge(order, card)


@web.post("/orders/<int:order>")
def place_order(order: int) -> tuple[dict[str, int], int]:
    """Place an order."""
    charge.delay(order, request.form["card"])
    return {"order": order}, 201


@web.get("/dead-letters")
def dead_letters() -> dict[str, str]:
    """List the jobs that somebody has to look at."""
    letters = bridge.dead_letters.list().letters
    return {letter.id: f"{letter.type}: {letter.reason}" for letter in letters}
