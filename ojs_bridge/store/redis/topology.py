"""Which server has the keys of a namespace: the URL's own, a Sentinel's master, or a node of a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import redis
from redis.connection import Connection, parse_url

from ...errors import ConfigurationError
from ..protocol import REDIS_SCHEMES, without_password

CONNECT_SECONDS = 5
#: For how many seconds a Sentinel or a node is asked for the right server: another one can tell, too.
ASKED_SECONDS = 2.0
SENTINEL_PORT, NODE_PORT = 26379, 6379

#: What redis-py's connection to a server takes.
Options: TypeAlias = Mapping[str, Any]
Host: TypeAlias = tuple[str, int]


class Topology:
    """The servers behind a URL: here one server, or a name that leads to it."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def find(self) -> Options:
        """Return the options of a connection to the server that has the keys; raises ConnectionError."""
        return self.options


class Several(Topology):
    """Servers of which each can name the one that has the keys.

    Each time another one is asked first, because one that is cut off from the others names the wrong one.
    """

    def __init__(self, options: Options, hosts: Sequence[Host]) -> None:
        super().__init__(options)
        self._hosts = [*hosts]

    def find(self) -> Options:
        """Return the options of a connection to the server that has the keys; raises ConnectionError."""
        reasons = []
        for host in tuple(self._hosts):
            self._hosts = [*(other for other in self._hosts if other != host), host]
            try:
                return self._named_by(host)
            except (redis.RedisError, OSError) as error:
                reasons.append(f"{host[0]}:{host[1]}: {error}")
        raise redis.ConnectionError("nobody names a server that takes writes: " + "; ".join(reasons))

    def _named_by(self, host: Host) -> Options:
        raise NotImplementedError

    def _to(self, host: Host) -> Options:
        return {**self.options, "host": host[0], "port": host[1]}


class Sentinels(Several):
    """The master of a service, as a Sentinel names it."""

    def __init__(
        self, options: Options, hosts: Sequence[Host], service: str, credentials: Mapping[str, Any]
    ) -> None:
        super().__init__(options, hosts)
        self._service = service
        own = {name: word for name, word in options.items() if name not in ("db", "username", "password")}
        self._own = {**own, **credentials}

    def _named_by(self, host: Host) -> Options:
        asked = {**self._own, "host": host[0], "port": host[1]}
        named = _answer(asked, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if not named:
            raise redis.ConnectionError(f"it knows no master {self._service!r}")
        found = self._to((named[0].decode(), int(named[1])))
        # A Sentinel that was cut off names a master of the past, which is a replica now and lacks the newest.
        role = _answer(found, "ROLE")[0].decode()
        if role != "master":
            raise redis.ConnectionError(f"it names {found['host']}:{found['port']}, which is a {role}")
        return found


class Cluster(Several):
    """The node of a cluster that has a slot."""

    def __init__(self, options: Options, hosts: Sequence[Host], slot: int) -> None:
        super().__init__(options, hosts)
        self._slot = slot

    def _named_by(self, host: Host) -> Options:
        found, nodes = None, []
        for first, last, *serving in _answer(self._to(host), "CLUSTER", "SLOTS"):
            # A node without an address is the one that was asked.
            nodes += [(name.decode() if name else host[0], int(port)) for name, port, *_ in serving]
            if first <= self._slot <= last:
                found = nodes[-len(serving)]
        self._hosts = [*dict.fromkeys((*self._hosts, *nodes))]
        if found is None:
            raise redis.ConnectionError(f"it knows no node with the slot {self._slot}")
        return self._to(found)


def connection_of(options: Options) -> Any:
    """Return a connection, which connects when it is first used."""
    given = dict(options)
    return given.pop("connection_class", Connection)(**given)


def topology_of(url: str, patience: float, slot: int) -> Topology:
    """Return the servers behind a URL; raises ConfigurationError."""
    scheme, _, rest = url.partition("://")
    kind = scheme.partition("+")[2]
    if not kind:
        return Topology(_options(url, f"{REDIS_SCHEMES[scheme]}://{rest}", patience))
    user, at, servers = rest.rpartition("@")
    if re.search("[/?#]", user):
        raise _wrong(url, "write the password with %2F, %3F and %23 for /, ? and #")
    place, query, given = servers.partition("?")
    hosts, _, path = place.partition("/")
    service, database = "", path
    if kind == "sentinel":
        service, _, database = path.strip("/").partition("/")
        if not service:
            raise _wrong(url, "it names no master: write redis+sentinel://host:26379,other:26379/mymaster")
    known = [*_hosts(url, hosts, SENTINEL_PORT if service else NODE_PORT)]
    one = f"{REDIS_SCHEMES[scheme]}://{user}{at}host/{database.strip('/')}{query}{given}"
    options = _options(url, one, patience)
    if service:
        names = {f"sentinel_{name}": name for name in ("username", "password")}
        own = {name: options.pop(option) for option, name in names.items() if option in options}
        return Sentinels(options, known, service, own)
    if options.get("db"):
        raise _wrong(url, f"database {options['db']}: a cluster has database 0 only")
    return Cluster(options, known, slot)


def _options(url: str, known: str, patience: float) -> dict[str, Any]:
    try:
        # A database that is no number is a typing error, or the rest of a password that was not escaped.
        if not known.startswith("unix:") and not re.fullmatch(r"/?[0-9]*", urlsplit(known).path):
            raise ValueError
        address: dict[str, Any] = parse_url(known)  # type: ignore[no-untyped-call]
    except ValueError:
        raise ConfigurationError(f"store: {without_password(url)!r} is not a Redis URL") from None
    waits = {"socket_connect_timeout": CONNECT_SECONDS, "socket_timeout": patience}
    form = {"protocol": 2, "decode_responses": False, "encoding_errors": "surrogatepass"}
    return {**waits, **address, **form, "retry_on_timeout": False}


def _hosts(url: str, hosts: str, port: int) -> Iterator[Host]:
    for text in hosts.split(","):
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::([0-9]{1,5}))?", text)
        if found is None:
            raise _wrong(url, f"{without_password(url, text)!r} is not a host, or a host and its port")
        yield found[1].strip("[]"), int(found[2] or port)


def _wrong(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"store: {without_password(url)!r}: {why}")


def _answer(options: Options, *words: str) -> Any:
    waits = {"socket_connect_timeout": ASKED_SECONDS, "socket_timeout": ASKED_SECONDS}
    connection = connection_of({**options, **waits})
    try:
        connection.send_command(*words, check_health=False)
        return connection.read_response()
    finally:
        connection.disconnect()
