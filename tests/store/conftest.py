"""An empty store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ojs_bridge import open_store
from ojs_bridge.store import Store


def url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store of a kind; a server is started when the first test asks for it."""
    if kind == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        return f"sqlite:///{folder}/ojs.db"
    served: str = request.getfixturevalue(f"{kind}_url")
    return served


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind that speaks SQL, for tests that look into its tables."""
    return url_of(request.param, request)


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return url_of(request.param, request)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store of each kind."""
    store = open_store(url)
    yield store
    store.close()
