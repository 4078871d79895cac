"""Celery's warnings name the user's line, though this package registers tasks in between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

from celery import Celery

#: Packages whose lines a user has not written.
_INSIDE = ("celery", __name__.partition(".")[0])


def warn_outside(app: Celery) -> None:
    """Have the warning of a task name that is taken name the first line outside Celery and the bridge."""
    # Celery 5.7 looks for the first line outside of Celery alone; it offers no other way to say which.
    warn = getattr(app, "_warn_duplicate_task_name", None)
    if warn is None:
        return

    def warn_there(*args: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn(*args)
        for warning in caught:
            warnings.warn(warning.message, stacklevel=_level())

    app._warn_duplicate_task_name = warn_there


def _level() -> int:
    """Return how far away the first line outside is from the function that asks."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
