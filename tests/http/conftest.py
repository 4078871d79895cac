"""The door that most tests of the routes come through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.desks import browser, desk
from tests.http.doors import House, house

__all__ = ["browser", "desk", "door"]


@pytest.fixture
def door(tmp_path: Path) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")
