"""The small form of `make delays`: each delayed job runs once, and not early, though workers come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.delays.fleets import FLEETS
from tests.delays.trial import Trial

SOONEST, LATEST = 1.5, 4
DEPLOYED, KILLED = (1,), (2.5,)


@pytest.mark.parametrize(
    ("framework", "broker", "store"),
    [
        ("celery", "valkey", "sqlite"),
        ("celery", "rabbitmq", "postgres"),
        ("dramatiq", "valkey", "postgres"),
        ("dramatiq", "rabbitmq", "sqlite"),
    ],
)
def test_a_delayed_job_runs_once_and_not_early_though_workers_are_replaced(
    framework: str, broker: str, store: str, tmp_path: Path
) -> None:
    trial = Trial(
        FLEETS[framework].name,
        *(framework, broker, SOONEST, LATEST),
        jobs=40,
        workers=2,
        park_after="PT0.3S",
        visibility=3,
        deploys=DEPLOYED,
        killed=KILLED,
        quiet=2,
    )
    verdict = trial.run(tmp_path, store=store)
    assert verdict.is_kept, f"{verdict}\n{verdict.log[-20_000:]}"
