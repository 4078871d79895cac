"""The dependency: an HTTP server that bears so many calls a second, goes down, comes back and browns out."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from pathlib import Path

from tests.storm.settings import ANSWERED, Settings

#: What it answers where it does not answer 200; 0 is a connection that it closes at once.
GONE, LIMITED, UNAVAILABLE, OK = 0, 429, 503, 200


class Server:
    """Answers `GET /<job>`, and notes each call as a line: when it came, the answer, the job."""

    def __init__(self, settings: Settings, notes: Path) -> None:
        self._settings, self._notes = settings, notes.open("a", buffering=1)
        self._rng = random.Random(44)
        #: When the calls of the last second came that it has borne.
        self._borne: deque[float] = deque()

    async def serve(self) -> None:
        """Serve until the process ends."""
        async with await asyncio.start_server(self._call, "127.0.0.1", self._settings.port) as server:
            await server.serve_forever()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = time.time()
        phase = self._settings.phase(now)
        if phase == "outage":
            self._notes.write(f"{now} {GONE} -\n")
            writer.transport.abort()
            return
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            writer.close()  # it only asked whether anybody listens
            return
        job = head.split(b" ", 2)[1].decode().lstrip("/")
        status, takes = self._answer(now, is_brown=phase == "brown-out")
        self._notes.write(f"{now} {status} {job}\n")
        await asyncio.sleep(takes)
        later = "" if status == OK else f"Retry-After: {self._settings.retry_after}\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{later}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    def _answer(self, now: float, *, is_brown: bool) -> tuple[int, float]:
        """Return the status of an answer, and how long it takes."""
        while self._borne and self._borne[0] <= now - 1:
            self._borne.popleft()
        if len(self._borne) >= self._settings.capacity:
            return UNAVAILABLE, 0.0
        self._borne.append(now)
        if not is_brown:
            return OK, self._settings.takes
        if self._rng.random() < ANSWERED:
            return OK, self._settings.slow
        return self._rng.choice((LIMITED, UNAVAILABLE)), 0.0


if __name__ == "__main__":
    asyncio.run(Server(Settings.from_env(), Path(sys.argv[1])).serve())
