"""The shop's tests: `pytest` runs them, without Redis, without a worker and without waiting."""

from pathlib import Path
from typing import Any

import pytest
import shop

from ojs_bridge.testing import VirtualTime, explain


@pytest.fixture
def ojs_app() -> Any:
    """Name the broker whose jobs are run."""
    return shop.broker


@pytest.fixture(autouse=True)
def empty_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bank know no order yet."""
    monkeypatch.chdir(tmp_path)


def test_a_bank_that_does_not_answer_is_asked_again(ojs: VirtualTime) -> None:
    """The second attempt succeeds."""
    shop.place_order(1, "good")
    job = ojs.run()
    assert (job.outcome, job.errors, job.waits) == ("completed", ["external.timeout"], [0.5])


def test_a_stolen_card_is_a_dead_letter(ojs: VirtualTime) -> None:
    """Nobody tries to charge it again, and the shop lists it."""
    shop.place_order(2, "stolen")
    job = ojs.run()
    assert (job.outcome, job.attempts) == ("dead_letter", 1)
    assert shop.dead_letters() == {job.id: f"{job.type}: {job.reason}"}


def test_a_worker_that_dies_does_not_lose_the_order(ojs: VirtualTime) -> None:
    """The attempt counts."""
    ojs.crash()
    shop.place_order(3, "good")
    job = ojs.run()
    assert (job.outcome, job.errors) == ("completed", ["visibility_timeout", "external.timeout"])


def test_the_policy() -> None:
    """Five attempts take 7.5 seconds."""
    assert explain(shop.charge, TimeoutError()).waits == [0.5, 1, 2, 4]
