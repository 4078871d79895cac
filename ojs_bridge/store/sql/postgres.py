"""The special needs of PostgreSQL: an answer, or an error, in time, even on a network that loses packets."""

from __future__ import annotations

import math
import time
from selectors import DefaultSelector
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import InvalidatePoolError

CONNECT_SECONDS = 5
#: A connection that has rested for longer is tested before it is used.
REST_SECONDS = 1.0
#: With these settings the server holds no lock for a client that it cannot reach any more, and waits for no
#: other client's lock for long. They are for one transaction, because a pool such as PgBouncer gives one
#: session to many clients.
BOUND = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :seconds, true),"
    " set_config('lock_timeout', :seconds, true)"
)


def options(url: sa.URL, patience: float) -> dict[str, Any]:
    """Return an engine's options, so that no worker waits for minutes for a silent host."""
    seconds = math.ceil(patience)
    waits = {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": seconds,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    given = {name: value for name, value in waits.items() if name not in url.query}
    return {"connect_args": given, "isolation_level": "AUTOCOMMIT", "pool_timeout": patience}


def share(engine: sa.Engine, patience: float) -> None:
    """Test an engine's connections before they are used, and bound the time of each answer."""
    _test_rested(engine)
    if engine.dialect.driver == "psycopg":
        _answer_in_time(engine, patience)


def _test_rested(engine: sa.Engine) -> None:
    """Replace connections that the server has closed; a connection in steady use is not tested."""
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
    """Let psycopg wait for an answer for so many seconds at most; by itself it has no limit."""
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
                    # The answer may still come. The next question must not take it for its own.
                    self.close()
                raise

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        return InTime.connect(*args, **options)

    sa.event.listen(engine, "do_connect", connect)


def _answer(gen: Any, connection: int, seconds: float) -> Any:
    """Run psycopg's generator to its end: it yields the events it waits for, and is sent those that came."""
    ends = time.monotonic() + seconds
    with DefaultSelector() as selector:
        try:
            selector.register(connection, next(gen))
            while came := selector.select(max(ends - time.monotonic(), 0)):
                selector.modify(connection, gen.send(came[0][1]))
        except StopIteration as end:
            return end.value
    raise TimeoutError(f"no answer within {seconds:g} s")
