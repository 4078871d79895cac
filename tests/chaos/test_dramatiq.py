"""Dramatiq's jobs end as they should while workers, broker and store are killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.frameworks import OnDramatiq
from tests.servers import RabbitMQ


@pytest.mark.parametrize("broker", [RabbitMQ])
def test_no_job_is_lost_or_runs_too_often_or_too_early(survives: Callable[..., None], broker: type) -> None:
    survives(OnDramatiq(), broker)
