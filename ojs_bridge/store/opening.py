"""From a URL to a store."""

from __future__ import annotations

from ..errors import ConfigurationError
from .protocol import MAX_NAMESPACE, Store, without_password

#: And what redis-py, which knows nothing of Valkey, calls it.
REDIS_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
}


def open_store(url: str, namespace: str = "ojs") -> Store:
    """Open the store at a URL: `sqlite:///file`, `postgresql+psycopg://`, `mysql+pymysql://`, `redis://`.

    And `rediss://`, `valkey://`, `valkeys://` (with TLS), and `unix://` for the socket of a Redis.

    Nothing is connected to until first use. Raises ConfigurationError for a URL that no store understands,
    and for a driver that is not installed.
    """
    if "://" not in url:
        shown = without_password(url)
        raise ConfigurationError(f"store: {shown!r} is not a URL such as sqlite:///ojs.db")
    if not (isinstance(namespace, str) and namespace.isprintable() and 0 < len(namespace) <= MAX_NAMESPACE):
        raise ConfigurationError(
            f"namespace: {namespace!r} must be 1 to {MAX_NAMESPACE} printable characters"
        )
    if url.partition("://")[0] in REDIS_SCHEMES:
        return _redis_store(url, namespace)
    return _sql_store(url, namespace)


def _redis_store(url: str, namespace: str) -> Store:
    try:
        from .redis import RedisStore
    except ImportError:
        raise _missing(url, "redis-py", "redis") from None
    return RedisStore(url, namespace)


def _sql_store(url: str, namespace: str) -> Store:
    try:
        from .sql import SQLStore
    except ImportError:
        raise _missing(url, "SQLAlchemy", "sql") from None
    return SQLStore(url, namespace)


def _missing(url: str, library: str, extra: str) -> ConfigurationError:
    shown = without_password(url)
    return ConfigurationError(f"store: {shown!r} needs {library}: pip install 'ojs-bridge[{extra}]'")
