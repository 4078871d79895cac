"""The `policies` of an install: partial policies by name pattern, from code or from a TOML or JSON file."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..engine.layers import Layers, RetryOn, RetryOnLike
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..rules.notations import check_pattern, matches
from ..rules.policy import AnyPartial, PolicyFields, RetryPolicy, check_errors, check_partial

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("ojs_bridge")

_RETRY_ON, _ACKS_LATE = "retry_on", "acks_late"
#: The most bytes of a file, and the most parts of a key: the time to read it grows with their square.
_MAX_FILE, _MAX_PARTS = 1024 * 1024, 32
_MANY_PARTS = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]{{0,9}}\.[ \t]{{0,9}}){{{_MAX_PARTS}}}"""
)
_TABLES = {"default", "policies"}


#: The fields of a policy, and names under which a reader would look for one.
FIELDS = frozenset(RetryPolicy.model_fields)
_NAMES = ("retry", "policy", "policies", "retry_policy", "ojs_policy", "ojs_retry_policy")
#: What an adapter's `ojs_retry` may be called by mistake.
MISNAMED = FIELDS.union(_NAMES)


def is_policy(value: object) -> bool:
    """Return whether a value looks like a policy: it has at least one field."""
    return isinstance(value, RetryPolicy) or (isinstance(value, Mapping) and not FIELDS.isdisjoint(value))


class EntryFields(PolicyFields, total=False):
    """The fields of an entry of `policies`, for a type checker."""

    retry_on: RetryOnLike | None
    acks_late: bool | None


PolicyEntry: TypeAlias = "EntryFields | RetryPolicy"
"""An entry of `policies`: a partial policy, which may have a `retry_on` among its fields.

For Celery it may also have `acks_late`, the option of the tasks for their jobs under the bridge.
"""

#: The `policies` of an `install`: partial policies by name pattern, or the path of a file of them.
PoliciesOrFile: TypeAlias = "Mapping[str, PolicyEntry] | str | os.PathLike[str]"


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of `policies`: a partial policy, and its `retry_on` and `acks_late`, if there are any."""

    policy: AnyPartial
    retry_on: RetryOn | None = None
    acks_late: bool | None = None


class Installed(NamedTuple):
    """All that an `install` says of a name: partial policies, of which a later one wins, and the rest."""

    policies: Sequence[AnyPartial] = ()
    retry_on: RetryOn | None = None
    acks_late: bool | None = None


def read_entry(entry: AnyPartial, place: str) -> Entry:
    """Read an entry; raises ConfigurationError for an invalid `retry_on` or `acks_late`, after its `place`.

    The partial policy is not checked.
    """
    if not isinstance(entry, Mapping):
        return Entry(entry)
    said, late = entry.get(_RETRY_ON), entry.get(_ACKS_LATE)
    if not (late is None or isinstance(late, bool)):
        raise ConfigurationError(f"{place}: {_ACKS_LATE}: {late!r:.100} must be a boolean")
    partial = {name: value for name, value in entry.items() if name not in (_RETRY_ON, _ACKS_LATE)}
    return Entry(partial, None if said is None else RetryOn(said, f"{place}: {_RETRY_ON}"), late)


def _checked(entry: AnyPartial, place: str) -> Entry:
    read = read_entry(entry, place)
    try:
        check_partial(read.policy)
        check_errors(read.policy)
    except InvalidRetryPolicy as error:
        raise error.under(place) from None
    return read


class Policies:
    """The `policies` of an `install`: name patterns, such as `billing.*`, and partial policies.

    An entry may also have a `retry_on`. If several patterns match a name, their policies are merged in order
    over the `default`. Without `policies` every name is taken over. Errors begin with the `place`. Raises
    InvalidRetryPolicy for an invalid partial policy, and ConfigurationError for an invalid `retry_on`.
    """

    def __init__(
        self, policies: Mapping[str, AnyPartial] | None, *, default: AnyPartial | None = None, place: str = ""
    ) -> None:
        self._place = place
        self._default = [] if default is None else [_checked(default, f"{place}default")]
        self._policies = None if policies is None else dict(self._entries_of(policies))
        #: Whether there is any entry.
        self.is_named = bool(self._entries())

    def of(self, name: str) -> Installed | None:
        """Return all that the policies say of a name; None if the name stays with its framework."""
        named = [entry for pattern, entry in (self._policies or {}).items() if matches(name, pattern)]
        if not named and self._policies is not None:
            return None
        entries = [*self._default, *named]
        retry_on, acks_late = None, None
        for entry in entries:
            retry_on = entry.retry_on or retry_on
            acks_late = acks_late if entry.acks_late is None else entry.acks_late
        return Installed([entry.policy for entry in entries], retry_on, acks_late)

    def layers(
        self, kind: str, name: str, native: Layers, own: AnyPartial | None, retry_on: RetryOnLike | None
    ) -> Layers:
        """Return all that is said of a task: its native options, `install`'s and its own, in this order.

        The `kind` is what its framework calls a task. Raises ConfigurationError for an invalid `retry_on`.
        """
        installed = self.of(name) or Installed()
        said = installed.retry_on if retry_on is None else RetryOn(retry_on, f"{kind} {name}: ojs_retry_on")
        return replace(native, install=installed.policies, task=own, retry_on=said or native.retry_on)

    @property
    def acks_late(self) -> bool:
        """Whether any entry says how its tasks are acknowledged."""
        return any(entry.acks_late is not None for entry in self._entries())

    def _entries(self) -> Sequence[Entry]:
        return [*self._default, *(self._policies or {}).values()]

    def _entries_of(self, policies: Mapping[str, AnyPartial]) -> Iterator[tuple[str, Entry]]:
        for pattern, entry in policies.items():
            try:
                check_pattern(f"{self._place}policies", pattern)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
            yield pattern, _checked(entry, f"{self._place}policies[{pattern!r}]")

    def check(self, names: Iterable[str], what: str) -> None:
        """Raise ConfigurationError for a pattern that matches no name; `what` is a task or an actor.

        And for an exception class of `retry_on` that cannot be imported.
        """
        known = list(names)
        for entry in self._entries():
            if entry.retry_on:
                entry.retry_on.resolve()
        for pattern in self._policies or ():
            if not any(matches(name, pattern) for name in known):
                raise ConfigurationError(f"{self._place}policies[{pattern!r}] names no {what}")


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
        return _each(policy_in(_parse(file)))
    except (ValueError, RecursionError) as error:
        return [Named(file, None, (str(error),))]


def policy_in(content: Any) -> Any:
    """Return the policy of `{"retry": ...}` or of a job's document, which has it among its options."""
    options = content.get("options", content) if isinstance(content, Mapping) else None
    retry = options.get("retry") if isinstance(options, Mapping) else None
    return retry if isinstance(retry, Mapping) else content


