"""The `policies` of an install: the tasks or actors under the bridge, and their partial policies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..engine.retry_on import RetryOn, RetryOnLike
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..rules.patterns import check_errors, check_pattern, matches
from ..rules.policy import AnyPartial, PolicyFields, RetryPolicy, check_partial

_RETRY_ON = "retry_on"


class EntryFields(PolicyFields, total=False):
    """The fields of an entry of `policies`, for a type checker."""

    retry_on: RetryOnLike | None


PolicyEntry: TypeAlias = "EntryFields | RetryPolicy"
"""An entry of `policies`: a partial policy, which may have a `retry_on` among its fields."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of `policies`: a partial policy, and its `retry_on`, if there is one."""

    policy: AnyPartial
    retry_on: RetryOn | None = None


def read_entry(entry: AnyPartial, place: str) -> Entry:
    """Read an entry; raises ConfigurationError for an invalid `retry_on`, after its `place`.

    The partial policy is not checked.
    """
    if not isinstance(entry, Mapping):
        return Entry(entry)
    said = entry.get(_RETRY_ON)
    partial = {name: value for name, value in entry.items() if name != _RETRY_ON}
    return Entry(partial, None if said is None else RetryOn(said, f"{place}: {_RETRY_ON}"))


def _checked(entry: AnyPartial, place: str) -> Entry:
    found = read_entry(entry, place)
    try:
        check_partial(found.policy)
        check_errors(found.policy)
    except InvalidRetryPolicy as error:
        raise error.under(place) from None
    return found


class Policies:
    """The `policies` of an `install`: name patterns, such as `billing.*`, and partial policies.

    An entry may also have a `retry_on`. If several patterns match a name, their policies are merged in order
    over the `default`. Without `policies` every name is taken over. Errors begin with the `place`. Raises
    InvalidRetryPolicy for an invalid partial policy, and ConfigurationError for an invalid `retry_on`.
    """

    def __init__(
        self,
        policies: Mapping[str, AnyPartial] | None,
        *,
        default: AnyPartial | None = None,
        place: str = "",
    ) -> None:
        self._place = place
        self._default = [] if default is None else [_checked(default, f"{place}default")]
        self._policies = None if policies is None else dict(self._entries_of(policies))

    def of(self, name: str) -> list[AnyPartial] | None:
        """Return the partial policies for a name; None if the name stays with its framework."""
        entries = self._entries(name)
        return None if entries is None else [entry.policy for entry in entries]

    def retry_on(self, name: str) -> RetryOn | None:
        """Return the `retry_on` for a name; None if no policy has one."""
        said = [entry.retry_on for entry in self._entries(name) or () if entry.retry_on]
        return said[-1] if said else None

    def _entries_of(self, policies: Mapping[str, AnyPartial]) -> Iterator[tuple[str, Entry]]:
        for pattern, entry in policies.items():
            try:
                check_pattern(f"{self._place}policies", pattern)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
            yield pattern, _checked(entry, f"{self._place}policies[{pattern!r}]")

    def _entries(self, name: str) -> list[Entry] | None:
        if self._policies is None:
            return self._default
        named = [p for pattern, p in self._policies.items() if matches(name, pattern)]
        return [*self._default, *named] if named else None

    def check(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigurationError for a pattern that matches no name; `what` is a task or an actor.

        And for an exception class of `retry_on` that cannot be imported.
        """
        known = list(names)
        for entry in (*self._default, *(self._policies or {}).values()):
            if entry.retry_on:
                entry.retry_on.resolve()
        for pattern in self._policies or ():
            if not any(matches(name, pattern) for name in known):
                raise ConfigurationError(f"{self._place}policies[{pattern!r}] names no {what}")
