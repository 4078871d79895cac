"""The settings of a bridge and of an `install`, as found in their sources, and checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from ..engine import events
from ..engine.retry_on import imported
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..operations.retention import Retention
from ..rules.duration import read_duration
from ..rules.failures import ErrorMap, Mapped
from ..rules.job import MIN_HEADER_BUDGET, MIN_HISTORY
from ..rules.policy import AnyPartial, RetryPolicy
from ..store import PATIENCE_SECONDS, Store, open_store, without_password
from .policies import Policies
from .policy_files import PoliciesOrFile, load
from .sources import Found, layered

#: The native retries of a job from before the bridge count as attempts; or not, if they exceed its policy.
InFlight: TypeAlias = Literal["counted", "afresh"]

_LIMITS = tuple(field.name for field in fields(Retention))


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one bridge."""

    store: Store | None
    retry: AnyPartial | None
    errors: dict[type[BaseException], Mapped]
    listeners: tuple[Callable[[events.Event], object], ...]
    history: int
    header_budget: int
    reservation: timedelta
    park_after: timedelta
    fail_open: bool
    retention: Retention


def settings_of(**given: Any) -> Settings:
    """Return a bridge's settings: those given that are not None, and the others from their sources.

    Raises ConfigurationError and InvalidRetryPolicy.
    """
    found = layered(**given)
    return Settings(
        store=_store(found["store"], found["namespace"].value, _length(found["reservation"])),
        retry=_retry(found["retry"]),
        errors=_errors(found["errors"]),
        listeners=_listeners(found["listeners"]),
        history=_at_least(found["history"], MIN_HISTORY, " (spec section 10.1)"),
        header_budget=_at_least(found["header_budget"], MIN_HEADER_BUDGET, " bytes"),
        reservation=_length(found["reservation"]),
        park_after=_length(found["park_after"]),
        fail_open=_either(found["fail_open"]),
        retention=_retention(found["retention"]),
    )


def the_retry() -> AnyPartial | None:
    """Return the default policy from the sources outside of code."""
    return _retry(layered()["retry"])


def the_policies(policies: PoliciesOrFile | None) -> Policies:
    """Return the policies of an `install`, given or found; raises InvalidRetryPolicy, ConfigurationError."""
    found = layered(policies=policies)["policies"]
    match found.value:
        case str() | os.PathLike() as path:
            return load(path, found.place)
        case None | Mapping() as named:
            return Policies(named, place=found.place.removesuffix("policies"))
    raise ConfigurationError(
        f"{found.place}: {found.value!r} must map names to partial policies, or be a file of them"
    )


def fetches_reliably() -> bool:
    """Return whether a Celery worker uses the bridge's reliable way to take messages from Redis."""
    return _either(layered()["reliable_fetch"])


def begins_afresh(in_flight: InFlight) -> bool:
    """Return whether jobs in flight beyond their limit begin afresh; raises ConfigurationError."""
    if in_flight not in get_args(InFlight):
        raise ConfigurationError(f"in_flight: {in_flight!r} must be 'counted' or 'afresh'")
    return in_flight == "afresh"


def _is_store(value: object) -> TypeGuard[Store]:
    # A store may delegate with __getattr__, which isinstance does not see on Python 3.12.
    return all(hasattr(value, name) for name in ("bury", "park", "reserve"))


def _store(found: Found, namespace: str, reservation: timedelta) -> Store | None:
    store = found.value
    if isinstance(store, str):
        return open_store(store, namespace, patience=_patience(reservation))
    if store is None or _is_store(store):
        return store
    shown = without_password(repr(store))
    raise ConfigurationError(f"{found.place}: {shown} is neither a URL such as sqlite:///ojs.db nor a store")


def _patience(reservation: timedelta) -> float:
    """Return the seconds to wait for a store: less than a reservation lasts."""
    return min(max(reservation.total_seconds() / 3, 2.0), PATIENCE_SECONDS)


def _retry(found: Found) -> AnyPartial | None:
    partial: AnyPartial | None = found.value
    try:
        RetryPolicy.merge(partial)
    except InvalidRetryPolicy as error:
        raise error if found.in_code else error.under(found.place) from None
    return partial


def _errors(found: Found) -> dict[type[BaseException], Mapped]:
    errors = found.value
    if not isinstance(errors, Mapping):
        raise ConfigurationError(f"{found.place}: {errors!r} must map exception classes to error types")
    if found.in_code:
        return dict(errors)
    named = {imported(found.place, name): _pair(mapped) for name, mapped in errors.items()}
    try:
        ErrorMap(named)
    except ConfigurationError as error:
        raise ConfigurationError(f"{found.place}: {str(error).removeprefix('errors: ')}") from None
    return named


def _pair(mapped: Any) -> Any:
    return tuple(mapped) if isinstance(mapped, list) else mapped


def _listeners(found: Found) -> tuple[Callable[[events.Event], object], ...]:
    listeners = found.value
    if callable(listeners) or isinstance(listeners, str) or not isinstance(listeners, Iterable):
        raise ConfigurationError(f"{found.place}: {listeners!r} must be a list of callables")
    if not found.in_code:
        listeners = [_made(imported(found.place, name)) for name in listeners]
    listeners = tuple(listeners)
    for listener in listeners:
        if not callable(listener):
            raise ConfigurationError(f"{found.place}: {listener!r} is not callable")
    return listeners


def _made(listener: Any) -> Any:
    return listener() if isinstance(listener, type) else listener


def _at_least(found: Found, least: int, unit: str) -> int:
    value = found.value
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{found.place}: {value!r} must be at least {least}{unit}")
    return value


def _either(found: Found) -> bool:
    if type(found.value) is not bool:
        raise ConfigurationError(f"{found.place}: {found.value!r} must be true or false")
    return found.value


def _length(found: Found) -> timedelta:
    """Return a duration greater than zero; raises ConfigurationError."""
    try:
        length = read_duration(found.value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{found.place}: {found.value!r} {error}") from None
    if not length:
        raise ConfigurationError(f"{found.place}: {found.value!r} must be greater than zero")
    return length


def _retention(found: Found) -> Retention:
    told = found.value
    if told is None or isinstance(told, Retention):
        return told or Retention()
    if found.in_code:
        raise ConfigurationError(f"retention: {told!r} is not a Retention")
    try:
        return _retention_of(told)
    except ConfigurationError as error:
        raise ConfigurationError(f"{found.place}: {str(error).removeprefix('retention: ')}") from None


def _retention_of(told: Any) -> Retention:
    if not isinstance(told, Mapping):
        raise ConfigurationError(f"{told!r} must be a table of {', '.join(_LIMITS)}")
    for name in told:
        if name not in _LIMITS:
            raise ConfigurationError(f"{name}: is not one of {', '.join(_LIMITS)}")
    queues = told.get("queues", {})
    if not isinstance(queues, Mapping):
        raise ConfigurationError(f"queues: {queues!r} must be a table of max_age and max_count by queue")
    return Retention(**{**told, "queues": {queue: _retention_of(own) for queue, own in queues.items()}})
