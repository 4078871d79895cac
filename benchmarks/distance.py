"""A distance to servers: `with Distance(ports) as far` carries connections, and each byte on the way waits.

A process of its own carries them, so that its CPU time is nobody else's. Chunks wait side by side: the
distance costs time, and no throughput. It counts the trips: how often a client spoke after an answer.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from typing_extensions import Self

#: Seconds there and back.
ROUND_TRIP = 0.002
CHUNK = 1 << 16


class Distance:
    """The process that carries, and what it has counted."""

    def __init__(self, *ports: int) -> None:
        self._ports = ports

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.distance", *map(str, self._ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ways = dict(zip(self._ports, self._said(), strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def to(self, url: str) -> str:
        """Return a server's URL that leads through the distance."""
        for port, way in self._ways.items():
            url = url.replace(f"127.0.0.1:{port}", f"127.0.0.1:{way}")
        return url

    def trips(self) -> list[int]:
        """Return the trips to each port so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._said()

    def _said(self) -> list[int]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())  # type: ignore[no-any-return]


@dataclass
class _Talk:
    """Who spoke last on a connection to a port, which is a number of the list."""

    number: int
    client_spoke: bool = False


@dataclass(eq=False)
class _Way:
    """One direction of a connection; before `since` nothing arrives, for it takes a trip to connect."""

    talk: _Talk
    source: socket.socket
    target: socket.socket
    since: float
    from_client: bool
    unsent: bytearray = field(default_factory=bytearray)


class _Carrier:
    """All connections, in one loop: `select` knows microseconds, where `epoll` rounds up to milliseconds."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=256) for _ in ports]
        self._trips = [0 for _ in ports]
        self._ways: dict[socket.socket, _Way] = {}
        self._blocked: dict[socket.socket, _Way] = {}
        self._waiting: list[tuple[float, int, _Way, bytes]] = []
        self._order = count()

    def run(self) -> None:
        """Carry until the standard input ends; each of its lines asks for the trips."""
        self._say([listener.getsockname()[1] for listener in self._listeners])
        while True:
            wait = max(self._waiting[0][0] - time.monotonic(), 0) if self._waiting else None
            sources = [sys.stdin, *self._listeners, *self._ways]
            readable, writable, _ = select.select(sources, self._blocked, [], wait)
            for found in readable:
                if found is sys.stdin:
                    if not sys.stdin.readline():
                        return
                    self._say(self._trips)
                elif found in self._ways:
                    self._receive(self._ways[found])
                else:
                    self._accept(self._listeners.index(found))
            for target in writable:
                self._send(self._blocked.pop(target))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, way, data = heapq.heappop(self._waiting)
                way.unsent += data
                if not data:
                    with suppress(OSError):
                        way.target.shutdown(socket.SHUT_WR)
                elif way.target not in self._blocked:
                    self._send(way)

    def _say(self, numbers: Sequence[int]) -> None:
        print(json.dumps(numbers), flush=True)

    def _accept(self, number: int) -> None:
        near, _ = self._listeners[number].accept()
        far = socket.create_connection(("127.0.0.1", self._ports[number]))
        talk, since = _Talk(number), time.monotonic() + ROUND_TRIP
        for source, target in ((near, far), (far, near)):
            source.settimeout(0)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ways[source] = _Way(talk, source, target, since, source is near)

    def _receive(self, way: _Way) -> None:
        try:
            data = way.source.recv(CHUNK)
        except OSError:
            data = b""
        self._trips[way.talk.number] += bool(data) and way.from_client and not way.talk.client_spoke
        way.talk.client_spoke = way.from_client
        due = max(time.monotonic(), way.since) + ROUND_TRIP / 2
        heapq.heappush(self._waiting, (due, next(self._order), way, data))
        if not data:
            del self._ways[way.source]

    def _send(self, way: _Way) -> None:
        try:
            del way.unsent[: way.target.send(way.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            way.unsent.clear()
        if way.unsent:
            self._blocked[way.target] = way


if __name__ == "__main__":
    with suppress(PermissionError):  # a busy machine would make the distance longer
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    _Carrier([int(port) for port in sys.argv[1:]]).run()
