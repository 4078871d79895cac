"""CONTRIBUTING.md names commands, folders and files that are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z]+)", PAGE))))
def test_its_commands_are_in_the_makefile(target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:ojs_bridge|tests|docs|scripts)/[\w/.-]+", PAGE))))
def test_its_paths_are_there(path: str) -> None:
    assert (ROOT / path.rstrip(".")).exists()


def test_the_floor_leaves_out_only_tests_that_there_are() -> None:
    (names,) = re.findall(r"^ONE_VERSION = ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    found = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("*/test_*.py")}
    assert set(names.replace("\\\n", " ").split()) <= found
