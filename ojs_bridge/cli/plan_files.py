"""A plan's policies in a TOML file, as `install(..., policies="FILE.toml")` reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import ConfigurationError
from ..migration.plan.planned import Planned
from .printing import plain

_GLOB = re.compile(r"([*?[])")


def check_path(file: str) -> None:
    """Raise ConfigurationError for a file that no plan is written to."""
    if not file.endswith(".toml"):
        raise ConfigurationError(f"write: {file!r} must end in .toml")
    if Path(file).exists():
        raise ConfigurationError(f"write: {file!r} is there already, and a plan overwrites nothing")


def write(file: str, app: str, found: Sequence[Planned]) -> None:
    """Write the policies of a plan to a new file; raises OSError, also for one that is there."""
    with Path(file).open("x", encoding="utf-8") as stream:
        stream.writelines(f"{line}\n" for line in _lines(app, found))


def _lines(app: str, found: Iterable[Planned]) -> Iterator[str]:
    yield f"# Written by `ojs-bridge plan {plain(app)}`: the retry policies nearest to what each task does."
    yield '# install(app, bridge, policies="this file") moves these tasks, and leaves the others.'
    for one in found:
        yield ""
        if one.policy is None:
            yield f"# {plain(one.name)} could not be read: {plain(one.unreadable)}"
            continue
        yield from (f"# differs: {plain(text)}" for text in one.differences)
        yield from (f"# {plain(hazard.name)}: {plain(hazard.text)}" for hazard in one.hazards)
        yield f"[policies.{_string(_pattern(one.name))}]"
        yield from (f"{field} = {_value(value)}" for field, value in one.policy.items())


def _pattern(name: str) -> str:
    """Return the pattern that matches a name and no other."""
    return _GLOB.sub(r"[\1]", name)


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _string(text: str) -> str:
    """Return a TOML basic string: as in JSON, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