def load(file: str | os.PathLike[str], place: str = "policies") -> Policies:
    """Return the policies of a file, for an `install`; `place` is the setting that named the file.

    Each is merged over the file's `default`. Without a table `policies` the default is for every name. A file
    with nothing in it, or with comments alone, names no task, and no task is taken.

    Raises InvalidRetryPolicy, with one line for each problem that `ojs-bridge policy check` finds, and
    ConfigurationError for a file that cannot be read.
    """
    path = os.fspath(file)
    try:
        content = _parse(path)
    except OSError as error:
        raise ConfigurationError(f"{place}: {path!r} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: {path!r} {error}") from None
    problems = [f"{path}: {named.name}: {line}" for named in _each(content) for line in named.problems]
    if problems:
        raise InvalidRetryPolicy(problems)
    if not content:
        logger.warning("%s: %r names no task, and no task is taken", place, path)
        return Policies({})
    if not _TABLES & set(content):
        content = {"default": content}
    return Policies(content.get("policies"), default=content.get("default"), place=f"{path}: ")


def _parse(file: str) -> Mapping[str, Any]:
    path = Path(file)
    if path.suffix not in (".toml", ".json"):
        raise ValueError("must end in .toml or .json")
    with path.open("rb") as opened:
        raw = opened.read(_MAX_FILE + 1)
    if len(raw) > _MAX_FILE:
        raise ValueError(f"must have at most {_MAX_FILE:,} bytes")
    text = raw.decode("utf-8")
    try:
        content = read_toml(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError("must hold an object: a policy, or `default` and `policies`")
    return content


def read_toml(text: str) -> Mapping[str, Any]:
    """Parse a text in TOML; raises ValueError."""
    if many := _MANY_PARTS.search(text):
        raise ValueError(f"{many[0]:.40}…: a key must have at most {_MAX_PARTS} parts")
    return tomllib.loads(text)


def _each(content: Mapping[str, Any]) -> list[Named]:
    return [*_tables(content)] if not content or _TABLES & set(content) else [_named("policy", {}, content)]


def _tables(content: Mapping[str, Any]) -> Iterator[Named]:
    for name in sorted(set(content) - _TABLES):
        yield Named(name, None, ("must stand in [default], or in [policies] under its name",))
    default, policies = content.get("default", {}), content.get("policies", {})
    if "default" in content:
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
