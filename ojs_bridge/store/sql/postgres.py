"""The needs of PostgreSQL alone: answers in time, although a network may lose packets in silence."""

from __future__ import annotations

import math
import time
from selectors import DefaultSelector
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import InvalidatePoolError

CONNECT_SECONDS = 5
#: A connection that has rested for longer is asked whether it still stands before it is used.
REST_SECONDS = 1.0
#: These settings keep the server from holding locks for a client that it cannot reach any more, and from
#: waiting for others that hold them; for one transaction, because a pool such as PgBouncer gives a session to
#: many clients.
BOUND = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :seconds, true),"
    " set_config('lock_timeout', :seconds, true)"
)


def options(url: sa.URL, patience: float) -> dict[str, Any]:
    """Return an engine's options, for a worker that must not wait minutes for a host that is silent."""
    seconds = math.ceil(patience)
    waits = {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": seconds,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    given = {name: value for name, value in waits.items() if name not in url.query}
    return {"connect_args": given, "isolation_level": "AUTOCOMMIT"}


def share(engine: sa.Engine, patience: float) -> None:
    """Have an engine's connections be sound when they are used, and answer in time."""
    _ask_the_rested(engine)
    if engine.dialect.driver == "psycopg":
        _answer_in_time(engine, patience)


def _ask_the_rested(engine: sa.Engine) -> None:
    """Replace connections that the server has closed meanwhile, at no cost to those in steady use."""
    dialect = engine.dialect

    def note(_connection: Any, record: Any) -> None:
        record.info["rests_since"] = time.monotonic()

    def ask(connection: Any, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get("rests_since", time.monotonic()) < REST_SECONDS:
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    sa.event.listen(engine, "checkin", note)
    sa.event.listen(engine, "checkout", ask)


def _answer_in_time(engine: sa.Engine, seconds: float) -> None:
    """Have psycopg wait no longer than so many seconds; alone it waits as long as the connection stands."""
    from psycopg import Connection, OperationalError
    from psycopg.pq import TransactionStatus

    class InTime(Connection[Any]):
        def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
            """Return the server's answer; raises OperationalError."""
            try:
                return _answer(gen, self.pgconn.socket, seconds)
            except TimeoutError as error:
                self.close()
                raise OperationalError(str(error)) from None
            except BaseException:
                if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    # The answer may still come, and must not be taken for the next one's.
                    self.close()
                raise

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        return InTime.connect(*args, **options)

    sa.event.listen(engine, "do_connect", connect)


def _answer(gen: Any, connection: int, seconds: float) -> Any:
    """Drive psycopg's generator to its end: it yields what it waits for, and is sent what has come."""
    ends = time.monotonic() + seconds
    with DefaultSelector() as selector:
        try:
            selector.register(connection, next(gen))
            while came := selector.select(max(ends - time.monotonic(), 0)):
                selector.modify(connection, gen.send(came[0][1]))
        except StopIteration as end:
            return end.value
    raise TimeoutError(f"no answer within {seconds:g} s")
