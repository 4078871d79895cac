"""The sources of settings, in order: code, Django, variables, a TOML table; each is read by its name."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..rules.job import HEADER_BUDGET, MIN_HISTORY
from ..store import without_password
from .policies import MISNAMED, read_toml

logger = logging.getLogger("ojs_bridge")

_PREFIX = "OJS_BRIDGE_"
_PYPROJECT = "pyproject.toml"
_TOKENS = {"OPERATOR_TOKEN", "REPLAYER_TOKEN", "READER_TOKEN", "TOKENS"}
#: The variables that are no settings of a bridge.
_OTHERS = {"APP", "CANARY", "CONFIG", "METRICS_PORT"} | _TOKENS


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
    "webhooks": Setting(_json, ()),
    "dependencies": Setting(_json, ()),
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
