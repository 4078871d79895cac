"""How much one process takes: so many requests a second, and so long a body."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from .answers import Refusal

MAX_BODY = 64 * 1024


@dataclass(slots=True)
class Bucket:
    """So many requests at once, and so many a second in the long run."""

    burst: int
    rate: float
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._at = float(self.burst), time.monotonic()

    def take(self) -> dict[str, str]:
        """Take one request, and return the headers that tell what is left (spec http 18); raises Refusal."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1:
            raise self._refusal()
        self._left -= 1
        return self._told()

    def _told(self) -> dict[str, str]:
        full = time.time() + (self.burst - self._left) / self.rate
        return {
            "X-RateLimit-Limit": str(self.burst),
            "X-RateLimit-Remaining": str(int(self._left)),
            "X-RateLimit-Reset": str(math.ceil(full)),
        }

    def _refusal(self) -> Refusal:
        return too_many(
            f"more than {self.burst} requests at once", math.ceil((1 - self._left) / self.rate), self._told()
        )


def too_many(message: str, seconds: int, headers: dict[str, str] | None = None) -> Refusal:
    """Return the refusal of what may be asked for again in so many seconds."""
    return Refusal(
        429,
        "rate_limited",
        f"{message}; try again in {seconds} s",
        retryable=True,
        details={"retry_after_seconds": seconds},
        headers={**(headers or {}), "Retry-After": str(seconds)},
    )


async def body_of(request: Request) -> bytes:
    """Return a request's body; raises Refusal for one that is too long, before it has all been read."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            message = f"the body is longer than {MAX_BODY} bytes"
            raise Refusal(413, "x_too_large", message, details={"max_bytes": MAX_BODY})
    return bytes(body)
