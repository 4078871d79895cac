"""The entrance to virtual time: the app or broker of a test is found, and its bridge is replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..errors import ConfigurationError
from .bridging import Clock, VirtualBridge, turned_into
from .virtual import VirtualTime
from .working import Agenda

_GIVE = "give it to virtual_time(...), or return it from a fixture `ojs_app`"


@contextmanager
def virtual_time(target: Any = None, *, jitter: int | None = None) -> Iterator[VirtualTime]:
    """Run the jobs of a Celery app or a Dramatiq broker in a test, in memory, and without waiting.

    The target is by default the current Celery app or the global Dramatiq broker, if it has a bridge. Within
    the block its bridge has a store in memory and a clock that only the test moves. The messages and the
    results are in memory, too. After the block everything is as it was. Without a seed `jitter`, delays have
    no jitter. Raises ConfigurationError.
    """
    adapter, target = _adapter(target)
    bridge, clock = adapter.bridge_of(target), Clock()
    if isinstance(bridge, VirtualBridge):
        raise ConfigurationError(f"virtual time: {target!r} is under virtual time already")
    other, agenda = VirtualBridge(bridge, clock, jitter), Agenda(clock)
    other.store.prepare()
    try:
        with turned_into(bridge, other), adapter.worker_of(target, agenda) as worker:
            yield VirtualTime(other, clock, agenda, worker)
    finally:
        other.flush()
        other.store.close()


def _adapter(target: Any) -> tuple[ModuleType, Any]:
    """Return the module that knows the framework of an app or broker, and the app or broker."""
    known = [*adapters()]
    found = [(adapter, one) for adapter in known if (one := target or adapter.current()) is not None]
    fitting = [(adapter, one) for adapter, one in found if isinstance(one, adapter.TARGET)]
    if len(fitting) == 1:
        [(adapter, one)] = fitting
        return adapter, one
    if target is not None:
        raise ConfigurationError(f"virtual time: {target!r} is neither a Celery app nor a Dramatiq broker")
    if fitting:
        raise ConfigurationError(f"virtual time: there are a Celery app and a Dramatiq broker: {_GIVE}")
    raise ConfigurationError(
        "virtual time: neither the current Celery app nor the global Dramatiq broker has a bridge: import "
        f"the module of your app or broker, or {_GIVE}"
    )


def adapters() -> Iterator[ModuleType]:
    """Yield the module of each framework that this process has imported."""
    if "celery" in sys.modules:
        from . import on_celery

        yield on_celery
    if "dramatiq" in sys.modules:
        from . import on_dramatiq

        yield on_dramatiq
