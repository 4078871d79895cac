"""The rule `retry_on`: it says which failures of a task are retried at all; no message carries it."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeAlias

from ..errors import ConfigurationError
from ..rules.responses import Response

#: A value of `retry_on`: `"failure"`, `"asked"`, exception classes, or their dotted names.
RetryOnLike: TypeAlias = "str | type[BaseException] | Sequence[str | type[BaseException]]"

_FAILURE, _ASKED = "failure", "asked"
#: Why a failure is not retried.
NOT_ASKED = "which this task does not ask to retry"


class RetryOn:
    """The failures of a task that are retried, while attempts are left.

    With `"failure"` all failures are retried, and with `"asked"` those for which the task's code asks. With
    exception classes their instances are retried, too, but none of `never`. A class may be given by its name,
    as in `"shop.SoldOut"`: a worker imports it when it starts. `place` is where the value was written. Raises
    ConfigurationError.
    """

    def __init__(
        self, said: RetryOnLike, place: str = "retry_on", *, never: tuple[type[BaseException], ...] = ()
    ) -> None:
        #: Whether every failure is retried.
        self.is_every = said == _FAILURE
        #: Whether a failure is retried only if the code asks for it.
        self.is_asked = said == _ASKED
        self._place, self._never = place, never
        self._named = [] if self.is_every or self.is_asked else _listed(said, place)
        self._classes: tuple[type[BaseException], ...] | None = None

    def rules_out(self, exc: BaseException) -> str | None:
        """Return why an error of the task's code is not retried, or None; raises ConfigurationError."""
        if self.is_every or isinstance(exc, Response):
            return None
        if isinstance(exc, self.resolve()) and not isinstance(exc, self._never):
            return None
        return NOT_ASKED

    def resolve(self) -> tuple[type[BaseException], ...]:
        """Return the classes; raises ConfigurationError for a name that stands for no class."""
        if self._classes is None:
            self._classes = tuple(_class(self._place, named) for named in self._named)
        return self._classes


def _listed(said: object, place: str) -> list[Any]:
    listed = [*said] if isinstance(said, (list, tuple)) else [said]
    for named in listed:
        if not ((isinstance(named, str) and named) or _is_exception(named)):
            raise ConfigurationError(
                f"{place}: {named!r} must be 'failure', 'asked', or exception classes, or names of them"
            )
    return listed


def _class(place: str, named: Any) -> type[BaseException]:
    found: Any = imported(place, named)
    if not _is_exception(found):
        raise ConfigurationError(f"{place}: {named!r} is no exception class")
    return found  # type: ignore[no-any-return]


def _is_exception(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, BaseException)


#: The specification: every failure is retried that is not non-retryable.
EVERY_FAILURE = RetryOn(_FAILURE)
#: Only what the code of a task asks for.
ASKED = RetryOn(_ASKED)


def imported(place: str, name: Any) -> Any:
    """Import a dotted name and return its value; a value that is no text is returned as it is.

    A builtin needs no module. `place` is where the name was written. Raises ConfigurationError.
    """
    if not isinstance(name, str):
        return name
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module) if module else builtins, attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{place}: {name!r} cannot be imported: {error}") from error
