"""The shop's tests: `pytest` runs them, without Redis, without a worker and without waiting."""

from pathlib import Path
from typing import Any

import pytest
import shop

from ojs_bridge.testing import VirtualTime


@pytest.fixture
def ojs_app() -> Any:
    """Name the app whose jobs are run."""
    return shop.app


@pytest.fixture(autouse=True)
def empty_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bank know no order yet."""
    monkeypatch.chdir(tmp_path)


def order(number: int, card: str) -> None:
    """Place an order, as a customer does."""
    answer = shop.web.test_client().post(f"/orders/{number}", data={"card": card})
    assert (answer.status_code, answer.json) == (201, {"order": number})


def test_a_bank_that_does_not_answer_is_asked_again(ojs: VirtualTime) -> None:
    """The second attempt succeeds."""
    order(1, "good")
    job = ojs.run()
    assert (job.outcome, job.errors, job.waits) == ("completed", ["external.timeout"], [0.5])


def test_a_stolen_card_is_a_dead_letter(ojs: VirtualTime) -> None:
    """Nobody tries to charge it again, and the shop lists it."""
    order(2, "stolen")
    job = ojs.run()
    assert (job.outcome, job.attempts) == ("dead_letter", 1)
    assert shop.web.test_client().get("/dead-letters").json == {job.id: f"{job.type}: {job.reason}"}
