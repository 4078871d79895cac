"""What a process holds while it starts threads of its own, as every forked child does anew."""

from __future__ import annotations

import os
import threading

_starting = threading.Lock()


def starting() -> threading.Lock:
    """Return the lock to start threads under; a child does not inherit it from a thread it does not have."""
    return _starting


def _new_lock() -> None:
    global _starting  # noqa: PLW0603 - a child's own
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)
