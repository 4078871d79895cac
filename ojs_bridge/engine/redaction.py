"""The redaction: it hides secrets of dead letters and parked retries from their readers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

from ..errors import ConfigurationError
from ..messages import Reading, read_message

Redaction: TypeAlias = Collection[str] | Callable[[str, Any], Any]
"""Names of arguments, or a callable that gets an argument's name and value, and returns the value to show.

A positional argument whose parameter is not known has its place for a name, such as "0".
"""

HIDDEN = "[redacted]"
#: A secret that is shorter is not taken out of other texts: it is too common.
_TELLING = 4


class Redactor:
    """Applies a Redaction; false if there is none. Raises ConfigurationError for any other value."""

    def __init__(self, redaction: Redaction | None) -> None:
        if callable(redaction):
            self._by: Callable[[str, Any], Any] = redaction
        elif isinstance(redaction, str) or not isinstance(redaction, Collection | None):
            raise ConfigurationError(
                f"redact: {redaction!r} is neither a collection of argument names nor a callable"
            )
        else:
            self._names = frozenset(name.casefold() for name in redaction or ())
            self._by = self._by_name
        self._is_on = bool(redaction)

    def __bool__(self) -> bool:
        return self._is_on

    def message(self, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return a kept message as it may be shown, and the secrets to be taken out of all other texts."""
        whole = read_message(message)
        secrets, shown = self.secrets(whole), self.reading(whole)
        parts = without({"args": shown.args, "kwargs": shown.kwargs, "meta": shown.meta}, secrets)
        hidden = [name for name, value in parts.items() if value != getattr(whole, name)]
        rest = {"parameters": [*shown.names], "note": shown.note, "hidden": hidden}
        return {**parts, "redacted": True, **rest}, secrets

    def reading(self, reading: Reading) -> Reading:
        """Return a message as it may be shown."""
        args = None
        if reading.args is not None:
            names = [*reading.names, *map(str, range(len(reading.names), len(reading.args)))]
            args = [self._shown(name, value) for name, value in zip(names, reading.args, strict=False)]
        kwargs = None if reading.kwargs is None else self._mapping(reading.kwargs)
        return Reading(args, kwargs, self._mapping(reading.meta), reading.names, reading.note)

    def secrets(self, reading: Reading) -> list[str]:
        """Return the texts that the redaction hides, the longest first, to be taken out of errors as well."""
        shown = self.reading(reading)
        pairs = [(reading.args, shown.args), (reading.kwargs, shown.kwargs), (reading.meta, shown.meta)]
        texts = {text for before, after in pairs for text in _hidden(before, after)}
        return sorted((text for text in texts if len(text) >= _TELLING), key=len, reverse=True)

    def _by_name(self, name: str, value: Any) -> Any:
        return HIDDEN if name.casefold() in self._names else value

    def _mapping(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._shown(str(name), value) for name, value in values.items()}

    def _shown(self, name: str, value: Any) -> Any:
        shown = self._by(name, value)
        if shown is not value:
            return shown
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | tuple):
            return [self._shown(name, item) for item in value]
        return value


def without(value: Any, secrets: Collection[str]) -> Any:
    """Return a JSON value with some secrets taken out of its texts."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, Mapping):
        return {without(name, secrets): without(item, secrets) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without(item, secrets) for item in value]
    return value


def _hidden(before: Any, after: Any) -> Iterator[str]:
    """Yield the texts of a value that the redacted value has not in the same place."""
    if isinstance(before, Mapping):
        rest = after if isinstance(after, Mapping) else {}
        for name, value in before.items():
            yield from _hidden(value, rest.get(name))
    elif isinstance(before, list | tuple):
        items = after if isinstance(after, list) and len(after) == len(before) else [None] * len(before)
        for value, shown in zip(before, items, strict=True):
            yield from _hidden(value, shown)
    elif before is not None and before is not True and before is not False and before != after:
        yield str(before)
