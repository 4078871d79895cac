"""Answers of PostgreSQL in time, whatever becomes of the network, which may lose packets in silence."""

from __future__ import annotations

import time
from selectors import DefaultSelector
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus


class InTime(psycopg.Connection[Any]):
    """A connection that waits for so many seconds for each answer, and is closed when none has come.

    psycopg itself waits for as long as the kernel says that the connection stands.
    """

    patience = 10.0

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Return what a question to the server is answered; raises OperationalError."""
        try:
            return _answer(gen, self.pgconn.socket, self.patience)
        except BaseException:
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                # The answer may still come, and must not be taken for the next one's.
                self.close()
            raise


def _answer(gen: Any, connection: int, seconds: float) -> Any:
    """Drive psycopg's generator, which says what it waits for and is told what has come, to its end."""
    ends = time.monotonic() + seconds
    with DefaultSelector() as selector:
        try:
            selector.register(connection, next(gen))
            while came := selector.select(max(ends - time.monotonic(), 0)):
                selector.modify(connection, gen.send(came[0][1]))
        except StopIteration as end:
            return end.value
    raise psycopg.OperationalError(f"no answer within {seconds:g} s")


def answer_in_time(engine: sa.Engine, seconds: float) -> None:
    """Have an engine's connections, made by psycopg, wait no longer than so many seconds for an answer."""

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> InTime:
        made = InTime.connect(*args, **options)
        made.patience = seconds
        return made

    sa.event.listen(engine, "do_connect", connect)
