"""The bridge that a command's options name: the app's own, or a bridge that is made for a store.

An app is imported by its name, as its framework writes it. A framework is imported only when it is needed.
"""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from typer import Option

from ..adapters import NAMES, framework_of, frameworks
from ..bridge import Bridge
from ..config.sources import layered
from ..errors import ConfigurationError, InvalidRetryPolicy, StoreError
from ..operations.retention import Retention
from ..store import without_password

#: The app of `celery -A proj`, when a command runs under it.
CELERY_APP: ContextVar[Any] = ContextVar("CELERY_APP", default=None)

#: The folders of the bridge and of Python, and the names of the folders of what is installed.
_BRIDGE, _PYTHON = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}

_STORE = "OJS_BRIDGE_STORE"
APP = "OJS_BRIDGE_APP"
_PANEL = "Which bridge"


@dataclass(frozen=True)
class Place:
    """The options that name a bridge; raises ConfigurationError where they name none, or two."""

    store: Annotated[
        str | None,
        Option(rich_help_panel=_PANEL, help=f"URL of the store, such as sqlite:///ojs.db, or {_STORE}."),
    ] = None
    namespace: Annotated[
        str | None, Option(rich_help_panel=_PANEL, help="Namespace in the store, or OJS_BRIDGE_NAMESPACE.")
    ] = None
    app: Annotated[
        list[str] | None,
        Option(
            metavar="MODULE:APP",
            rich_help_panel=_PANEL,
            help="The Celery app or Dramatiq broker, as its framework writes it, or OJS_BRIDGE_APP. The "
            "command uses its bridge, with its store, retention and redaction. Replays and drains need it. "
            "A fleet of both frameworks gives it twice.",
        ),
    ] = None

    @property
    def has_app(self) -> bool:
        """Whether an app was given. Its bridge can publish, and knows the retention."""
        return bool(self._apps) or CELERY_APP.get() is not None

    @property
    def _apps(self) -> Sequence[str]:
        """The names of the apps. With --store, OJS_BRIDGE_APP does not count: none is imported in vain."""
        named = self.app or ([] if self.store else [os.environ.get(APP, "")])
        return [name for name in named if name]

    @cached_property
    def bridge(self) -> Bridge:
        """The app's own bridge, or one for the store; the first app's serves the others, too."""
        if not self.has_app:
            return self.bridge_with(None)
        apps = [app_of(name, setting_up=True) for name in self._apps] or [CELERY_APP.get()]
        bridge, *others = map(self._bridge_of, apps)
        for other in others:
            _join(bridge, other)
        return bridge

    def _bridge_of(self, app: Any) -> Bridge:
        # The modules of the tasks may put the app under the bridge.
        tasks_of(app)
        try:
            bridge = framework_of(app).bridge_of(app)
        except ConfigurationError as error:
            raise ConfigurationError(f"app: {error}") from None
        self._check(bridge)
        # The app's listeners must get the events of replays and deletions before this process ends.
        atexit.register(bridge.flush)
        return bridge

    def bridge_with(self, retention: Retention | None, *, new: bool = False) -> Bridge:
        """Return a bridge without an app for the store, which may be `new`."""
        url = self._url
        if not url:
            raise ConfigurationError(
                "store: which one? Dead letters and waiting jobs are in the database that your "
                f"Bridge(store=...) names. Name your app: --app MODULE:APP, or {APP}. Or name the store: "
                f"--store postgresql://user@db/shop, or {_STORE}. Without a store dead letters are in the "
                "dead queues of the broker"
            )
        if not new:
            _check_file(url)
        return Bridge(url, namespace=self.namespace, retention=retention)

    @property
    def publishing_bridge(self) -> Bridge:
        """The app's own bridge; raises ConfigurationError without an app."""
        if self.store and os.environ.get(APP):
            raise _ignored("store")
        if not self.has_app:
            raise ConfigurationError(
                "app: none is given, and a message is published by the app that it came from: "
                f"--app MODULE:APP, or {APP}"
            )
        return self.bridge

    @property
    def in_namespace(self) -> str:
        """The namespace in words, if it was given, because it may be misspelt."""
        given = layered(namespace=self.namespace)["namespace"]
        name = self.namespace or ("" if given.in_code else given.value)
        return f" in the namespace {name!r}" if name else ""

    def __str__(self) -> str:
        if self._apps:
            return f"the store of {' and '.join(self._apps)}"
        if self.has_app:
            return "the app's store"
        return without_password(self._url)

    @property
    def _url(self) -> str:
        return str(layered(store=self.store or None)["store"].value or "")

    def _check(self, bridge: Bridge) -> None:
        """Refuse options that the app's own bridge would ignore."""
        if bridge.store is None:
            how = "Bridge(store='postgresql://user@db/shop'), or redis://, or on one host only sqlite:///"
            if self.store:
                how = f"Bridge(store={without_password(self.store)!r})"
            raise ConfigurationError(
                f"store: the app's bridge has none: give it {how}, or set {_STORE} for this command and "
                "for the workers, which a Bridge() without a store reads"
            )
        for name in ("store", "namespace"):
            if getattr(self, name):
                raise _ignored(name)


