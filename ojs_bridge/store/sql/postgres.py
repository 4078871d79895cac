"""The special needs of PostgreSQL: an answer, or an error, in time, even on a network that loses packets."""

from __future__ import annotations

import logging
import math
import selectors
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import InvalidatePoolError

logger = logging.getLogger("ojs_bridge")

CONNECT_SECONDS = 5
#: How long a question that got no answer in time waits for the server to break it off.
CANCEL_SECONDS = 1.0
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
        # Otherwise the client would write as the database does: in SQL_ASCII it could not read a text.
        "client_encoding": "utf8",
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


#: A selector that needs no descriptor of its own, which a process may have none left of.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


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
                self._break_off(gen)
                raise OperationalError(str(error)) from None
            except BaseException:
                if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                    # The answer may still come. The next question must not take it for its own.
                    self._break_off(gen)
                raise

        def _break_off(self, gen: Any) -> None:
            """Have the server give a question up, and close: it would wait for a lock without its client.

            The connection counts among those of the process until the server has given up.
            """
            try:
                if hasattr(self, "cancel_safe"):
                    self.cancel_safe(timeout=CANCEL_SECONDS)
                else:
                    self.cancel()
                _answer(gen, self.pgconn.socket, CANCEL_SECONDS)
            except Exception as error:  # noqa: BLE001 - the answer is an error, or there is none
                logger.debug("a question to PostgreSQL was broken off: %r", error)
            finally:
                self.close()

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        connection = InTime.connect(*args, **options)
        try:
            _share_no_statement(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    sa.event.listen(engine, "do_connect", connect)


def _share_no_statement(connection: Any) -> None:
    """Have psycopg prepare no statements behind a pool such as PgBouncer.

    There the next question may come to another session. It does not know what this client has prepared, or
    has a statement of another client under the same name. In front of the server itself they halve its work.
    """
    connection.autocommit = True
    (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    if process != connection.info.backend_pid:
        connection.prepare_threshold = None


def _answer(gen: Any, connection: int, seconds: float) -> Any:
    """Run psycopg's generator to its end: it yields the events it waits for, and is sent those that came."""
    ends = time.monotonic() + seconds
    with _Selector() as selector:
        try:
            selector.register(connection, next(gen))
            while came := selector.select(max(ends - time.monotonic(), 0)):
                selector.modify(connection, gen.send(came[0][1]))
        except StopIteration as end:
            return end.value
    raise TimeoutError(f"no answer within {seconds:g} s")
