"""An empty store of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from ojs_bridge import open_store
from ojs_bridge.store import Store
from tests.conftest import store_url


@pytest.fixture(params=["sqlite", "postgres"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """The URL of a new store of each kind that speaks SQL, for tests that look into its tables."""
    fresh: str = (
        request.getfixturevalue("postgres_url")
        if request.param == "postgres"
        else store_url("sqlite", request)
    )
    return fresh


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


@pytest.fixture
def role(postgres_url: str) -> Iterator[str]:
    """A role of PostgreSQL that may create nothing."""
    role = f"{urlsplit(postgres_url).path[1:]}_role"
    run(postgres_url, f"create role {role} login", "revoke create on schema public from public")
    yield role
    run(postgres_url, f"drop owned by {role}", f"drop role {role}")


def run(url: str, *statements: str) -> None:
    """Run statements."""
    with sa.create_engine(url).begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def grant_to(role: str) -> str:
    """Return the statement that lets a role use what is there."""
    return f"grant select, insert, update, delete on all tables in schema public to {role}"
