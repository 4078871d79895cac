"""A service that the tests call: it answers what its caller asks for, slowly, in part, or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

#: Seconds that a slow answer takes; a caller gives up long before.
SLOW = 5.0


class Service:
    """A server on this machine, in a thread of its own."""

    def __init__(self) -> None:
        #: The times at which each path was called.
        self.calls: dict[str, list[float]] = {}
        #: What it answers; the headers are written as a query is.
        self.body, self.headers = "{}", ""
        #: What it answers whatever it is asked for, such as "503"; then `calls` has the times by that.
        self.says = ""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.answer(self)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                service.answer(self)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        return Handler

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer `/429?Retry-After=7` with that status and header, and a word in its place as it says.

        `/429,200` has the second answer from the second call on.
        """
        asked = urlsplit(f"/{self.says}" if self.says else request.path)
        first, _, then = asked.path.strip("/").split("/")[0].partition(",")
        times = self.calls.setdefault(asked.path, [])
        times.append(time.time())
        kind = then if then and len(times) > 1 else first
        if kind == "slow":
            time.sleep(SLOW)
        if kind == "none":
            return
        headers = {name: value for each in (asked.query, self.headers) for name, value in parse_qsl(each)}
        body = self.body.encode()
        is_whole = kind not in ("cut", "stalled")
        request.send_response(int(kind) if kind.isdigit() else 200)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body) + (0 if is_whole else 100)))
        request.end_headers()
        request.wfile.write(body)
        if kind == "stalled":
            request.wfile.flush()
            time.sleep(SLOW)

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()

    def start(self) -> None:
        """Begin to answer."""
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()


@contextmanager
def answering() -> Iterator[Service]:
    """Have a service answer."""
    service = Service()
    service.start()
    try:
        yield service
    finally:
        service.close()
