"""Which tasks or actors of a fleet are moved, and under which partial policy."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from .errors import ConfigurationError, InvalidRetryPolicy
from .policy import PartialPolicy, check_partial


class Policies:
    """The `policies` of an `install`: name patterns, such as `billing.*`, and partial policies.

    Where several patterns match a name, all of them count, later ones winning, over a `default`. Without
    `policies` every name is moved. Raises InvalidRetryPolicy for a partial policy that is invalid. `place`
    stands before what is said of them.
    """

    def __init__(
        self,
        policies: Mapping[str, PartialPolicy] | None,
        *,
        default: PartialPolicy | None = None,
        place: str = "",
    ) -> None:
        self._policies = None if policies is None else dict(policies)
        self._default = [] if default is None else [default]
        self._place = place
        for pattern, partial in (policies or {}).items():
            try:
                check_partial(partial)
            except InvalidRetryPolicy as error:
                raise error.under(f"{place}policies[{pattern!r}]") from None

    def of(self, name: str) -> list[PartialPolicy] | None:
        """Return the partial policies for a name; None for one that stays with its framework."""
        if self._policies is None:
            return self._default
        named = [p for pattern, p in self._policies.items() if fnmatch.fnmatchcase(name, pattern)]
        return [*self._default, *named] if named else None

    def check(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigurationError for a pattern that matches none of the names, which are of `what`."""
        known = list(names)
        for pattern in self._policies or ():
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise ConfigurationError(f"{self._place}policies[{pattern!r}] names no {what}")
