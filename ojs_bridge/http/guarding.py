"""The layers around the API: the door adds headers and answers errors; the guard admits, limits and names."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigurationError
from ..operations.audit import Actor
from .answers import (
    JSON,
    JSON_TYPES,
    MEDIA_TYPE,
    ROOT,
    VERSION,
    Answer,
    Refusal,
    content_type,
    forbidden,
    refusal_of,
    too_many,
)

logger = logging.getLogger("ojs_bridge")

#: A reader reads, a replayer replays dead letters as they are, too, and an operator does all.
Role = Literal["operator", "replayer", "reader"]
#: Returns the name of the user behind a request that was admitted; None or an empty text where it knows none.
UserOf: TypeAlias = Callable[[Request], object]

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MIN_TOKEN = 16
_TOKEN = re.compile(rf"[!-~]{{{MIN_TOKEN},}}")
#: The roles, the one that may do all first.
ROLES: Sequence[Role] = get_args(Role)
_ROLES: Mapping[str, Role] = {role: role for role in ROLES}
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
#: The name of a user whom nothing names.
NOBODY = "anonymous"
READS = ("GET", "HEAD")
#: The most addresses whose requests are counted.
MAX_ADDRESSES = 10_000
#: What may be asked without a token.
OPEN = "/health"
#: The keys of a request's scope for its actor and role, which a request without a token has not, and for the
#: headers that inner layers add to its answer.
ACTOR, ADMITTED_AS, ADDED = "ojs.actor", "ojs.role", "ojs.added_headers"
#: The header that tells the page what its token allows.
ROLE = "X-OJS-Bridge-Role"


@dataclass(slots=True)
class Bucket:
    """A limit: at most `burst` requests at once, and `rate` requests a second in the long run."""

    burst: int
    rate: float
    what: str = "requests"
    _left: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._at = float(self.burst), time.monotonic()

    def take(self) -> dict[str, str]:
        """Count a request, and return headers that tell what is left (spec http 18); raises Refusal."""
        now = time.monotonic()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        is_empty = self._left < 1
        self._left -= not is_empty
        headers = {
            "X-RateLimit-Limit": str(self.burst),
            "X-RateLimit-Remaining": str(int(self._left)),
            "X-RateLimit-Reset": str(math.ceil(time.time() + (self.burst - self._left) / self.rate)),
        }
        if is_empty:
            seconds = math.ceil((1 - self._left) / self.rate)
            raise too_many(f"more than {self.burst} {self.what} at once", seconds, headers)
        return headers


@dataclass(slots=True)
class Buckets:
    """A limit for each address. Those of an IPv6 network of 64 bits share one: a single host has them all."""

    burst: int
    rate: float
    what: str = "requests"
    _of: dict[str, Bucket] = field(default_factory=dict)

    def take(self, address: str) -> None:
        """Count a request of an address; raises Refusal. Of too many addresses the first are forgotten."""
        with suppress(ValueError):
            if ipaddress.ip_address(address).version == 6:  # noqa: PLR2004
                address = str(ipaddress.ip_network(f"{address}/64", strict=False))
        bucket = self._of.pop(address, None) or Bucket(self.burst, self.rate, self.what)
        self._of[address] = bucket
        if len(self._of) > MAX_ADDRESSES:
            self._of.pop(next(iter(self._of)))
        bucket.take()


@dataclass(frozen=True, slots=True)
class Token:
    """A token, the name of its holder, and what it allows."""

    name: str
    role: Role
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """The rules for requests: a token, or without tokens a Host header that is one of the `hosts`, or any."""

    tokens: tuple[Token, ...] = ()
    hosts: frozenset[str] | None = None
    user: UserOf | None = None
    reads: Bucket = field(default_factory=lambda: Bucket(300, 50))
    writes: Bucket = field(default_factory=lambda: Bucket(100, 20))
    probes: Buckets = field(default_factory=lambda: Buckets(50, 5))
    wrong: Buckets = field(default_factory=lambda: Buckets(20, 0.2, "wrong tokens"))

    def admit(self, request: Request, address: str) -> tuple[dict[str, str], Actor, Role]:
        """Admit a request of an address; return headers for its answer, actor and role; raises Refusal."""
        reads, headers = request.method in READS, request.headers
        token = self._token(headers, address) if self.tokens else None
        if token is None:
            # Another host name may lead to this address (DNS rebinding).
            if self.hosts is not None and _parts(f"//{headers.get('host', '')}").hostname not in self.hosts:
                raise forbidden(f"the Host header must name {' or '.join(sorted(self.hosts))}")
            if not reads:
                _check_origin(headers)
        elif token.role == "reader" and not reads:
            raise forbidden(
                "the reader's token can only read; a replay needs the role replayer or operator, and any "
                "other write needs operator"
            )
        limits = (self.reads if reads else self.writes).take()
        wanted = headers.get("ojs-version", VERSION)
        if wanted.partition(".")[0] != VERSION.partition(".")[0]:
            raise Refusal(
                422, "unsupported", f"OJS-Version: {wanted!r:.100} is not served here, but {VERSION} is"
            )
        user = self.user(request) if self.user else None
        # A user of an app is often a number or an object.
        name = ("" if user is None else str(user)) or (token.name if token else NOBODY)
        role = token.role if token else "operator"
        return {**limits, ROLE: role}, Actor(name, "http", address), role

    def _token(self, headers: Headers, address: str) -> Token:
        """Return the token of a request; a right token is admitted even from where many wrong ones came."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            # All are compared, so that the time of an answer tells nothing.
            matches = [token for token in self.tokens if _same(given.strip(), token.secret)]
            if matches:
                return matches[0]
        if "authorization" in headers:
            self.wrong.take(address)
            logger.warning("a request from %r has a wrong token", address)
        message = "an Authorization: Bearer header with a token of this server is needed"
        raise Refusal(401, "x_unauthorized", message, headers={"WWW-Authenticate": "Bearer"})


