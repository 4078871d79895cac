"""Runs the command line: within this process, which is quick, and as a process of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ojs_bridge.cli.program import program
from tests.forking import ended

#: The variables of an operator's environment or terminal, on which no test shall depend.
_THEIRS = ("COLUMNS", "OJS_BRIDGE_STORE", "OJS_BRIDGE_NAMESPACE", "OJS_BRIDGE_APP", "OJS_BRIDGE_RETRY")


#: The columns of an output that no test asks to be narrower.
_COLUMNS = "200"


class Ran:
    """The output of a command, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> list[Any]:
        """Return the lines of stdout, each an object of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def run(*words: str, store: str | None = None, stdin: str = "", **env: str) -> Ran:
    """Run a command within this process."""
    known: dict[str, str | None] = dict.fromkeys(_THEIRS)
    if store is not None:
        known["OJS_BRIDGE_STORE"] = store
    result = CliRunner().invoke(program, [*words], env={**known, "COLUMNS": _COLUMNS, **env}, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def spawn(*words: str, cwd: Path, program: tuple[str, ...] = ("ojs_bridge",), **env: str) -> Ran:
    """Run a command as a process of its own, in a folder."""
    return Ran(*ended(["python", "-m", *program, *words], env={**environment(), **env}, cwd=cwd))


def environment() -> dict[str, str]:
    """Return the variables of this process without those of an operator."""
    return {name: value for name, value in os.environ.items() if name not in _THEIRS}


def spawn_all(*lines: Sequence[str], cwd: Path, **env: str) -> list[Ran]:
    """Run several commands one after the other in one process, in a folder: an app is imported but once."""
    program = "from tests.cli.running import answer_all; answer_all()"
    done = ended(["python", "-c", program, json.dumps(lines)], env={**environment(), **env}, cwd=cwd)
    assert done.status == 0, done.err
    return [Ran(*told) for told in json.loads(done.out)]


def answer_all() -> None:
    """Run the commands that the first argument holds, and write the output of each to stdout."""
    columns = os.environ.get("COLUMNS", _COLUMNS)
    ran = [run(*words, COLUMNS=columns) for words in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps([[r.code, r.out, r.err] for r in ran]))
