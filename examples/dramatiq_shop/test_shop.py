"""The shop's tests: `pytest` runs them, without Redis, without a worker and without waiting."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shop

from ojs_bridge.testing import VirtualTime


@pytest.fixture
def ojs_app() -> Any:
    """Name the broker whose jobs are run."""
    return shop.broker


@pytest.fixture(autouse=True)
def new_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the bank and the warehouse know no order yet."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("card", "outcome", "waits"),
    [
        ("good", "completed", []),
        ("busy", "completed", [1]),
        ("declined", "discarded", []),
        ("stolen", "dead_letter", []),
    ],
)
def test_a_card(ojs: VirtualTime, card: str, outcome: str, waits: list[float]) -> None:
    """A busy bank is asked again when it says; no other card is charged a second time."""
    shop.charge.send(1, card)
    job = ojs.run()
    assert (job.outcome, job.waits) == (outcome, waits)


def test_a_receipt_waits_until_the_order_is_packed(ojs: VirtualTime) -> None:
    """Waiting uses no attempt."""
    shop.send_receipt.send(1, "ada@example.org")
    job = ojs.run()
    assert (job.outcome, job.attempts, ojs.elapsed) == ("completed", 1, timedelta(seconds=1))


def test_a_crm_that_is_down_for_long(ojs: VirtualTime) -> None:
    """The job becomes a dead letter, and succeeds when it is sent back."""
    down = Path("crm-is-down")
    down.touch()
    shop.sync_crm.send_with_options(args=(1,), ojs_retry={"max_attempts": 3})
    job = ojs.run()
    assert (job.outcome, job.waits) == ("dead_letter", [0.5, 1])
    down.unlink()
    shop.bridge.dead_letters.replay(job.id)
    assert ojs.run().outcome == "completed"
