"""The setting `errors` in a file, a variable or Django's settings: classes stand there by their names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..engine.layers import imported
from ..errors import ConfigurationError
from ..rules.failures import ErrorMap, Errors
from ..rules.standard_errors import STANDARD, standard_errors

logger = logging.getLogger("ojs_bridge")

#: The key that brings the standard errors.
_STANDARD = "standard"


def named_errors(place: str, said: Mapping[Any, Any]) -> Errors:
    """Return the error map of a table; `place` is where it stands. Raises ConfigurationError."""
    standard = said.get(_STANDARD, False)
    if type(standard) is not bool:
        raise ConfigurationError(f"{place}: {_STANDARD}: {standard!r} must be true or false")
    errors: dict[Any, Any] = dict(standard_errors()) if standard else {}
    for name, mapped in said.items():
        if name != _STANDARD:
            errors[_class_of(place, name)] = tuple(mapped) if isinstance(mapped, list) else mapped
    try:
        ErrorMap(errors)
    except ConfigurationError as error:
        raise ConfigurationError(f"{place}: {str(error).removeprefix('errors: ')}") from None
    return errors


def _class_of(place: str, name: Any) -> Any:
    """Return the class of a name, which finds a typo; or the name, where its package is not installed."""
    try:
        return name if name in STANDARD and "." in name else imported(place, name)
    except ConfigurationError as error:
        package = str(name).partition(".")[0]
        if getattr(error.__cause__, "name", None) != package:
            raise
        logger.warning("%s: %r: package %s is not installed: no error has this class", place, name, package)
        return name
