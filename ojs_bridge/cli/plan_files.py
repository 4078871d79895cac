"""A plan's policies in a TOML file, as `install(..., policies="FILE.toml")` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config.policies import load, read_toml
from ..engine.layers import NUMBERS
from ..errors import ConfigurationError
from ..migration.plan import Planned
from ..rules.policy import AnyPartial, RetryPolicy, said_by
from .printing import counted, plain

_WAITS = ("initial_interval", "max_interval", "backoff_strategy", "backoff_coefficient", "jitter")


def check_path(file: str) -> None:
    """Raise ConfigurationError for a file that cannot take a plan, or that cannot be read."""
    if not file.endswith(".toml"):
        raise ConfigurationError(f"write: {file!r} must end in .toml")
    if Path(file).exists():
        load(file, "write")


def write(file: str, app: str, found: Sequence[Planned]) -> str:
    """Write the policies of a plan to a file, and return what was done, in words.

    What is in the file stays as it is, comments, too: the tasks that no pattern in it names are added at its
    end. Raises ConfigurationError for a file that cannot take them, and OSError.
    """
    path = Path(file)
    if not path.exists():
        path.write_text("".join(f"{line}\n" for line in _new(app, found)), encoding="utf-8")
        return f"written to {file}"
    there = load(file, "write")
    new = [one for one in found if one.policy is not None and there.of(one.name) is None]
    lines = [line for one in new for line in _table(one)]
    old = path.read_text(encoding="utf-8")
    text = old + "\n" * (not old.endswith("\n")) + "".join(f"{line}\n" for line in lines)
    try:
        read_toml(text)
    except ValueError as error:
        raise ConfigurationError(f"write: {file!r} cannot take tables at its end: {error}") from None
    path.write_text(text, encoding="utf-8")
    count = counted(len(new), "task", "tasks")
    return f"{count} added to {file}, and what was in it stays as it was: --diff shows what differs"


def differences(file: str, found: Sequence[Planned], *, whole: bool = True) -> Iterator[str]:
    """Yield the differences between a file of policies and a plan, task by task.

    A pattern that names no task is a difference, too, if the plan is of the `whole` fleet.
    """
    there = load(file, "diff")
    if whole:
        try:
            there.check([one.name for one in found], "task")
        except ConfigurationError as error:
            yield plain(str(error))
    for one in found:
        layers = there.of(one.name)
        if one.policy is None:
            continue
        if layers is None:
            yield f"{plain(one.name)}: the file does not name it"
        else:
            yield from (f"{plain(one.name)}: {text}" for text in _unlike(layers, one.policy))
            said = there.retry_on(one.name)
            if one.retry_on and not (said and said.is_asked):
                yield f"{plain(one.name)}: retry_on is not {one.retry_on!r} in the file"


def _unlike(layers: Sequence[AnyPartial], planned: AnyPartial) -> Iterator[str]:
    """Yield the fields that differ: the plan's own fields, and the waits of a task that is retried."""
    if not planned:
        named = {name for layer in layers for name in said_by(layer)} & NUMBERS
        yield from (
            f"{name} is set in the file, and the plan leaves it to the task" for name in sorted(named)
        )
        return
    said, wanted = RetryPolicy.merge(*layers).to_ojs(), RetryPolicy.merge(planned)
    names = {*wanted.to_ojs(only=planned), *(_WAITS if wanted.runs > 1 else ())}
    for name, value in wanted.to_ojs().items():
        if name in names and said[name] != value:
            yield f"{name} is {json.dumps(said[name])} in the file, and the plan says {json.dumps(value)}"


def _new(app: str, found: Sequence[Planned]) -> Iterator[str]:
    yield f"# Written by `ojs-bridge plan {plain(app)}`: the retry policies nearest to what each task does."
    yield '# install(app, bridge, policies="this file") moves these tasks, and leaves the others native.'
    yield "# install(app, bridge), without a file, moves all tasks with their native numbers."
    yield "# Where a table sets numbers, a retry has the arguments that were sent, unchanged."
    for one in found:
        yield from _table(one)
    if all(one.policy is None for one in found):
        yield from ("", "[policies]  # It has no task, and so no task is moved.")


def _table(one: Planned) -> Iterator[str]:
    yield ""
    if one.unreadable:
        yield f"# {plain(one.name)} could not be read: {plain(one.unreadable)}"
    if one.policy is None:
        yield f"# {plain(one.name)} is left out, and stays native: what it does is not known:"
    yield from (f"# not known: {plain(str(found))}" for found in one.open)
    if one.policy is None:
        return
    yield from (f"# differs: {plain(text)}" for text in one.differences)
    yield from (f"# {plain(hazard.name)}: {plain(hazard.text)}" for hazard in one.hazards)
    if not one.entry:
        yield "# its own numbers: it waits as its code says; max_attempts would cap these waits"
    yield f"[policies.{_string(one.name)}]"
    yield from (f"{field} = {_value(value)}" for field, value in one.entry.items())


def _value(value: object) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _string(text: str) -> str:
    """Return a TOML basic string: as in JSON, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
