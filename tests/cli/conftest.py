"""Stores with dead letters."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from tests.lives import bridge_with_outbox
from tests.operations.test_operating import bury, celery_message
from tests.store.test_store import entry


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of an SQLite store."""
    return f"sqlite:///{tmp_path}/ojs.db"


def fill(url: str) -> Bridge:
    """Bury four letters of two types, j-0 the newest, an hour apart."""
    bridge, _ = bridge_with_outbox(url)
    for n in range(4):
        bury(
            bridge,
            f"j-{n}",
            type="mail.send" if n % 2 else "billing.charge",
            queue="slow" if n == 3 else "default",
            discarded_at=bridge.engine.now() - timedelta(hours=n, seconds=1),
            message=celery_message(n, to="ann"),
            errors=(
                entry(
                    1, timestamp="2026-11-21T10:00:00.000Z", backtrace=["File 'shop.py', line 7\n  charge()"]
                ),
                entry(3, type="external.timeout" if n < 3 else "auth.expired", message=f"no answer {n}"),
            ),
        )
    return bridge


@pytest.fixture
def bridge(store: str) -> Bridge:
    """A bridge of no app on a store with four letters."""
    return fill(store)