def _join(bridge: Bridge, other: Bridge) -> None:
    """Let a bridge publish for the apps of another one, of another framework; raises ConfigurationError."""
    if other is bridge:
        return
    stores = [getattr(one.store, "shown", "") for one in (bridge, other)]
    if stores[0] != stores[1]:
        raise ConfigurationError(
            f"app: {stores[0]} is the store of one, and {stores[1]} of another: name one"
        )
    theirs = other.engine.context
    for framework, publisher in theirs.publishers.items():
        try:
            bridge.engine.register(framework, publisher, theirs.dead_queues.get(framework))
        except ConfigurationError as error:
            raise ConfigurationError(f"app: {error}") from None


def _ignored(name: str) -> ConfigurationError:
    return ConfigurationError(f"{name}: the app's bridge has its own: leave --{name} out")


def _check_file(url: str) -> None:
    """Raise StoreError for a missing SQLite file: reading must not create it."""
    if url.startswith("sqlite"):
        path = url.partition(":///")[2].partition("?")[0]
        if path and not path.startswith((":memory:", "file:")) and not Path(path).exists():
            raise StoreError(f"store: {without_password(url)!r}: there is no such file")


def app_of(name: str, modules: Iterable[str] = (), *, setting_up: bool = False) -> Any:
    """Return the Celery app that `proj`, `proj:app` or `proj.celery` names, or a Dramatiq broker.

    That is `module:broker`, or `module` for the broker that it has set. The `modules` are imported after it.
    Where `setting_up`, a function that sets the broker may stand in its place, and is called; an actor or a
    task never is. Raises ConfigurationError.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with _importing(name):
        _import(name)
        app = _found(name, setting_up=setting_up)
        if app is None and hasattr(sys.modules.get(name), "__path__"):
            # A package may have its app in a module with its framework's name, whose errors Celery swallows.
            for inner in filter(find_spec, (f"{name}.{framework}" for framework in NAMES)):
                import_module(inner)
            app = _found(name, setting_up=setting_up)
    if app is None:
        raise ConfigurationError(f"app: {name!r} holds neither a Celery app nor a Dramatiq broker")
    for module in modules:
        with _importing(module):
            import_module(module)
    return app


def _found(name: str, *, setting_up: bool) -> Any:
    apps = (framework.find(name, setting_up) for framework in frameworks())
    return next((app for app in apps if app is not None), None)


def tasks_of(app: Any) -> Mapping[str, Any]:
    """Return the tasks of an app or the actors of a broker, by name; raises ConfigurationError."""
    framework = framework_of(app)
    with _importing(getattr(app, "main", None) or framework.name):
        return framework.tasks_of(app)


def _import(name: str) -> None:
    """Import the module of a name, whose last part may be an attribute; raises the errors of that module."""
    module, _, attribute = name.partition(":")
    parent, _, last = module.rpartition(".")
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if attribute or not parent or error.name != module or not hasattr(import_module(parent), last):
            raise


@contextmanager
def _importing(name: str) -> Iterator[None]:
    """Turn an error of the app's modules into one line; redirect their output to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        why = "; ".join(error.problems) if isinstance(error, InvalidRetryPolicy) else str(error)
        if isinstance(error, SyntaxError):
            why = error.msg  # Its text has the name of the file without its folder.
        reason = f"{type(error).__name__}: {' '.join(why.split())}{_place(error)}"
        raise ConfigurationError(f"app: {name!r} cannot be imported: {reason}") from error


def _place(error: BaseException) -> str:
    """Return the module that could not be imported, or that it called, and the line of the error."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).exists():
        # A module that cannot be parsed has no frame.
        return _line_of(_module_of(error.filename), error.filename, error.lineno)
    frames = [frame for frame in traceback.walk_tb(error.__traceback__) if _is_outside(frame[0])]
    own = [frame for frame in frames if _INSTALLED.isdisjoint(Path(frame[0].f_code.co_filename).parts)]
    if not frames:
        return ""
    frame, line = (own or frames)[-1]
    return _line_of(frame.f_globals.get("__name__"), frame.f_code.co_filename, line)


def _is_outside(frame: FrameType) -> bool:
    """Return whether a frame is neither the bridge's nor Python's own, which may be in no file."""
    path = Path(frame.f_code.co_filename)
    if not path.exists() or path.is_relative_to(_BRIDGE):
        return False
    return not path.is_relative_to(_PYTHON) or not _INSTALLED.isdisjoint(path.parts)


def _line_of(module: object, file: str, line: int | None) -> str:
    here, path = Path.cwd(), Path(file).resolve()
    return f" (module {module}, {path.relative_to(here) if path.is_relative_to(here) else path}:{line or 1})"


def _module_of(file: str) -> str:
    """Return the dotted name of a file's module, by the longest folder of `sys.path` that it is in."""
    path = Path(file).resolve()
    folders = [folder for folder in map(Path, filter(None, sys.path)) if path.is_relative_to(folder)]
    parts = path.relative_to(max(folders, key=lambda folder: len(folder.parts), default=path.parent))
    names = parts.with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)
