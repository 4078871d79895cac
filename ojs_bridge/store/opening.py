"""From a URL to a store."""

from __future__ import annotations

from ..errors import ConfigurationError
from .protocol import MAX_NAMESPACE, Store, without_password


def open_store(url: str, namespace: str = "ojs") -> Store:
    """Open the store at a URL: `sqlite:///file`, `postgresql+psycopg://`, `mysql+pymysql://`.

    Nothing is connected to until first use. Raises ConfigurationError for a URL that no store understands,
    and for a driver that is not installed.
    """
    if "://" not in url:
        raise ConfigurationError(f"store: {url!r} is not a URL such as sqlite:///ojs.db")
    if not (isinstance(namespace, str) and namespace.isprintable() and 0 < len(namespace) <= MAX_NAMESPACE):
        raise ConfigurationError(
            f"namespace: {namespace!r} must be 1 to {MAX_NAMESPACE} printable characters"
        )
    try:
        from .sql import SQLStore
    except ImportError:
        shown = without_password(url)
        raise ConfigurationError(
            f"store: {shown!r} needs SQLAlchemy: pip install 'ojs-bridge[sql]'"
        ) from None
    return SQLStore(url, namespace)
