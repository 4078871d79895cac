"""The snippets and commands of docs/how-to/testing.md do what the page says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.testing.test_plugin import pytest_in

PAGE = (Path(__file__).parents[2] / "docs/how-to/testing.md").read_text("utf-8")
SNIPPETS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))


def test_each_snippet_names_its_file() -> None:
    assert len(SNIPPETS) == PAGE.count("```python")


@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_the_tests_of_the_page(tmp_path: Path, framework: str) -> None:
    files = dict(SNIPPETS)
    actors, conftest = files.pop("crm_actors"), files.pop("conftest_of_yours")
    if framework == "dramatiq":
        files["crm"] = actors + "\n\napp = broker\n"
        for name in ("test_crm", "without_pytest"):
            files[name] = files[name].replace("sync_crm.delay", "sync_crm.send")
    # These run when pytest imports them.
    for name in ("without_pytest", "explaining"):
        files[f"test_{name}"] = files.pop(name)
    said = pytest_in(tmp_path, conftest=conftest, **files)
    assert "4 passed" in said, said


def test_the_command_of_the_page() -> None:
    [(command, told)] = re.findall(r"\$ ojs-bridge (.*)\n((?:.+\n)+?)```", PAGE)
    assert run(*shlex.split(command)).out == told


def test_the_methods_of_the_table_are_there() -> None:
    from ojs_bridge.testing import Job, VirtualTime

    table = PAGE[PAGE.index("## What a test can do") : PAGE.index("## What is virtual")]
    assert set(re.findall(r"`ojs\.(\w+)", table)) == {name for name in dir(VirtualTime) if name[0] != "_"} | {
        "bridge"
    }
    shown = {name for name in [*dir(Job), *Job.__annotations__] if name[0] != "_"}
    assert shown - {"id", "type"} <= set(re.findall(r"`(\w+)`", table)), json.dumps(sorted(shown))
