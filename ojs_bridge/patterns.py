"""Which tasks or actors of a fleet are moved, and under which partial policy."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from .errors import ConfigurationError, InvalidRetryPolicy
from .policy import PartialPolicy, check_partial


class Policies:
    """The `policies` of an `install`: name patterns, such as `billing.*`, and partial policies.

    Where several patterns match a name, all of them count, later ones winning. Without `policies` every name
    is moved. Raises InvalidRetryPolicy for a partial policy that is invalid.
    """

    def __init__(self, policies: Mapping[str, PartialPolicy] | None) -> None:
        self._policies = None if policies is None else dict(policies)
        for pattern, partial in (policies or {}).items():
            try:
                check_partial(partial)
            except InvalidRetryPolicy as error:
                raise error.under(f"policies[{pattern!r}]") from None

    def of(self, name: str) -> list[PartialPolicy] | None:
        """Return the partial policies for a name; None for one that stays with its framework."""
        if self._policies is None:
            return []
        return [p for pattern, p in self._policies.items() if fnmatch.fnmatchcase(name, pattern)] or None

    def check(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigurationError for a pattern that matches none of the names, which are of `what`."""
        known = list(names)
        for pattern in self._policies or ():
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise ConfigurationError(f"policies[{pattern!r}] names no {what}")
