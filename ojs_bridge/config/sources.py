"""The sources of settings, in order: code, Django's settings, OJS_BRIDGE_* variables, a TOML table."""

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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("ojs_bridge")

_PREFIX = "OJS_BRIDGE_"
_PYPROJECT = "pyproject.toml"
#: The variables that are no settings of a bridge.
_OTHERS = {"APP", "CANARY", "CONFIG", "METRICS_PORT", "OPERATOR_TOKEN", "READER_TOKEN", "TOKENS"}


@dataclass(frozen=True, slots=True)
class Found:
    """A setting as it was found; the `place` of a setting in code is its own name."""

    place: str
    said: Any
    read: Callable[[str, Any], Any] = lambda _place, said: said

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

    read: Callable[[str, str], Any]
    default: Any = None


def layered(**given: Any) -> dict[str, Found]:
    """Return every setting: as given in code, if that is not None; or as found; or its default.

    Raises ConfigurationError for an unknown key in Django's settings or in the TOML table.
    """
    found = {name: Found(name, setting.default) for name, setting in SETTINGS.items()}
    said = {name: Found(name, value) for name, value in given.items() if value is not None}
    return {**found, **_in_toml(), **_in_environment(), **_in_django(), **said}


def _in_django() -> Mapping[str, Found]:
    """Return `OJS_BRIDGE` of Django's settings; Django is not imported if nothing has imported it."""
    conf: Any = sys.modules.get("django.conf")
    if conf is None or not (conf.settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE")):
        return {}
    told = getattr(conf.settings, "OJS_BRIDGE", None)
    return {} if told is None else _table(told, "settings.OJS_BRIDGE")


def _in_environment() -> Mapping[str, Found]:
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith(_PREFIX) or not text:
            continue
        name = variable.removeprefix(_PREFIX)
        if name.isupper() and name.lower() in SETTINGS:
            found[name.lower()] = Found(variable, text, SETTINGS[name.lower()].read)
        elif name not in _OTHERS:
            _warn_of(variable)
    return found


@functools.cache
def _warn_of(variable: str) -> None:
    """Warn once of a variable that is misspelt, or meant for a newer release."""
    logger.warning("%s is not a variable that ojs-bridge knows: it has no effect", variable)


def _in_toml() -> Mapping[str, Found]:
    """Return the keys of the file that OJS_BRIDGE_CONFIG names, or the table of a pyproject.toml."""
    named = os.environ.get("OJS_BRIDGE_CONFIG")
    path = Path(named or _PYPROJECT)
    if path.name != _PYPROJECT:
        return _table(_read(path), str(path))
    told = _own_table(path, needed=bool(named))
    return {} if told is None else _table(told, f"{path}: tool.ojs-bridge")


def _own_table(path: Path, *, needed: bool) -> Any:
    """Return `[tool.ojs-bridge]` of a pyproject.toml, or None; a file without that table may be damaged."""
    try:
        told = _read(path)
    except ConfigurationError:
        if needed or _mentions_us(path):
            raise
        return None
    tools = told.get("tool")
    return tools.get("ojs-bridge") if isinstance(tools, Mapping) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
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


def _table(told: object, place: str) -> dict[str, Found]:
    """Return the settings of a table; raises ConfigurationError for an unknown key."""
    if not isinstance(told, Mapping):
        shown = without_password(repr(told))
        raise ConfigurationError(f"{place}: {shown} must be a table of settings")
    for key in told:
        if key not in SETTINGS:
            raise ConfigurationError(f"{place}: {key}: is not a setting; there are {', '.join(SETTINGS)}")
    return {key: Found(f"{place}: {key}", value) for key, value in told.items() if value is not None}


def _text(_place: str, text: str) -> str:
    return text


def _integer(place: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{place}: {text!r} must be an integer") from None


def _boolean(place: str, text: str) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if found is None:
        raise ConfigurationError(f"{place}: {text!r} must be true, false, 1 or 0")
    return found


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: {text!r} is not JSON: {error}") from None


#: The settings by name: as an argument in code, as a key in a table, and in capitals as a variable.
SETTINGS = {
    "store": Setting(_text),
    "namespace": Setting(_text, "ojs"),
    "retry": Setting(_json),
    "policies": Setting(_text),
    "errors": Setting(_json, {}),
    "listeners": Setting(_json, ()),
    "history": Setting(_integer, MIN_HISTORY),
    "header_budget": Setting(_integer, HEADER_BUDGET),
    "reservation": Setting(_text, "PT1M"),
    "park_after": Setting(_text, "PT1M"),
    "fail_open": Setting(_boolean, default=False),
    "retention": Setting(_json),
    "reliable_fetch": Setting(_boolean, default=True),
}
