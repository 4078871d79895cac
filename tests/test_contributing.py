"""CONTRIBUTING.md names commands, folders and files that are there."""

import json
import re
import subprocess
import sys
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


def test_every_room_has_its_row() -> None:
    """So have the folders of tests, and the files of routes."""
    rooms = [path for room in ("ojs_bridge", "tests") for path in (ROOT / room).iterdir()]
    folders = {f"`{path.relative_to(ROOT)}`" for path in rooms if (path / "__init__.py").exists()}
    routes = {
        f"`{path.stem}`"
        for path in (ROOT / "ojs_bridge/http").glob("*.py")
        if "@answers(" in path.read_text("utf-8")
    }
    assert len(folders) > 20
    assert {name for name in folders | routes if name not in PAGE} == set()


def test_the_floor_leaves_out_only_tests_that_there_are() -> None:
    for variable, folders in (("ONE_VERSION", "*"), ("ONE_VERSION_OF_THE_CONTRACT", "contract")):
        (names,) = re.findall(rf"^{variable} = ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
        found = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob(f"{folders}/test_*.py")}
        assert set(names.replace("\\\n", " ").split()) <= found


def test_the_second_run_of_what_failed_names_what_passes_then(tmp_path: Path) -> None:
    name = "tests/test_contributing.py::test_every_room_has_its_row"
    failed = tmp_path / "v" / "cache" / "lastfailed"
    failed.parent.mkdir(parents=True)
    failed.write_text(json.dumps({name: True}))
    (again,) = re.findall(r"^AGAIN = (.*)", MAKEFILE, re.MULTILINE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        f"cache_dir={tmp_path}",
        *again.split(),
        name.partition(":")[0],
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert f"SECOND CHANCE {name}\n" in done.stdout, done.stdout
    assert re.search("^!+ 1 needed a second chance !+$", done.stdout, re.MULTILINE)
    assert done.returncode == 0
