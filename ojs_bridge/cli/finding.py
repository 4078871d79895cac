"""Which bridge a command works on: an app's own, or one that is made for a store."""

from __future__ import annotations

import atexit
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bridge import Bridge
from ..config.sources import layered
from ..errors import ConfigurationError, StoreError
from ..operations.letters import needed
from ..operations.retention import Retention
from ..store import Store
from ..store.protocol import without_password
from .apps import bridge_of, bridge_of_celery

#: The app of `celery -A proj`, when a command runs under it.
CELERY_APP: ContextVar[Any] = ContextVar("CELERY_APP", default=None)

_STORE = "OJS_BRIDGE_STORE"
_PANEL = "Which bridge"


@dataclass(frozen=True)
class Place:
    """The options that say which bridge; raises ConfigurationError where they say none, or two."""

    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            rich_help_panel=_PANEL,
            help=f"URL of the store, such as sqlite:///ojs.db, or {_STORE}.",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", rich_help_panel=_PANEL, help="Its namespace, or OJS_BRIDGE_NAMESPACE."),
    ] = None
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:APP",
            envvar="OJS_BRIDGE_APP",
            show_envvar=False,
            rich_help_panel=_PANEL,
            help="The Celery app or Dramatiq broker, as its framework writes it, or OJS_BRIDGE_APP: its own "
            "bridge is used, with its store, retention and redaction. Replays and drains need it.",
        ),
    ] = None

    @property
    def has_app(self) -> bool:
        """Whether an app was given, whose bridge can publish, and knows how long letters are kept."""
        return bool(self.app) or CELERY_APP.get() is not None

    @cached_property
    def bridge(self) -> Bridge:
        """The app's own bridge, or one for the store."""
        if not self.has_app:
            return self.bridge_with(None)
        bridge = bridge_of(self.app) if self.app else bridge_of_celery(CELERY_APP.get())
        self._check(bridge)
        # The app's listeners are to hear of replays and deletions before this process ends.
        atexit.register(bridge.flush)
        return bridge

    def bridge_with(self, retention: Retention | None, *, new: bool = False) -> Bridge:
        """Return a bridge for the store, which may be a new one, of no app."""
        url = self._url
        if not url:
            raise ConfigurationError(f"store: none is given: --store URL, {_STORE}, or --app MODULE:APP")
        if not new:
            _check_file(url)
        return Bridge(url, namespace=self.namespace, retention=retention)

    @property
    def publishing_bridge(self) -> Bridge:
        """The app's own bridge; raises ConfigurationError without an app."""
        if not self.has_app:
            raise ConfigurationError(
                "app: none is given, and a message is published by the app that it came from: "
                "--app MODULE:APP, or OJS_BRIDGE_APP"
            )
        return self.bridge

    @property
    def kept(self) -> Store:
        """The store itself."""
        return needed(self.bridge.store, "dead letters")

    @property
    def in_namespace(self) -> str:
        """Where a namespace was said, and may be misspelt: that it was, in words."""
        found = layered(namespace=self.namespace)["namespace"]
        name = self.namespace or ("" if found.in_code else found.value)
        return f" in the namespace {name!r}" if name else ""

    def __str__(self) -> str:
        if self.app:
            return f"the store of {self.app}"
        if self.has_app:
            return "the app's store"
        return without_password(self._url)

    @property
    def _url(self) -> str:
        return str(layered(store=self.store or None)["store"].value or "")

    def _check(self, bridge: Bridge) -> None:
        """Refuse options that the app's own bridge would ignore."""
        if bridge.store is None:
            url = without_password(self.store) if self.store else "sqlite:///ojs.db"
            raise ConfigurationError(
                f"store: the app's bridge has none: give it Bridge(store={url!r}), or set {_STORE} for this "
                "command and for the workers, which a Bridge() without a store reads"
            )
        for name in ("store", "namespace"):
            if getattr(self, name):
                raise ConfigurationError(f"{name}: the app's bridge has its own: leave --{name} out")


def _check_file(url: str) -> None:
    """Raise StoreError for an SQLite file that is not there, which nobody means to make by looking."""
    if url.startswith("sqlite"):
        path = url.partition(":///")[2].partition("?")[0]
        if path and not path.startswith((":memory:", "file:")) and not Path(path).exists():
            raise StoreError(f"store: {url!r}: there is no such file")
