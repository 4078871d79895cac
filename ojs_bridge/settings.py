"""What a bridge is given, checked; what is missing is read from OJS_BRIDGE_* variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from . import events
from .duration import read_duration
from .errors import ConfigurationError, InvalidRetryPolicy
from .failures import Mapped
from .policy import PartialPolicy, RetryPolicy
from .retention import Retention
from .store import Store, open_store


def at_least(name: str, value: object, least: int, unit: str) -> int:
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{name}: {value!r} must be at least {least}{unit}")
    return value


def the_store(store: str | Store | None, namespace: str) -> Store | None:
    found = store if store is not None else os.environ.get("OJS_BRIDGE_STORE") or None
    if isinstance(found, str):
        return open_store(found, namespace)
    if found is None or isinstance(found, Store):
        return found
    raise ConfigurationError(f"store: {found!r} is neither a URL such as sqlite:///ojs.db nor a store")


def retry_from_environment() -> PartialPolicy | None:
    text = os.environ.get("OJS_BRIDGE_RETRY")
    if not text:
        return None
    try:
        partial: PartialPolicy = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"OJS_BRIDGE_RETRY: {text!r} is not JSON: {error}") from None
    try:
        RetryPolicy.merge(partial)
    except InvalidRetryPolicy as error:
        raise InvalidRetryPolicy([f"OJS_BRIDGE_RETRY: {problem}" for problem in error.problems]) from None
    return partial


def the_retention(retention: Retention | None) -> Retention:
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigurationError(f"retention: {retention!r} is not a Retention")
    return retention or Retention()


def error_map(errors: Mapping[type[BaseException], Mapped] | None) -> dict[type[BaseException], Mapped]:
    if errors is not None and not isinstance(errors, Mapping):
        raise ConfigurationError(f"errors: {errors!r} must map exception classes to error types")
    return dict(errors or {})


def listeners_of(listeners: Sequence[events.Listener]) -> Sequence[Callable[[events.Event], object]]:
    if callable(listeners) or not isinstance(listeners, Iterable):
        raise ConfigurationError(f"listeners: {listeners!r} must be a list of callables")
    listeners = tuple(listeners)
    for listener in listeners:
        if not callable(listener):
            raise ConfigurationError(f"listeners: {listener!r} is not callable")
    return listeners


def length(name: str, value: str | timedelta) -> timedelta:
    """Return a duration greater than zero; raises ConfigurationError."""
    try:
        found = read_duration(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name}: {value!r} {error}") from None
    if not found:
        raise ConfigurationError(f"{name}: {value!r} must be greater than zero")
    return found
