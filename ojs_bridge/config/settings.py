"""The settings of a bridge and of an `install`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

from ..engine import events
from ..engine.heartbeat import SUSPICION
from ..engine.layers import imported
from ..engine.redaction import Redaction, Redactor
from ..engine.storage_retry import INSISTING, POLLING, StorageRetry
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..operations import webhooks
from ..operations.replaying import ReplayRule, checked
from ..operations.retention import Retention
from ..operations.webhooks import Webhook
from ..rules.breaker import Breaker
from ..rules.budget import Budget
from ..rules.dependencies import Dependencies, Dependency
from ..rules.failures import Errors
from ..rules.job import MAX_HEADER, MIN_HEADER_BUDGET, MIN_HISTORY
from ..rules.notations import duration_at, rate_at
from ..rules.policy import LARGEST, AnyPartial, RetryPolicy
from ..store import PATIENCE_SECONDS, Store, open_store, without_password
from .named_errors import named_errors
from .policies import Policies, PoliciesOrFile, load
from .sources import Given, layered

Made = TypeVar("Made", Retention, StorageRetry)
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one bridge."""

    store: Store | None
    retry: AnyPartial | None
    errors: Errors
    listeners: tuple[Callable[[events.Event], object], ...]
    webhooks: tuple[Webhook, ...]
    dependencies: tuple[Dependency, ...]
    history: int
    header_budget: int
    reservation: timedelta
    park_after: timedelta
    park_delays: bool
    release_rate: float | None
    outbox: bool
    fail_open: bool
    settle_behind: bool
    out_of_reach: timedelta
    retention: Retention
    redact: Redaction | None
    replay_rules: tuple[ReplayRule, ...]
    storage_retry: StorageRetry
    polling_retry: StorageRetry


def settings_of(**given: Any) -> Settings:
    """Return a bridge's settings: those given that are not None, and the others from their sources.

    Raises ConfigurationError and InvalidRetryPolicy.
    """
    setting = layered(**given)
    store = _store(setting["store"], setting["namespace"].value, _length(setting["reservation"]))
    return Settings(
        store=store,
        retry=_retry(setting["retry"]),
        errors=_errors(setting["errors"]),
        listeners=_listeners(setting["listeners"]),
        webhooks=_webhooks(setting["webhooks"], store),
        dependencies=_dependencies(setting["dependencies"], store),
        history=_at_least(setting["history"], MIN_HISTORY, " (spec section 10.1)"),
        header_budget=_at_least(setting["header_budget"], MIN_HEADER_BUDGET, " bytes", MAX_HEADER),
        reservation=_length(setting["reservation"]),
        park_after=_length(setting["park_after"]),
        park_delays=_with(setting["park_delays"], store is not None, "a store", _either),
        release_rate=_with(setting["release_rate"], store is not None, "a store", _rate),
        outbox=check_outbox(setting["outbox"], store),
        fail_open=_either(setting["fail_open"]),
        settle_behind=_either(setting["settle_behind"]),
        out_of_reach=_out_of_reach(setting["out_of_reach"]),
        retention=_made(Retention(), setting["retention"], _retention_of),
        redact=_redaction(setting["redact"]),
        replay_rules=_replay_rules(setting["replay_rules"]),
        storage_retry=_made(INSISTING, setting["storage_retry"], partial(_changed, INSISTING)),
        polling_retry=_made(POLLING, setting["polling_retry"], partial(_changed, POLLING)),
    )


def the_retry() -> AnyPartial | None:
    """Return the default policy from the sources outside of code."""
    return _retry(layered()["retry"])


def the_policies(policies: PoliciesOrFile | None) -> Policies:
    """Return the policies of an `install`; raises InvalidRetryPolicy, ConfigurationError."""
    given = layered(policies=policies)["policies"]
    match given.value:
        case str() | os.PathLike() as path:
            return load(path, given.place)
        case None | Mapping() as named:
            return Policies(named, place=given.place.removesuffix("policies"))
    raise ConfigurationError(
        f"{given.place}: {given.value!r} must map names to partial policies, or be a file of them"
    )


def check_outbox(given: Given, store: Store | None) -> bool:
    """Return whether jobs are sent with their transactions; raises ConfigurationError where none can be."""
    is_sql = getattr(store, "backend", "") == "sql"
    return _with(given, is_sql, "a store in the database of the transactions", _either)


def fetches_reliably() -> bool:
    """Return whether a Celery worker uses the bridge's reliable way to take messages from Redis."""
    return _either(layered()["reliable_fetch"])


def _store(given: Given, namespace: str, reservation: timedelta) -> Store | None:
    store: Any = given.value
    if isinstance(store, str):
        # The longest wait for a store is less than a reservation lasts.
        patience = min(max(reservation.total_seconds() / 3, 2.0), PATIENCE_SECONDS)
        return open_store(store, namespace, patience=patience)
    # A store may delegate with __getattr__, which isinstance does not see on Python 3.12.
    if store is None or all(
        hasattr(store, name) for name in ("letters", "parked", "reservations", "documents")
    ):
        return cast("Store | None", store)
    shown = without_password(repr(store))
    raise ConfigurationError(f"{given.place}: {shown} is neither a URL such as sqlite:///ojs.db nor a store")


def _retry(given: Given) -> AnyPartial | None:
    partial: AnyPartial | None = given.value
    try:
        RetryPolicy.merge(partial)
    except InvalidRetryPolicy as error:
        raise error if given.in_code else error.under(given.place) from None
    return partial


def _errors(given: Given) -> Errors:
    errors = given.value
    if not isinstance(errors, Mapping):
        raise ConfigurationError(f"{given.place}: {errors!r} must map exception classes to error types")
    return dict(errors) if given.in_code else named_errors(given.place, errors)


