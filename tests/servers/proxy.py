"""A way to a server that goes silent, like a network that loses packets."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from types import TracebackType

from typing_extensions import Self


class Proxy:
    """Carries connections to a port; silenced ones stay open, and nothing comes through, either way.

    New connections work again at once.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._silenced: list[socket.socket] = []
        self._carried: dict[socket.socket, None] = {}
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def to(self, url: str) -> str:
        """Return a server's URL that leads through the proxy."""
        return url.replace(f"127.0.0.1:{self._target}", f"127.0.0.1:{self.port}")

    def silence(self) -> int:
        """Lose from now on the bytes of the connections of this moment; return their number."""
        with self._lock:
            self._silenced += self._carried
            self._carried.clear()
            return len(self._silenced)

    def end_silenced(self) -> None:
        """End silenced connections on both sides, as a server does that hears nothing from the other."""
        with self._lock:
            silenced, self._silenced = self._silenced, []
        for each in silenced:
            with closing(each), suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End the connections of this moment, and refuse new ones until `mend`."""
        with self._lock:
            self._is_cut = True
            carried = [*self._carried]
            self._carried.clear()
        for each in carried:
            with closing(each), suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Take new connections again."""
        self._is_cut = False

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._is_cut:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._carried.update(dict.fromkeys((near, far)))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if source not in self._carried:
                        return
                    target.sendall(data)
        with self._lock:
            ended = self._carried.pop(source, source) is None
        if ended:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for each in (*self._silenced, *self._carried):
                with closing(each), suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
