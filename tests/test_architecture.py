"""How far a reader has to walk: traces of real runs, sizes, and the stops that architecture.md names.

A step that shortens a journey lowers its limit here. `scripts/journeys` and `make size` show what is counted.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.size import floors, large_files, large_functions, read_all, short_and_called_once
from tests.journeys import JOURNEYS, Figures, Stop, figures

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
MOST_STOPS = 10
STOP = r"`ojs_bridge/([\w/]+\.py)`\s`([\w.]+)`"
STOPS = re.findall(STOP, PAGE)
FAILS = "A job fails and is retried"

#: The most files, functions and moves of each journey today. The goal is beside it: files and functions.
WALKS = {
    "Celery: a failing run, retried": Figures(29, 136, 95),  # 24, 110
    "Celery: a failing run, parked": Figures(34, 175, 147),  # 24, 110
    "Celery on Redis: a failing run, retried": Figures(32, 160, 144),
    "Celery: a success": Figures(23, 70, 58),
    "Celery: a task's policy": Figures(6, 22, 19),  # 6, 18
    "Dramatiq: a failing run, retried": Figures(28, 134, 110),  # 24, 110
    "Dramatiq: a failing run, parked": Figures(32, 165, 148),  # 24, 110
    "Dramatiq: a success": Figures(21, 75, 65),
    "Dramatiq: an actor's policy": Figures(9, 28, 13),  # 6, 18
    "HTTP: a replay": Figures(25, 82, 79),  # 22
}
#: The most of each size today, and the goal.
SIZES = {
    "files in celery": 20,  # 16
    "floors of celery": 9,
    "files in dramatiq": 16,  # 14
    "files": 204,  # 150
    "lines of code": 29_837,  # 16,500
    "private functions of up to three lines that are called once": 61,  # 60
    "functions of more than 60 lines": 0,
    "files of more than 450 lines": 0,
}


def travel() -> dict[str, list[Stop]]:
    """Make all journeys, in a process of their own."""
    command = [sys.executable, "-m", "tests.journeys", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return {name: [Stop(*stop) for stop in stops] for name, stops in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def travelled() -> dict[str, list[Stop]]:
    """All journeys."""
    return travel()


@pytest.mark.parametrize("name", JOURNEYS)
def test_how_far_a_reader_walks(name: str, travelled: dict[str, list[Stop]]) -> None:
    """On a busy machine a thread may take its turn within a journey: then the journey is made again."""
    walked = figures(travelled[name])
    for _ in range(3):
        if all(found <= most for found, most in zip(walked, WALKS[name], strict=True)):
            break
        walked = figures(travel()[name])
    assert all(found <= most for found, most in zip(walked, WALKS[name], strict=True)), walked


def test_sizes() -> None:
    sources = read_all("ojs_bridge")
    folders = [
        source.path.parent.name for source in sources if source.path.parent.parent.name == "ojs_bridge"
    ]
    found = {
        "files in celery": folders.count("celery"),
        "floors of celery": floors("ojs_bridge/celery"),
        "files in dramatiq": folders.count("dramatiq"),
        "files": len(sources),
        "lines of code": sum(len(source.code) for source in sources),
        "private functions of up to three lines that are called once": len(short_and_called_once(sources)),
        "functions of more than 60 lines": len(large_functions(sources)),
        "files of more than 450 lines": len(large_files(sources)),
    }
    more = {what: count for what, count in found.items() if count > SIZES[what]}
    assert more == {}, "`make size` names the files and the functions; SIZES has the limits"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code does not know the class that it is in")
def test_a_failing_run_really_calls_the_stops_of_its_journey(travelled: dict[str, list[Stop]]) -> None:
    """One of the adapters calls it, on one of the two ways of a retry: by the broker, or by the store."""
    called = {(s.file, s.function) for name in JOURNEYS if "failing" in name for s in travelled[name]}
    (journey,) = (part for part in PAGE.split("\n## ") if part.startswith(FAILS))
    assert set(re.findall(STOP, journey)) <= called


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`(ojs_bridge/[\w/]+\.py)`", PAGE)
    assert len(named) > MOST_STOPS
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("file", "function"), sorted({*STOPS}))
def test_a_stop_names_a_function_of_its_file(file: str, function: str) -> None:
    assert function in functions_in(ast.parse((ROOT / "ojs_bridge" / file).read_text("utf-8")))


def functions_in(node: ast.AST, prefix: str = "") -> Iterator[str]:
    """Yield the names of a file's functions; a method comes with the name of its class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from functions_in(child, f"{prefix}{child.name}.")


def test_a_journey_has_ten_stops_at_most_and_each_names_a_function() -> None:
    journeys = PAGE.split("\n## ")[1:]
    assert len(journeys) == 4
    for journey in journeys:
        stops = re.split(r"^\d+\. ", journey, flags=re.MULTILINE)[1:]
        assert 0 < len(stops) <= MOST_STOPS
        assert all(re.match(r"`ojs_bridge/[\w/]+\.py`\s`[\w.]+`", stop) for stop in stops)