def check_role(role: Role, needed: Role, what: str = "this") -> None:
    """Refuse what needs a role that may do more than this one; the refusal names it."""
    if ROLES.index(role) > ROLES.index(needed):
        raise forbidden(f"{what} needs the role {needed}, and the role of this token is {role}")


def check_replay(role: Role, action: str, changes: Collection[str]) -> None:
    """Refuse a replayer all operations but replays of dead letters as they are."""
    if action != "replay":
        check_role(role, "operator", f"an operation of the action {action}")
    if changes:
        check_role(role, "operator", f"a replay that changes {', '.join(sorted(changes))}")


def tokens_of(
    operator: str | None = None,
    reader: str | None = None,
    named: str | None = None,
    *,
    replayer: str | None = None,
) -> tuple[Token, ...]:
    """Return the tokens of a server; `named` is a list such as `alice:operator:TOKEN,ci:reader:TOKEN`.

    Raises ConfigurationError, which never has a token in it.
    """
    unnamed: Mapping[Role, str | None] = {"operator": operator, "replayer": replayer, "reader": reader}
    own = [
        (f"{role}_token", Token(role, role, given)) for role, given in unnamed.items() if given is not None
    ]
    tokens = [*own, *_named(named or "")]
    secrets: dict[str, str] = {}
    for field_, token in tokens:
        if not (isinstance(token.secret, str) and _TOKEN.fullmatch(token.secret)):
            raise ConfigurationError(f"{field_}: it must be {MIN_TOKEN} or more ASCII characters, no space")
        if token.secret in secrets:
            raise ConfigurationError(f"{field_}: it must differ from the {secrets[token.secret]}")
        secrets[token.secret] = field_
    names = [token.name for _, token in tokens]
    for field_, token in tokens:
        if names.count(token.name) > 1:
            raise ConfigurationError(f"{field_}: the name stands twice")
    if tokens and not any(token.role == "operator" for _, token in tokens):
        raise ConfigurationError(
            f"{tokens[0][0]}: it needs an operator_token beside it, or an operator's among the tokens"
        )
    return tuple(token for _, token in tokens)


