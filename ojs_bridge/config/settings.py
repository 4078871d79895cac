"""The settings of a bridge and of an `install`: their sources, in order, and their checks."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from ..engine import events
from ..engine.heartbeat import SUSPICION
from ..engine.layers import imported
from ..engine.redaction import Redaction, Redactor
from ..engine.storage_retry import INSISTING, POLLING, StorageRetry
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..operations.replaying import ReplayRule, checked
from ..operations.retention import Retention
from ..rules.failures import ErrorMap, Errors
from ..rules.job import HEADER_BUDGET, MAX_HEADER, MIN_HEADER_BUDGET, MIN_HISTORY
from ..rules.notations import duration_at, rate_at
from ..rules.policy import LARGEST, AnyPartial, RetryPolicy
from ..store import PATIENCE_SECONDS, Store, open_store, without_password
from .policies import MISNAMED, Policies, PoliciesOrFile, load, read_toml

logger = logging.getLogger("ojs_bridge")

_PREFIX = "OJS_BRIDGE_"
_PYPROJECT = "pyproject.toml"
#: What the jobs of transactions need.
_SQL = "a store in the database of the transactions"
#: The variables that are no settings of a bridge.
_OTHERS = {"APP", "CANARY", "CONFIG", "METRICS_PORT", "OPERATOR_TOKEN", "READER_TOKEN", "TOKENS"}

Made = TypeVar("Made", Retention, StorageRetry)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one bridge."""

    store: Store | None
    retry: AnyPartial | None
    errors: Errors
    listeners: tuple[Callable[[events.Event], object], ...]
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
        history=_at_least(setting["history"], MIN_HISTORY, " (spec section 10.1)"),
        header_budget=_at_least(setting["header_budget"], MIN_HEADER_BUDGET, " bytes", MAX_HEADER),
        reservation=_length(setting["reservation"]),
        park_after=_length(setting["park_after"]),
        park_delays=_with(setting["park_delays"], store is not None, "a store"),
        release_rate=_release_rate(setting["release_rate"], store),
        outbox=_with(setting["outbox"], getattr(store, "backend", "") == "sql", _SQL),
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
    if given.in_code:
        return dict(errors)
    named: dict[Any, Any] = {
        imported(given.place, name): tuple(mapped) if isinstance(mapped, list) else mapped
        for name, mapped in errors.items()
    }
    try:
        ErrorMap(named)
    except ConfigurationError as error:
        raise ConfigurationError(f"{given.place}: {str(error).removeprefix('errors: ')}") from None
    return named


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


def _with(given: Given, has_it: bool, what: str) -> bool:
    said = _either(given)
    if said and not has_it:
        raise ConfigurationError(f"{given.place}: {said!r} needs {what}, such as postgresql://host/shop")
    return said


def _release_rate(given: Given, store: Store | None) -> float | None:
    if given.value is None:
        return None
    if store is None:
        raise ConfigurationError(f"{given.place}: {given.value!r} needs a store, such as sqlite:///ojs.db")
    return rate_at(given.place, given.value)


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


def _as_it_is(_place: str, said: Any) -> Any:
    return said


@dataclass(frozen=True, slots=True)
class Given:
    """A setting as it was given; the `place` of a setting in code is its own name."""

    place: str
    said: Any
    read: Callable[[str, Any], Any] = _as_it_is

    @property
    def in_code(self) -> bool:
        """Whether the setting was given in code, or is the default."""
        return self.place in SETTINGS

    @property
    def value(self) -> Any:
        """The value; raises ConfigurationError for a text that cannot be read."""
        return self.read(self.place, self.said)


@dataclass(frozen=True, slots=True)
class Setting:
    """The reader of a setting from a variable's text, and its default."""

    read: Callable[[str, str], Any] = _as_it_is
    default: Any = None


def layered(**given: Any) -> dict[str, Given]:
    """Return every setting as code gives it; if that is None, as the first other place does; or its default.

    Raises ConfigurationError for an unknown key in Django's settings or in the TOML table.
    """
    defaults = {name: Given(name, setting.default) for name, setting in SETTINGS.items()}
    said = {name: Given(name, value) for name, value in given.items() if value is not None}
    return {**defaults, **_in_toml(), **_in_environment(), **_in_django(), **said}


