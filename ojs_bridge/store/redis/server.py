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

import redis
from redis.crc import key_slot

from ...errors import ConfigurationError, StoreError, Unstorable
from ..jobs import Reservation
from ..protocol import without_password
from ..records import index_id
from .topology import Options, connection_of, topology_of

logger = logging.getLogger("ojs_bridge")

SCHEMA_VERSION = 1
#: How often a question follows its keys to another node of a cluster.
_MOVES = 3
#: A server's setting for the most bytes of a text, what it is by default and at the least, and what the
#: server says of a longer one. It may close the connection before its client has read this.
_LENGTH, _LENGTH_BY_DEFAULT, _LEAST_LENGTH = "proto-max-bulk-len", 512 * 2**20, 2**20
_TOO_LONG = "invalid bulk length"
_FAILURES = (redis.RedisError, OSError, MemoryError, UnicodeError)

Word: TypeAlias = str | bytes | int


class RedisServer:
    """The connections of one process to a namespace, whose keys are all in one slot of a cluster.

    One caller at a time uses a connection. redis-py connects, authenticates and parses. Its client and
    its pool are not used: they more than double the CPU time of a question, and each job asks two questions.
    """

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        self.shown, self._url = without_password(url), url
        # A brace would end the hash tag.
        tag = namespace.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        self._prefix = f"ojs:{{{tag}}}:".encode()
        self._topology = topology_of(url, patience, key_slot(self._prefix))
        #: The server that has the keys; None until it is asked for, and again after a failure.
        self._address: Options | None = None
        self._free: list[Any] = []
        self._pid = os.getpid()
        try:
            connection_of(self._topology.options)
        except (TypeError, ValueError, redis.RedisError) as error:
            why = without_password(url, str(error))
            raise ConfigurationError(f"store: {self.shown!r} is not a Redis URL: {why}") from None
        self._reservations = self.key("turn:")
        self._prepared = False

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
        version: int = self._run("version", (self.key("schema"),), (SCHEMA_VERSION,))
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"the store has schema {version}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
            )
        return version

    def clock(self) -> datetime:
        """Return the server's time."""
        seconds, microseconds = self.ask("TIME")
        return datetime.fromtimestamp(int(seconds), timezone.utc) + timedelta(microseconds=int(microseconds))

    def key(self, name: str) -> bytes:
        """Return a key of the namespace."""
        return self._prefix + name.encode()

    def keys(self, *names: str) -> list[bytes]:
        """Return keys of the namespace."""
        return [*map(self.key, names)]

    def reservation_key(self, reservation: Reservation) -> bytes:
        """Return the key of a reservation's record."""
        return self._reservations + index_id(reservation.key).encode()

    def run(self, script: str, keys: Sequence[bytes], words: Sequence[Word] = ()) -> Any:
        """Return the answer of a script, by the name of its file, in numbers and bytes; raises StoreError."""
        if not self._prepared:
            self.prepare()
        return self._run(script, keys, words)

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

    def _run(self, script: str, keys: Sequence[bytes], words: Sequence[Word]) -> Any:
        code, sha = script_of(script)
        given = (len(keys), *keys, *words)
        try:
            try:
                return self._answer("EVALSHA", sha, *given)
            except redis.exceptions.NoScriptError:
                return self._answer("EVAL", code, *given)
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
        for _ in range(_MOVES):
            try:
                return self._try(words)
            except redis.ResponseError as error:
                code, address = self._redirection(error)
                if code == "ASK":
                    return self._ask_there(address, words)
                if code != "MOVED":
                    raise
                self._forget()
                self._address = address
        return self._try(words)

    def _try(self, words: Sequence[Word]) -> Any:
        self._forget_those_of_the_parent()
        try:
            used = self._free.pop()
        except IndexError:
            return self._exchange(self._connection(), words)
        try:
            return self._exchange(used, words)
        except (redis.ConnectionError, redis.ResponseError) as error:
            if not _leaves(error):
                raise
            # The server may have closed this connection, and all the others, while they were idle. Another
            # server may have the keys now.
            self._forget()
            return self._exchange(self._connection(), words)
        except redis.TimeoutError:
            # The other connections may be dead, too. The next caller must not wait for each of them.
            self.close()
            raise

    def _redirection(self, error: redis.ResponseError) -> tuple[str, Options]:
        """Return the code of an error, and the node that it names: all keys of a namespace are in one slot.

        A slot that is on its way has its keys on two nodes: for each key that it lacks the old one answers
        ASK.
        """
        moved, asks = redis.exceptions.MovedError, redis.exceptions.AskError
        code = "MOVED" if isinstance(error, moved) else "ASK" if isinstance(error, asks) else ""
        host, _, port = str(error).rpartition(" ")[2].rpartition(":")
        here = self._address or self._topology.options
        there = {**here, "host": host or here.get("host", "localhost"), "port": port}
        return code or str(error).partition(" ")[0], there

    def _ask_there(self, address: Options, words: Sequence[Word]) -> Any:
        """Ask the node to which the keys are on their way, over a connection for this question alone."""
        connection = connection_of(address)
        try:
            connection.send_command("ASKING", check_health=False)
            connection.read_response()
            connection.send_packed_command([_packed(words)], check_health=False)
            return connection.read_response()
        finally:
            connection.disconnect()

    def _exchange(self, connection: Any, words: Sequence[Word]) -> Any:
        try:
            packed = _packed(words)
            if len(packed) > _LEAST_LENGTH:
                self._check_length(words)
            connection.send_packed_command([packed], check_health=False)
            answer = connection.read_response()
        except redis.ResponseError as error:
            if _leaves(error):
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

    def _check_length(self, words: Sequence[Word]) -> None:
        """Raise Unstorable for a text that the server does not take: for the client it would be an outage."""
        longest = max(len(encoded) for encoded in map(_encoded, words))
        most = int(self._setting(_LENGTH) or _LENGTH_BY_DEFAULT)
        if longest > most:
            why = f"{longest:,} bytes are more than its {_LENGTH}, {most:,}"
            raise Unstorable(f"the store {self.shown!r} cannot keep this: {why}")

    def _connection(self) -> Any:
        address = self._address
        if address is None:
            address = self._address = self._topology.find()
        return connection_of(address)

    def _forget(self) -> None:
        """Ask anew which server has the keys, and leave the one that had them."""
        self._address = None
        self.close()

    def _forget_those_of_the_parent(self) -> None:
        if self._pid != os.getpid():
            self._free = []
            self._pid = os.getpid()

    def _failed(self, error: Exception) -> StoreError:
        why = without_password(self._url, " ".join(str(error).split())) or type(error).__name__
        if isinstance(error, (redis.DataError, UnicodeError)) or _TOO_LONG in why:
            return Unstorable(f"the store {self.shown!r} cannot keep this: {why}")
        # Whatever it is, another server may be the right one now.
        self._address = None
        if "'maxmemory'" in why:
            way_out = "give it more memory, or delete dead letters for ever (--forever): a bin needs room"
            why = f"{why.rstrip('.')}; {way_out}"
        return StoreError(f"the store {self.shown!r} failed: {why}")


