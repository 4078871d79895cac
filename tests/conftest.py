"""Servers for the tests that ask for one, started once per session."""

import signal
from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis

from tests.servers import Postgres, RabbitMQ, Valkey


def pytest_configure() -> None:
    """Have a termination tear the servers down as an interrupt does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture
def unique() -> str:
    """A short name that no other test uses, for queues, tables and keys."""
    return f"t{uuid4().hex[:10]}"


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """The session's Valkey."""
    with Valkey() as server:
        yield server


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    """The URL of the session's Valkey, empty."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    return valkey.url


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The session's RabbitMQ."""
    with RabbitMQ() as server:
        yield server


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitMQ) -> str:
    """The URL of the session's RabbitMQ, which tests share: name queues with `unique`."""
    return rabbitmq.url


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The session's PostgreSQL."""
    with Postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres, unique: str) -> Iterator[str]:
    """The URL of a fresh database in the session's PostgreSQL."""
    postgres.execute(f"CREATE DATABASE {unique}")
    yield postgres.url_of(unique)
    postgres.execute(f"DROP DATABASE {unique} WITH (FORCE)")