def _listeners(given: Given) -> tuple[Callable[[events.Event], object], ...]:
    listeners = given.value
    if callable(listeners) or isinstance(listeners, str) or not isinstance(listeners, Iterable):
        raise ConfigurationError(f"{given.place}: {listeners!r} must be a list of callables")
    if not given.in_code:
        named = [imported(given.place, name) for name in listeners]
        listeners = [one() if isinstance(one, type) else one for one in named]
    listeners = tuple(listeners)
    for listener in listeners:
        if not callable(listener):
            raise ConfigurationError(f"{given.place}: {listener!r} is not callable")
    return listeners


def _webhooks(given: Given, store: Store | None) -> tuple[Webhook, ...]:
    said = given.value
    with _at(given.place, "webhooks: "):
        if not given.in_code and isinstance(said, list | tuple):
            said = [_webhook(one) for one in said]
        made = webhooks.checked(said)
        if made and store is None:
            raise ConfigurationError("they need a store, such as postgresql://host/shop")
        return made


def _webhook(said: Any) -> Any:
    if isinstance(said, Webhook | str):
        return said
    return Webhook(**{"url": "", **_table_of(Webhook, said)})


def _dependencies(given: Given, store: Store | None) -> tuple[Dependency, ...]:
    said = given.value
    with _at(given.place, "dependencies: "):
        if not given.in_code and isinstance(said, list | tuple):
            said = [one if isinstance(one, Dependency) else _dependency(one) for one in said]
        dependencies = Dependencies(said)
        if store is None and dependencies.limited:
            name = dependencies.limited[0].name
            raise ConfigurationError(f"{name!r}: its rate or concurrency needs a store, which workers share")
        return tuple(dependencies.by_name.values())


def _dependency(table: Any) -> Dependency:
    said = {"name": "", **_table_of(Dependency, table)}
    if isinstance(breaker := said.get("breaker"), Mapping):
        said["breaker"] = Breaker(**_table_of(Breaker, breaker))
    if isinstance(budget := said.get("budget"), Mapping):
        said["budget"] = Budget(**{"share": None, **_table_of(Budget, budget)})
    return Dependency(**said)


def _at_least(given: Given, least: int, unit: str, most: int = LARGEST) -> int:
    value = given.value
    if type(value) is not int or value < least:
        raise ConfigurationError(f"{given.place}: {value!r} must be at least {least}{unit}")
    if value > most:
        raise ConfigurationError(f"{given.place}: {value!r:.100} must be at most {most}{unit}")
    return value


def _either(given: Given) -> bool:
    if type(given.value) is not bool:
        raise ConfigurationError(f"{given.place}: {given.value!r} must be true or false")
    return given.value


def _rate(given: Given) -> float | None:
    return None if given.value is None else rate_at(given.place, given.value)


def _with(given: Given, has_it: bool, what: str, read: Callable[[Given], Value]) -> Value:
    said = read(given)
    if said and not has_it:
        raise ConfigurationError(
            f"{given.place}: {given.value!r} needs {what}, such as postgresql://host/shop"
        )
    return said


def _length(given: Given) -> timedelta:
    return duration_at(given.place, given.value)


def _out_of_reach(given: Given) -> timedelta:
    length = _length(given)
    if length < SUSPICION:
        # A worker trusts its reservations for so long, whatever another one's settings are.
        raise ConfigurationError(f"{given.place}: {given.value!r} must be at least PT4S")
    return length


def _redaction(given: Given) -> Redaction | None:
    redaction = given.value
    if isinstance(redaction, str) and not given.in_code:
        redaction = imported(given.place, redaction)
    with _at(given.place, "redact: "):
        Redactor(redaction)
    return cast("Redaction | None", redaction)


def _replay_rules(given: Given) -> tuple[ReplayRule, ...]:
    rules = given.value
    with _at(given.place, "replay_rules: "):
        if not given.in_code and isinstance(rules, list | tuple):
            rules = [
                rule
                if isinstance(rule, ReplayRule)
                else ReplayRule(**{"name": "", **_table_of(ReplayRule, rule)})
                for rule in rules
            ]
        return checked(rules)


def _made(default: Made, given: Given, read: Callable[[Any], Made]) -> Made:
    """Return the object that was given, or is read from a table; or the default."""
    value, kind = given.value, type(default)
    if value is None or isinstance(value, kind):
        return value or default
    if given.in_code:
        raise ConfigurationError(f"{given.place}: {value!r} is not a {kind.__name__}")
    with _at(given.place, "retention: ", "StorageRetry: "):
        return read(value)


def _changed(default: StorageRetry, table: Any) -> StorageRetry:
    return replace(default, **_table_of(StorageRetry, table))


def _retention_of(table: Any) -> Retention:
    limits = _table_of(Retention, table)
    queues = limits.get("queues", {})
    if not isinstance(queues, Mapping):
        raise ConfigurationError(f"queues: {queues!r} must be a table of max_age and max_count by queue")
    return Retention(**{**limits, "queues": {queue: _retention_of(own) for queue, own in queues.items()}})


def _table_of(kind: Any, table: object) -> Mapping[str, Any]:
    """Return the fields of an object in a table; raises ConfigurationError for any other."""
    names = [field.name for field in fields(kind)]
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{table!r} must be a table of {', '.join(names)}")
    for name in table:
        if name not in names:
            raise ConfigurationError(f"{name}: is not one of {', '.join(names)}")
    return table


@contextmanager
def _at(place: str, *beginnings: str) -> Iterator[None]:
    """Name the place of a setting in an error, instead of what the error begins with."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for beginning in beginnings:
            text = text.removeprefix(beginning)
        raise ConfigurationError(f"{place}: {text}") from None
