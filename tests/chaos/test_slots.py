"""The small form of `make slots`: slots that workers of both frameworks share, while workers are killed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.chaos.settings import LONG_SLOTS
from tests.chaos.slots import KILLS, measured


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_slots_are_never_given_twice_and_free_within_seconds(tmp_path: Path, broker: str) -> None:
    asked = argparse.Namespace(
        broker=broker, store="redis", workers=4, seconds=24, every=3, kills=KILLS, apart=False
    )
    found = measured(asked, tmp_path)
    assert found.kills >= 6
    assert found.most <= LONG_SLOTS
    # At rest it is more than 4.8. A slot that waits for a reservation to run out is free for a minute.
    assert found.average > 3.5, found
