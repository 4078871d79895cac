"""The frameworks that a process has imported, each with a module that knows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType


def adapters() -> Iterator[ModuleType]:
    """Yield the module of each framework that this process has imported."""
    if "celery" in sys.modules:
        from . import on_celery

        yield on_celery
    if "dramatiq" in sys.modules:
        from . import on_dramatiq

        yield on_dramatiq
