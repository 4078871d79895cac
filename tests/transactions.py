"""A user's connections to a database, each in a transaction: of psycopg, SQLAlchemy and Django."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeAlias

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

#: Opens a transaction, which is committed at the end unless an error ends it.
Begin: TypeAlias = Callable[[str], AbstractContextManager[Any]]


HAS_DJANGO = find_spec("django") is not None


class Undone(Exception):
    """Rolls a transaction back."""


@contextmanager
def of_psycopg(url: str) -> Iterator[Any]:
    """Psycopg: the transaction begins with the first statement."""
    with psycopg.connect(_plain(url)) as connection:
        yield connection


@contextmanager
def of_psycopg_block(url: str) -> Iterator[Any]:
    """Psycopg: a connection that commits by itself has a block of a transaction."""
    with psycopg.connect(_plain(url), autocommit=True) as connection, connection.transaction():
        yield connection


@contextmanager
def of_sqlalchemy(url: str) -> Iterator[Any]:
    """SQLAlchemy: a connection."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@contextmanager
def of_session(url: str) -> Iterator[Any]:
    """SQLAlchemy: a session."""
    engine = sa.create_engine(url)
    with Session(engine) as session, session.begin():
        yield session
    engine.dispose()


@contextmanager
def of_django(url: str) -> Iterator[Any]:
    """Django: an alias."""
    with django_alias(url) as alias, atomic(alias):
        yield alias


@contextmanager
def django_alias(url: str, alias: str = "shop") -> Iterator[str]:
    """Let Django know a database by an alias."""
    import django
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        settings.configure(DATABASES={})
        django.setup()
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: database(url)})[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


def atomic(alias: str) -> AbstractContextManager[None]:
    """A transaction of Django's, or a savepoint within one; Undone rolls it back."""
    from django.db import transaction

    return transaction.atomic(using=alias)


def database(url: str) -> Mapping[str, Any]:
    """Return Django's settings of a database."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parsed.database}
    place = {"NAME": parsed.database, "USER": parsed.username, "HOST": parsed.host, "PORT": parsed.port}
    return {"ENGINE": "django.db.backends.postgresql", **place}


@contextmanager
def savepoint(given: Any) -> Iterator[None]:
    """A savepoint within a transaction; Undone rolls it back, and goes no further."""
    begin = atomic if isinstance(given, str) else getattr(given, "begin_nested", None) or given.transaction
    with suppress(Undone), begin(given) if begin is atomic else begin():
        yield


def fail(given: Any) -> None:
    """Let a statement of a transaction fail on PostgreSQL, or let Django roll it back."""
    if isinstance(given, str):
        from django.db import transaction

        transaction.set_rollback(True, using=given)
        return
    wrong = "SELECT 1/0"
    with suppress(psycopg.DataError, sa.exc.DataError):
        given.execute(wrong if isinstance(given, psycopg.Connection) else sa.text(wrong))


#: The ways to a transaction, by the kinds of stores that they go with. Not every environment has Django.
WAYS: Mapping[str, tuple[str, Begin]] = {
    "psycopg": ("postgres", of_psycopg),
    "psycopg-block": ("postgres", of_psycopg_block),
    "sqlalchemy": ("postgres", of_sqlalchemy),
    "session": ("postgres", of_session),
    "sqlalchemy-sqlite": ("sqlite", of_sqlalchemy),
    "session-sqlite": ("sqlite", of_session),
    **({"django": ("postgres", of_django), "django-sqlite": ("sqlite", of_django)} if HAS_DJANGO else {}),
}


def _plain(url: str) -> str:
    return url.replace("+psycopg", "")
