"""One namespace of a Redis or Valkey: its connections, scripts and errors, its keys and their version."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import cache
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.connection import Connection, parse_url

from ...errors import ConfigurationError, StoreError, Unstorable
from ..jobs import Reservation
from ..protocol import REDIS_SCHEMES, without_password
from ..records import index_id

logger = logging.getLogger("ojs_bridge")

SCHEMA_VERSION = 1
CONNECT_SECONDS = 5
_FAILURES = (redis.RedisError, OSError, MemoryError, UnicodeError)

Word: TypeAlias = str | bytes | int


class Script:
    """A Lua script, which must be safe to repeat.

    Its first write must be one that a server without memory refuses. Then the server refuses the script as a
    whole, and never half of it.
    """

    def __init__(self, code: str) -> None:
        self.code = code
        self.sha = hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()


class RedisServer:
    """The connections of one process to a namespace, whose keys are all in one slot of a cluster.

    One caller at a time uses a connection. redis-py connects, authenticates, packs and parses. Its client and
    its pool are not used: they more than double the CPU time of a question, and each job asks two questions.
    """

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        self.shown = without_password(url)
        self._address = self._first_address = _address(url, patience)
        self._free: list[Any] = []
        self._pid = os.getpid()
        try:
            self._connection()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"store: {self.shown!r} is not a Redis URL: {error}") from None
        # A brace would end the hash tag.
        tag = namespace.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self._prefix = f"ojs:{{{tag}}}:".encode()
        # Workers of earlier releases use the same name, and may run beside this one.
        self._reservations = self.key("turn:")
        self._prepared = False

    @property
    def database(self) -> int:
        """The number of the database."""
        return int(self._address.get("db") or 0)

    def prepare(self) -> None:
        """Write the version of the keys; warn of settings with which the server loses data.

        Raises StoreError for a newer version.
        """
        self.schema()
        if not self._prepared:
            self._prepared = True
            self._warn()

    def schema(self) -> int:
        """Write the version unless there is one, and return it; raises StoreError for a newer version."""
        version: int = self._run(script_of("version"), (self.key("schema"),), (SCHEMA_VERSION,))
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the store has schema {version}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
            )
        return version

    def clock(self) -> datetime:
        """Return the server's time."""
        seconds, microseconds = self.ask("TIME")
        return datetime.fromtimestamp(int(seconds), timezone.utc) + timedelta(microseconds=int(microseconds))

    def run_id(self) -> str | None:
        """Return the unique id of this server; None where INFO is not allowed."""
        try:
            answer: bytes = self.ask("INFO", "server")
        except StoreError:
            return None
        lines = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
        return lines.get("run_id")

    def key(self, name: str) -> bytes:
        """Return a key of the namespace."""
        return self._prefix + name.encode()

    def keys(self, *names: str) -> list[bytes]:
        """Return keys of the namespace."""
        return [*map(self.key, names)]

    def reservation_key(self, reservation: Reservation) -> bytes:
        """Return the key of a reservation's record."""
        return self._reservations + index_id(reservation.key).encode()

    def run(self, script: str | Script, keys: Sequence[bytes], words: Sequence[Word] = ()) -> Any:
        """Return a script's answer, in numbers and bytes; raises StoreError. A name is that of its file."""
        if not self._prepared:
            self.prepare()
        return self._run(script_of(script) if isinstance(script, str) else script, keys, words)

    def ask(self, *words: Word) -> Any:
        """Return the answer to a command; raises StoreError."""
        if not self._prepared:
            self.prepare()
        try:
            return self._answer(*words)
        except _FAILURES as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the connections of this process that are not in use."""
        self._forget_those_of_the_parent()
        with suppress(IndexError):
            while True:
                self._free.pop().disconnect()

    def _run(self, script: Script, keys: Sequence[bytes], words: Sequence[Word]) -> Any:
        given = (len(keys), *keys, *words)
        try:
            try:
                return self._answer("EVALSHA", script.sha, *given)
            except redis.exceptions.NoScriptError:
                return self._answer("EVAL", script.code, *given)
        except _FAILURES as error:
            raise self._failed(error) from error

    def _warn(self) -> None:
        policy = self._setting("maxmemory-policy")
        if policy not in (None, "noeviction") and self._setting("maxmemory") not in (None, "0"):
            advice = "set maxmemory-policy noeviction, not"
            logger.warning("the store %r may evict what it keeps: %s %s", self.shown, advice, policy)
        if self._setting("appendonly") == "no" and self._setting("save") == "":
            logger.warning("the store %r keeps nothing over a restart: set appendonly yes", self.shown)

    def _setting(self, name: str) -> str | None:
        """Return a setting of the server; None where CONFIG is not allowed."""
        try:
            answer: list[bytes] = self.ask("CONFIG", "GET", name)
        except StoreError:
            return None
        return answer[1].decode() if len(answer) > 1 else None

    def _answer(self, *words: Word) -> Any:
        try:
            return self._try(words)
        except redis.ResponseError as error:
            if not (isinstance(error, redis.exceptions.MovedError) or str(error).startswith("MOVED ")):
                raise
            self._follow(error)
            return self._try(words)

    def _try(self, words: Sequence[Word]) -> Any:
        self._forget_those_of_the_parent()
        try:
            used = self._free.pop()
        except IndexError:
            return self._exchange(self._connection(), words)
        try:
            return self._exchange(used, words)
        except (redis.ConnectionError, redis.ReadOnlyError):
            # The server may have closed this connection, and all the others, while they were idle.
            self.close()
            return self._exchange(self._connection(), words)
        except redis.TimeoutError:
            # The other connections may be dead, too. The next caller must not wait for each of them.
            self.close()
            raise

    def _follow(self, moved: redis.ResponseError) -> None:
        """Connect to the server that has the keys now: all keys of a namespace are in one slot."""
        host, _, port = str(moved).rpartition(" ")[2].rpartition(":")
        self._address = {
            **self._address,
            "host": host or self._address.get("host", "localhost"),
            "port": port,
        }
        self.close()

    def _exchange(self, connection: Any, words: Sequence[Word]) -> Any:
        try:
            connection.send_command(*words, check_health=False)
            answer = connection.read_response()
        except redis.ResponseError as error:
            if isinstance(error, redis.ReadOnlyError):
                connection.disconnect()
            else:
                self._free.append(connection)
            raise
        except BaseException:
            # The answer may still come. The next question must not take it for its own.
            connection.disconnect()
            raise
        self._free.append(connection)
        return answer

    def _connection(self) -> Any:
        options = dict(self._address)
        return options.pop("connection_class", Connection)(**options)

    def _forget_those_of_the_parent(self) -> None:
        if self._pid != os.getpid():
            self._free = []
            self._pid = os.getpid()

    def _failed(self, error: Exception) -> StoreError:
        why = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, (redis.DataError, UnicodeError)):
            return Unstorable(f"the store {self.shown!r} cannot keep this: {why}")
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            self._address = self._first_address
        return StoreError(f"the store {self.shown!r} failed: {why}")


@cache
def lua(name: str) -> str:
    """Return the code of a `.lua` file, after the code of the files that its header needs."""
    code = resources.files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")
    needed = re.search("^-- NEEDS: (.*)$", code, re.MULTILINE)
    return "\n".join((*map(lua, needed[1].split(", ") if needed else ()), code))


@cache
def script_of(name: str) -> Script:
    """Return the script of a `.lua` file."""
    return Script(lua(name))


def _address(url: str, patience: float) -> dict[str, Any]:
    scheme, _, rest = url.partition("://")
    known = f"{REDIS_SCHEMES[scheme]}://{rest}"
    try:
        # A database that is no number is a typing error, or the rest of a password that was not escaped.
        if scheme != "unix" and not re.fullmatch(r"/?[0-9]*", urlsplit(known).path):
            raise ValueError
        address: dict[str, Any] = parse_url(known)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigurationError(f"store: {without_password(url)!r} is not a Redis URL") from None
    waits = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": patience}
    form = {"protocol": 2, "decode_responses": False, "encoding_errors": "surrogatepass"}
    return {**waits, **address, **form, "retry_on_timeout": False}
