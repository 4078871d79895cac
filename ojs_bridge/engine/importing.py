"""What a dotted name in a setting stands for."""

from __future__ import annotations

import builtins
from importlib import import_module
from typing import Any

from ..errors import ConfigurationError


def imported(place: str, name: Any) -> Any:
    """Return what a dotted name stands for; a builtin needs no module, and what is no name is itself.

    `place` is where the name was written. Raises ConfigurationError.
    """
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module) if module else builtins, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: {name!r} cannot be imported: {error}") from error
