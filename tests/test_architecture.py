"""The stops of architecture.md are there: each file, and each function in its file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
MOST_STOPS = 10
STOPS = re.findall(r"`(ojs_bridge/[\w/]+\.py)`\s`([\w.]+)`", PAGE)


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`(ojs_bridge/[\w/]+\.py)`", PAGE)
    assert len(named) > MOST_STOPS
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(("file", "function"), sorted({*STOPS}))
def test_a_stop_names_a_function_of_its_file(file: str, function: str) -> None:
    assert function in functions_in(ast.parse((ROOT / file).read_text("utf-8")))


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
