"""An empty store of each kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ojs_bridge import open_store
from ojs_bridge.store import Store
from tests.conftest import store_url


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind that speaks SQL, for tests that look into its tables."""
    return store_url(request.param, request)


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return store_url(request.param, request)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store of each kind."""
    store = open_store(url)
    yield store
    store.close()
