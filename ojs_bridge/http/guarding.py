"""The guard: it checks tokens, or else the Host and Origin headers, and limits the rate of requests."""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
import time
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ConfigurationError
from .answers import ADDED, VERSION, Refusal, forbidden, too_many
from .requests import JSON_TYPES, content_type

Role = Literal["operator", "reader"]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MIN_TOKEN = 16
_TOKEN = re.compile(rf"[!-~]{{{MIN_TOKEN},}}")
READS = ("GET", "HEAD")
#: The header that tells the page what its token allows.
ROLE = "X-OJS-Bridge-Role"


@dataclass(slots=True)
class Bucket:
    """A limit: at most `burst` requests at once, and `rate` requests a second in the long run."""

    burst: int
    rate: float
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._at = float(self.burst), time.monotonic()

    def take(self) -> dict[str, str]:
        """Count a request, and return headers that tell what is left (spec http 18); raises Refusal."""
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


@dataclass(frozen=True, slots=True)
class Access:
    """The rules for requests: a token, or without tokens a Host header that is one of the `hosts`, or any."""

    operator: str | None = None
    reader: str | None = None
    hosts: frozenset[str] | None = None
    reads: Bucket = field(default_factory=lambda: Bucket(300, 50))
    writes: Bucket = field(default_factory=lambda: Bucket(100, 20))

    def __post_init__(self) -> None:
        for name, token in (("operator_token", self.operator), ("reader_token", self.reader)):
            if token is not None and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
                raise ConfigurationError(f"{name}: it must be {MIN_TOKEN} or more ASCII characters, no space")
        if self.reader is not None and self.operator is None:
            raise ConfigurationError("reader_token: it needs an operator_token beside it")
        if self.reader is not None and self.reader == self.operator:
            raise ConfigurationError("reader_token: it must differ from the operator_token")

    def admit(self, method: str, headers: Headers) -> dict[str, str]:
        """Admit a request, and return headers for its answer; raises Refusal."""
        reads = method in READS
        role = self._role(headers)
        if self.operator is None:
            self._check_host(headers)
            if not reads:
                _check_origin(headers)
        elif role != "operator" and not reads:
            raise forbidden("the reader's token can only read")
        told = (self.reads if reads else self.writes).take()
        _check_version(headers)
        return {**told, ROLE: role}

    def _role(self, headers: Headers) -> Role:
        if self.operator is None:
            return "operator"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            operator, reader = _same(given.strip(), self.operator), _same(given.strip(), self.reader)
            if operator or reader:
                return "operator" if operator else "reader"
        message = "an Authorization: Bearer header with a token of this server is needed"
        raise Refusal(401, "x_unauthorized", message, headers={"WWW-Authenticate": "Bearer"})

    def _check_host(self, headers: Headers) -> None:
        """Refuse another host name that leads to this address (DNS rebinding)."""
        if self.hosts is not None and _parts(f"//{headers.get('host', '')}").hostname not in self.hosts:
            raise forbidden(f"the Host header must name {' or '.join(sorted(self.hosts))}")


def access_at(host: str, operator: str | None, reader: str | None) -> Access:
    """Return the access to a server at a host; raises ConfigurationError if strangers could use it."""
    if operator is None and not is_loopback(host):
        raise ConfigurationError(
            f"host: {host!r} can be reached from elsewhere, so operator_token must be given; without one the "
            "server listens on a loopback address only"
        )
    return Access(operator, reader, LOOPBACK | {host.lower()})


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Admits requests to the API behind it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request; raises Refusal for any other."""
        if scope["type"] == "http":
            scope[ADDED].update(self._access.admit(scope["method"], Headers(scope=scope)))
        await self._app(scope, receive, send)


def _same(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _check_origin(headers: Headers) -> None:
    """Refuse a write that a foreign web page can have sent (CSRF).

    A page can send JSON or an extra header to another server only if that server allows it. This server
    never does.
    """
    origin = headers.get("origin")
    if origin is not None and _parts(origin).netloc.lower() != headers.get("host", "").lower():
        raise forbidden("the Origin header names another server")
    if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise forbidden("the request comes from another server's page")
    if not (headers.get("x-ojs-bridge") == "1" or content_type(headers) in JSON_TYPES):
        raise forbidden("a write needs the header X-OJS-Bridge: 1, or JSON as its Content-Type")


def _check_version(headers: Headers) -> None:
    wanted = headers.get("ojs-version", VERSION)
    if wanted.partition(".")[0] != VERSION.partition(".")[0]:
        raise Refusal(422, "unsupported", f"OJS-Version: {wanted!r} is not served here, but {VERSION} is")


def _parts(url: str) -> SplitResult:
    """Return the parts of a URL; those of an invalid URL are empty, and so are no server's."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
