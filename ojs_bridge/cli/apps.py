"""From `--app`, as the frameworks write it, to that app's bridge. Each framework is imported when needed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from ..bridge import Bridge
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..migration.shadowing import bridge_of_shadow


def bridge_of(name: str) -> Bridge:
    """Return the bridge of an app, named as for `app_of`; raises ConfigurationError."""
    app = app_of(name, setting_up=True)
    return bridge_of_celery(app) if is_celery(app) else _bridge_of_dramatiq(app, name)


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
        app = _celery_app(name)
        if app is None:
            app = _dramatiq_broker(name, setting_up=setting_up)
        if app is None:
            _import_celery_module(name)
    if app is None:
        raise ConfigurationError(f"app: {name!r} holds neither a Celery app nor a Dramatiq broker")
    for module in modules:
        with _importing(module):
            import_module(module)
    return app


def is_celery(app: Any) -> bool:
    """Return whether what `app_of` found is a Celery app."""
    return find_spec("celery") is not None and isinstance(app, import_module("celery").Celery)


def load_tasks(app: Any) -> None:
    """Import the task modules of a Celery app; raises ConfigurationError."""
    with _importing(app.main or "celery"):
        app.loader.import_default_modules()
        app.finalize()


def bridge_of_celery(app: Any) -> Bridge:
    """Return the bridge of a Celery app whose task modules are loaded; raises ConfigurationError."""
    from ..celery.attach import POLICIES, attach, is_bridged

    load_tasks(app)
    if POLICIES not in vars(app) and not any(is_bridged(task) for task in app.tasks.values()):
        if shadowed := bridge_of_shadow(app):
            return shadowed
        raise ConfigurationError(
            f"app: the Celery app {app.main!r} has no bridge: give it one, install(app, bridge)"
        )
    return attach(app)


def _bridge_of_dramatiq(broker: Any, name: str) -> Bridge:
    from ..dramatiq import OJSRetries

    for middleware in broker.middleware:
        if isinstance(middleware, OJSRetries):
            middleware.after_process_boot(broker)
            return middleware.bridge
    if shadowed := bridge_of_shadow(broker):
        return shadowed
    raise ConfigurationError(
        f"app: the Dramatiq broker of {name!r} has no bridge: give it one, install(broker, bridge)"
    )


def _import(name: str) -> None:
    """Import the module of a name, whose last part may be an attribute; raises whatever that raises."""
    module, _, attribute = name.partition(":")
    parent, _, last = module.rpartition(".")
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if attribute or not parent or error.name != module or not hasattr(import_module(parent), last):
            raise


def _celery_app(name: str) -> Any:
    if find_spec("celery") is None:
        return None
    from celery import Celery
    from celery.app.utils import find_app

    found = None
    with suppress(AttributeError, ImportError):
        found = find_app(name)
    return found if isinstance(found, Celery) else None


def _import_celery_module(name: str) -> None:
    """Raise what keeps a package's module `celery` from being imported, of which Celery says nothing."""
    if hasattr(sys.modules.get(name), "__path__") and find_spec(f"{name}.celery"):
        import_module(f"{name}.celery")


def _dramatiq_broker(name: str, *, setting_up: bool) -> Any:
    if "dramatiq" not in sys.modules:
        return None
    from dramatiq import broker
    from dramatiq.cli import import_object

    _, found = import_object(name)  # type: ignore[no-untyped-call]
    if found is None:
        return broker.global_broker
    if setting_up and isinstance(found, FunctionType):
        found()
        return broker.get_broker()
    return found if isinstance(found, broker.Broker) else None


@contextmanager
def _importing(name: str) -> Iterator[None]:
    """Tell in one line what the import of somebody's modules raises; what they print is not the answer."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        why = "; ".join(error.problems) if isinstance(error, InvalidRetryPolicy) else str(error)
        told = f"{type(error).__name__}: {' '.join(why.split())}{_place(error)}"
        raise ConfigurationError(f"app: {name!r} cannot be imported: {told}") from error


def _place(error: BaseException) -> str:
    """Return the module at fault, the last one that was being imported, and a line."""
    here = Path.cwd()
    frames = [*traceback.walk_tb(error.__traceback__)]
    own = [(f, line) for f, line in frames if f.f_code.co_filename.startswith(str(here))]
    modules = [(f, line) for f, line in frames if f.f_code.co_name == "<module>"]
    if not (own or modules):
        return ""
    frame, line = (own or modules)[-1]
    path = Path(frame.f_code.co_filename)
    where = f"{path.relative_to(here) if own else path}:{line}"
    named = f"module {modules[-1][0].f_globals.get('__name__')}, " if modules else ""
    return f" ({named}{where})"
