"""The shop's tests: `python manage.py test` runs them, without Redis or a worker."""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from django.test import TestCase

from ojs_bridge.testing import virtual_time

from .celery import app
from .models import Order


class Orders(TestCase):
    """Orders, from the page to the bank."""

    def setUp(self) -> None:
        """Run the jobs in virtual time; the bank knows no order yet."""
        stack = ExitStack()
        self.addCleanup(stack.close)
        self.ojs = stack.enter_context(virtual_time(app))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(folder)

    def place(self, card: str) -> None:
        """Place an order; its job is sent on commit."""
        with self.captureOnCommitCallbacks(execute=True):
            self.client.post("/orders", {"card": card})

    def test_a_bank_that_does_not_answer_is_asked_again(self) -> None:
        """The second attempt succeeds."""
        self.place("good")
        job = self.ojs.run()
        self.assertEqual((job.outcome, job.errors, job.waits), ("completed", ["external.timeout"], [0.5]))
        self.assertTrue(Order.objects.get().charged)

    def test_a_stolen_card_is_a_dead_letter(self) -> None:
        """The shop lists it."""
        self.place("stolen")
        job = self.ojs.run()
        self.assertEqual((job.outcome, job.attempts), ("dead_letter", 1))
        listed = self.client.get("/dead-letters").json()
        self.assertEqual(listed, {job.id: f"{job.type}: {job.reason}"})
