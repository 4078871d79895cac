"""The door that most tests of the routes come through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.http.doors import House, house


@pytest.fixture
def door(tmp_path: Path) -> House:
    """A door to an empty SQLite store."""
    return house(f"sqlite:///{tmp_path}/ojs.db")
