"""The store of dead letters, parked jobs and reservations: one protocol, SQL and Redis behind it."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import ConfigurationError
from .documents import (
    BOUNDS,
    SECONDS,
    Document,
    DocumentPage,
    Documents,
    Rate,
    Span,
    Unreadable,
    next_of,
    readable,
    reading,
)
from .filter import EVERYTHING, KINDS, Fields, Filter, Kind
from .jobs import (
    KEEP,
    LOOKED,
    STATES,
    Due,
    DueCounts,
    Grant,
    Parked,
    ParkedJobs,
    ParkedPage,
    Reservation,
    ReserveAnswer,
    ReservedRuns,
    Settle,
    Transaction,
    WaitingState,
)
from .protocol import (
    BIN_KEPT,
    MAX_NAMESPACE,
    MEMORY,
    REDIS_SCHEMES,
    Bin,
    Claim,
    Claimed,
    Group,
    GroupPage,
    Letter,
    Letters,
    Order,
    Page,
    Stats,
    Store,
    counts_of,
    without_password,
)
from .records import from_json, from_ms, index_text, matches, to_json, to_ms

__all__ = [
    "BIN_KEPT",
    "BOUNDS",
    "EVERYTHING",
    "KEEP",
    "KINDS",
    "LOOKED",
    "MEMORY",
    "PATIENCE_SECONDS",
    "SECONDS",
    "STATES",
    "Bin",
    "Claim",
    "Claimed",
    "Document",
    "DocumentPage",
    "Documents",
    "Due",
    "DueCounts",
    "Fields",
    "Filter",
    "Grant",
    "Group",
    "GroupPage",
    "Kind",
    "Letter",
    "Letters",
    "Order",
    "Page",
    "Parked",
    "ParkedJobs",
    "ParkedPage",
    "Rate",
    "Reservation",
    "ReserveAnswer",
    "ReservedRuns",
    "Settle",
    "Span",
    "Stats",
    "Store",
    "Transaction",
    "Unreadable",
    "WaitingState",
    "counts_of",
    "from_json",
    "from_ms",
    "index_text",
    "matches",
    "next_of",
    "open_store",
    "readable",
    "reading",
    "to_json",
    "to_ms",
    "without_password",
]

#: A question to a store waits so many seconds for its answer, unless the URL says otherwise.
PATIENCE_SECONDS = 10.0
#: The databases that SQLAlchemy connects to.
SQL_BACKENDS = frozenset({"sqlite", "postgresql"})
KNOWN = (
    "sqlite:///file, postgresql:// or postgres:// (through psycopg), redis://, rediss://, valkey://, "
    "valkeys://, unix:///file (the socket of a Redis), redis+sentinel://, redis+cluster://, "
    "and memory:// in tests"
)
#: Advice for URLs that other libraries understand.
INSTEAD = {
    "sentinel": "write redis+sentinel://host:26379,other:26379/mymaster",
    "redis+socket": "the socket of a Redis is unix:///path/to/redis.sock?db=0",
}


def open_store(url: str, namespace: str = "ojs", *, patience: float = PATIENCE_SECONDS) -> Store:
    """Open the store at a URL.

    A URL begins with `sqlite:///`, `postgresql://`, `postgres://`, `redis://`, `rediss://`, `valkey://`,
    `valkeys://` (with TLS) or `unix://` (the socket of a Redis); `redis+sentinel://host,other/mymaster` asks
    Sentinels for the master, and `redis+cluster://host,other` is a cluster. `memory://` is an empty store in
    this process, for tests. A question to the store waits for its answer for `patience` seconds. The store
    connects at its first use. Raises ConfigurationError for a URL that no store understands, and for a driver
    that is not installed.
    """
    if "://" not in url:
        shown = without_password(url)
        raise ConfigurationError(f"store: {shown!r} is not a URL such as sqlite:///ojs.db")
    if not (isinstance(namespace, str) and namespace.isprintable() and 0 < len(namespace) <= MAX_NAMESPACE):
        raise ConfigurationError(
            f"namespace: {namespace!r} must be 1 to {MAX_NAMESPACE} printable characters"
        )
    scheme, _, rest = url.partition("://")
    if scheme in REDIS_SCHEMES:
        try:
            from .redis import RedisStore
        except ImportError:
            raise _missing(url, "redis-py", "redis") from None
        return RedisStore(url, namespace, patience=patience)
    if scheme == "postgres" or (scheme == "postgresql" and find_spec("psycopg")):
        # Before version 2.1 SQLAlchemy takes psycopg2 where a URL names no driver.
        url = f"postgresql+psycopg://{rest}"
    elif scheme.partition("+")[0] not in SQL_BACKENDS and url != MEMORY:
        shown, why = without_password(url), INSTEAD.get(scheme, f"it takes {KNOWN}")
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {why}")
    try:
        from .sql import MemoryStore, SQLStore
    except ImportError:
        raise _missing(url, "SQLAlchemy", "sql") from None
    if url == MEMORY:
        return MemoryStore(namespace, patience=patience)
    return SQLStore(url, namespace, patience=patience)


def _missing(url: str, library: str, extra: str) -> ConfigurationError:
    shown = without_password(url)
    return ConfigurationError(f"store: {shown!r} needs {library}: pip install 'ojs-bridge[{extra}]'")