def _named(text: str) -> Iterator[tuple[str, Token]]:
    for number, entry in enumerate(text.split(",") if text else (), 1):
        name, _, rest = entry.strip().partition(":")
        role_name, colon, secret = rest.partition(":")
        if not colon:
            raise ConfigurationError(f"tokens: entry {number}: it must be NAME:ROLE:TOKEN")
        if not _NAME.fullmatch(name):
            raise ConfigurationError(f"tokens: entry {number}: its name must be letters, digits and _.@-")
        role = _ROLES.get(role_name)
        if role is None:
            raise ConfigurationError(f"tokens: {name}: its role must be operator, replayer or reader")
        yield f"tokens: {name}", Token(name, role, secret)


def access_at(
    host: str,
    operator: str | None,
    reader: str | None,
    named: str | None = None,
    user: UserOf | None = None,
    *,
    replayer: str | None = None,
) -> Access:
    """Return the access to a server at a host; raises ConfigurationError if strangers could use it."""
    if not (operator or named or is_loopback(host)):
        raise ConfigurationError(
            f"host: {host!r} can be reached from elsewhere, so operator_token must be given, or tokens "
            "(OJS_BRIDGE_OPERATOR_TOKEN, OJS_BRIDGE_TOKENS); without them the server listens on a loopback "
            "address only"
        )
    tokens = tokens_of(operator, reader, named, replayer=replayer)
    return Access(tokens, LOOPBACK | {host.lower()}, user)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "OJS-Version": VERSION,
}
#: The characters of an Accept header that are read.
MAX_ACCEPT = 2_000
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
#: A type of these answers in an Accept header, and its weight.
_ACCEPTED = re.compile(
    r"(application/(?:openjobspec\+)?json)\s*(?=[;,]|$)(?:[^,]{0,99};\s*q=([01](?:\.[0-9]+)?))?"
)
#: The spec's type in answers. The spec's client for Python looks for the text of the other type in it. RFC
#: 9110 allows a parameter, which a client that does not know it ignores; a slash in it must be quoted.
BOTH = f'{MEDIA_TYPE}; also="{JSON}"'


class Door:
    """The outermost layer: it adds the headers to every answer, and turns every error into an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; the start of a server and a WebSocket pass unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        request_id, scope[ROOT] = asked.get("x-request-id", ""), scope.get("root_path", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"req_{uuid4()}"
        # The spec wants its own type in every answer (http 4.3), but many clients read plain JSON only.
        accept = _ACCEPTED.findall(",".join(asked.getlist("accept"))[:MAX_ACCEPT].lower())
        weights = {name: float(weight or 1) for name, weight in accept}
        is_ojs = weights.get(MEDIA_TYPE, 0.0) >= max(weights.get(JSON, 0.0), 0.001)
        media_type = BOTH if is_ojs else JSON
        added = scope[ADDED] = dict[str, str]()
        begun = False

        async def headed(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers.update({**HEADERS, **added, "X-Request-Id": request_id})
                if headers.get("content-type") == MEDIA_TYPE:
                    headers["Content-Type"] = media_type
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            await self._app(scope, receive, headed)
        except Exception as error:
            refusal = refusal_of(error, request_id)
            if begun:
                raise
            answer = Answer(refusal.to_ojs(request_id), refusal.status, refusal.headers)
            await answer(scope, receive, headed)


class Guard:
    """Admits requests to the API behind it."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an admitted request; raises Refusal for any other."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, access = Request(scope), self._access
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        # As the server knows it.
        address = request.client.host if request.client else ""
        if (
            access.tokens
            and (request.method, path) == ("GET", OPEN)
            and "authorization" not in request.headers
        ):
            access.probes.take(address)
        else:
            headers, scope[ACTOR], scope[ADMITTED_AS] = access.admit(request, address)
            scope[ADDED].update(headers)
        await self._app(scope, receive, send)


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


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


def _parts(url: str) -> SplitResult:
    """Return the parts of a URL; those of an invalid URL are empty, and so are no server's."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
