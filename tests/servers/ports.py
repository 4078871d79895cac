"""Free loopback ports that stay free while their server is down."""

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path
from typing import BinaryIO

# Below every system's ephemeral range: a client that reconnects in a loop to a stopped server could
# otherwise be given that very port as its own, and keep the server from coming back. Above the
# default ports of RabbitMQ.
_CANDIDATES = range(26000, 32000)
_given: set[int] = set()


def free_port() -> int:
    """Return a loopback port that has no listener and that no living process was given before."""
    for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
        if port not in _given and _is_free(port) and _reserve(port):
            _given.add(port)
            return port
    raise OSError("no loopback port is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Keep a port from other runs of the tests for as long as this process lives."""
    try:
        fcntl.lockf(_ledger(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@cache
def _ledger() -> BinaryIO:
    """Return the file whose bytes stand for ports: the process with the lock on a byte has the port."""
    return (Path(tempfile.gettempdir()) / f"ojs-ports-{os.getuid()}").open("ab")