def _in_django() -> Mapping[str, Given]:
    """Return `OJS_BRIDGE` of Django's settings; Django is not imported if nothing has imported it."""
    conf: Any = sys.modules.get("django.conf")
    if conf is None or not (conf.settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE")):
        return {}
    table = getattr(conf.settings, "OJS_BRIDGE", None)
    return {} if table is None else _table(table, "settings.OJS_BRIDGE")


def _in_environment() -> Mapping[str, Given]:
    settings = {}
    for variable, text in os.environ.items():
        if not variable.startswith(_PREFIX) or not text:
            continue
        name = variable.removeprefix(_PREFIX)
        if name.lower() in MISNAMED - SETTINGS.keys():
            raise ConfigurationError(f"{variable}: a policy has the name {_PREFIX}RETRY, in JSON")
        if name.isupper() and name.lower() in SETTINGS:
            settings[name.lower()] = Given(variable, text, SETTINGS[name.lower()].read)
        elif name not in _OTHERS:
            _warn_of(variable)
    return settings


@functools.cache
def _warn_of(variable: str) -> None:
    """Warn once of a variable that is misspelt, or meant for a newer release."""
    logger.warning("%s is not a variable that ojs-bridge knows: it has no effect", variable)


def _in_toml() -> Mapping[str, Given]:
    """Return the keys of the file that OJS_BRIDGE_CONFIG names, or the table of a pyproject.toml."""
    named = os.environ.get("OJS_BRIDGE_CONFIG")
    path = Path(named or _PYPROJECT)
    if path.name != _PYPROJECT:
        return _table(_read(path), str(path))
    table = _own_table(path, needed=bool(named))
    return {} if table is None else _table(table, f"{path}: tool.ojs-bridge")


def _own_table(path: Path, *, needed: bool) -> Any:
    """Return `[tool.ojs-bridge]` of a pyproject.toml, or None; a file without that table may be damaged."""
    try:
        content = _read(path)
    except ConfigurationError:
        if needed or _mentions_us(path):
            raise
        return None
    tools = content.get("tool")
    return tools.get("ojs-bridge") if isinstance(tools, Mapping) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_toml(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"OJS_BRIDGE_CONFIG: {str(path)!r} cannot be read: {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: is not TOML: {error}") from None


def _mentions_us(path: Path) -> bool:
    try:
        return b"[tool.ojs-bridge" in path.read_bytes()
    except OSError:
        return False


def _table(table: object, place: str) -> dict[str, Given]:
    """Return the settings of a table; raises ConfigurationError for an unknown key."""
    if not isinstance(table, Mapping):
        shown = without_password(repr(table))
        raise ConfigurationError(f"{place}: {shown} must be a table of settings")
    for key in table:
        if key not in SETTINGS:
            hint = f"; a policy has the name retry: {{{key} = ...}}" if key in MISNAMED else ""
            raise ConfigurationError(
                f"{place}: {key}: is not a setting; there are {', '.join(SETTINGS)}{hint}"
            )
    return {key: Given(f"{place}: {key}", value) for key, value in table.items() if value is not None}


def _integer(place: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{place}: {text!r} must be an integer") from None


def _boolean(place: str, text: str) -> bool:
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if value is None:
        raise ConfigurationError(f"{place}: {text!r} must be true, false, 1 or 0")
    return value


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: {text!r} is not JSON: {error}") from None


#: The settings by name: as an argument in code, as a key in a table, and in capitals as a variable.
SETTINGS = {
    "store": Setting(),
    "namespace": Setting(default="ojs"),
    "retry": Setting(_json),
    "policies": Setting(),
    "errors": Setting(_json, {}),
    "listeners": Setting(_json, ()),
    "history": Setting(_integer, MIN_HISTORY),
    "header_budget": Setting(_integer, HEADER_BUDGET),
    "reservation": Setting(default="PT1M"),
    "park_after": Setting(default="PT1M"),
    "park_delays": Setting(_boolean, default=False),
    "release_rate": Setting(),
    "outbox": Setting(_boolean, default=False),
    "fail_open": Setting(_boolean, default=False),
    "settle_behind": Setting(_boolean, default=False),
    "out_of_reach": Setting(default="PT4S"),
    "retention": Setting(_json),
    "redact": Setting(_json),
    "replay_rules": Setting(_json, ()),
    "storage_retry": Setting(_json),
    "polling_retry": Setting(_json),
    "reliable_fetch": Setting(_boolean, default=True),
}
