"""Policies in TOML or JSON files: one policy, or partial policies by name pattern with a default."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ConfigurationError, InvalidRetryPolicy
from ..rules.patterns import check_errors
from ..rules.policy import RetryPolicy
from .policies import Policies, PolicyEntry, read_entry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("ojs_bridge")

#: The `policies` of an `install`: partial policies by name pattern, or the path of a file of them.
PoliciesOrFile: TypeAlias = "Mapping[str, PolicyEntry] | str | os.PathLike[str]"

_TABLES = {"default", "policies"}


@dataclass(frozen=True, slots=True)
class Named:
    """A policy of a file, merged with the defaults; None, with the problems, if it is invalid."""

    name: str
    policy: RetryPolicy | None
    problems: tuple[str, ...] = ()


def read_file(file: str) -> list[Named]:
    """Return the policies of a file, each over the file's default, or none for an empty file; raises OSError.

    A file that cannot be read as TOML or JSON policies gives one invalid policy.
    """
    try:
        return _each(_parse(file))
    except (ValueError, RecursionError) as error:
        return [Named(file, None, (str(error),))]


def load(file: str | os.PathLike[str], place: str = "policies") -> Policies:
    """Return the policies of a file, for an `install`; `place` is the setting that named the file.

    Each is merged over the file's `default`. Without a table `policies` the default is for every name. A file
    with nothing in it, or with comments alone, names no task, and no task is taken.

    Raises InvalidRetryPolicy, with one line for each problem that `ojs-bridge policy check` finds, and
    ConfigurationError for a file that cannot be read.
    """
    path = os.fspath(file)
    try:
        told = _parse(path)
    except OSError as error:
        raise ConfigurationError(f"{place}: {path!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: {path!r} {error}") from None
    problems = [f"{path}: {named.name}: {line}" for named in _each(told) for line in named.problems]
    if problems:
        raise InvalidRetryPolicy(problems)
    if not told:
        logger.warning("%s: %r names no task, and no task is taken", place, path)
        return Policies({})
    if not _TABLES & set(told):
        told = {"default": told}
    return Policies(told.get("policies"), default=told.get("default"), place=f"{path}: ")


def _parse(file: str) -> Mapping[str, Any]:
    path = Path(file)
    if path.suffix not in (".toml", ".json"):
        raise ValueError("must end in .toml or .json")
    text = path.read_bytes().decode("utf-8")
    try:
        told = read_toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(told, Mapping):
        raise ValueError("must hold an object: a policy, or `default` and `policies`")
    return told


def read_toml(text: str) -> Mapping[str, Any]:
    """Parse a text in TOML; raises ValueError."""
    return tomllib.loads(text)


def _each(told: Mapping[str, Any]) -> list[Named]:
    return [*_tables(told)] if not told or _TABLES & set(told) else [_named("policy", {}, told)]


def _tables(told: Mapping[str, Any]) -> Iterator[Named]:
    for name in sorted(set(told) - _TABLES):
        yield Named(name, None, ("must stand in [default], or in [policies] under its name",))
    default, policies = told.get("default", {}), told.get("policies", {})
    if "default" in told:
        yield _named("default", {}, default)
    if not isinstance(policies, Mapping):
        yield Named("policies", None, ("must be a table of partial policies",))
        return
    valid = default if _named("default", {}, default).policy else {}
    for pattern, partial in policies.items():
        yield _named(f"policies[{pattern!r}]", valid, partial)


def _named(name: str, default: Any, partial: Any) -> Named:
    try:
        policy = RetryPolicy.merge(read_entry(default, name).policy, read_entry(partial, name).policy)
        check_errors(policy)
        return Named(name, policy)
    except InvalidRetryPolicy as error:
        return Named(name, None, error.problems)
    except ConfigurationError as error:
        return Named(name, None, (str(error).removeprefix(f"{name}: "),))