def _packed(words: Sequence[Word]) -> bytes:
    """Return a command in the server's protocol, in less than half the time of redis-py's own encoder."""
    encoded = [*map(_encoded, words)]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)])


def _encoded(word: Word) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogatepass")


def _leaves(error: redis.RedisError) -> bool:
    """Return whether an error means that this connection, or this server, is no longer the right one.

    The server is down, or still loads; it is a replica now, or has lost its cluster, its master or its
    replicas. Older servers put such a code behind that of the script, and older releases of redis-py leave
    it there.
    """
    left = (redis.ConnectionError, redis.ReadOnlyError, redis.exceptions.ClusterDownError)
    codes = ("-READONLY ", "CLUSTERDOWN ", "MASTERDOWN ", "NOREPLICAS ")
    return isinstance(error, left) or any(code in str(error) for code in codes)


@cache
def lua(name: str) -> str:
    """Return the code of a `.lua` file, after the code of the files that its header needs."""
    code = resources.files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")
    needed = re.search("^-- NEEDS: (.*)$", code, re.MULTILINE)
    return "\n".join((*map(lua, needed[1].split(", ") if needed else ()), code))


@cache
def script_of(name: str) -> tuple[str, str]:
    """Return the code of a script, which is safe to repeat, and its hash.

    Its first write must be one that a server without memory refuses, but for those that `_full.lua` lets go
    on. Then the server refuses the script as a whole, and never half of it.
    """
    code = lua(name)
    return code, hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()
