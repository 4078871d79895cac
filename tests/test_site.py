"""The site builds without a warning, asks no other host, and shows every public name."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, RetryPolicy
from ojs_bridge.engine.events import FIELDS

griffe = pytest.importorskip("griffe", reason="the site is built where its group `docs` is installed")

ROOT = Path(__file__).parents[1]
MODULES = ("", ".celery", ".dramatiq", ".http", ".migration", ".testing")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly: a link, an anchor or a name that is not there is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def public_names() -> dict[str, Any]:
    """Return each public name of the package with what its source says."""
    package = griffe.load("ojs_bridge", search_paths=[ROOT], resolve_aliases=True)
    found = {}
    for module in (f"ojs_bridge{suffix}" for suffix in MODULES):
        names = griffe.ModulesCollection.__getitem__(package.modules_collection, module).exports or ()
        found |= {f"{module}.{name}": package.modules_collection[f"{module}.{name}"] for name in names}
    return found


#: The pages that a reader looks for, beside the tutorial and the glossary.
SOUGHT = {
    "how-to": "install django flask fastapi errors policies migrating going-back monitoring testing "
    "operating stores upgrade something-looks-wrong",
    "reference": "settings events metrics command-line http policy guarantees api/ojs_bridge",
    "explanation": "attempts retries reservations at-least-once decisions architecture parts",
}
PICTURE = re.compile(r'src="\.\./(pictures/\S+\.svg)"')
#: The pages that draw the states of a job, the sequence of a crash, and the parts.
DRAWN = ("attempts", "reservations", "parts")


def test_a_reader_finds_each_page_from_the_first(site: Path) -> None:
    """The menu of the first page leads to all of them, and to the glossary; a search is there, too."""
    menu = (site / "index.html").read_text()
    pages = [f"{part}/{name}" for part, names in SOUGHT.items() for name in names.split()]
    for page in (*pages, "tutorial", "glossary"):
        assert f'href="{page}.html"' in menu
        assert (site / f"{page}.html").is_file()
    assert (site / "search" / "search_index.json").stat().st_size > 10_000
    for name in DRAWN:
        [picture] = PICTURE.findall((site / "explanation" / f"{name}.html").read_text())
        assert "<svg" in (site / picture).read_text()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """The inventory, by which other sites link to this one, has all of them."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    shown = {line.split(" ", 1)[0] for line in inventory.splitlines()}
    assert len(public_names()) > 60
    assert public_names().keys() - shown == set()
    assert {f"ojs_bridge.RetryPolicy.{name}" for name in RetryPolicy.model_fields} - shown == set()


def test_every_public_name_has_a_docstring() -> None:
    """So have the functions of the public classes."""
    undocumented = [name for name, it in public_names().items() if not it.has_docstring]
    for name, it in public_names().items():
        if it.is_class:
            members = it.all_members.items()
            undocumented += [
                f"{name}.{member}"
                for member, found in members
                if found.is_function and not member.startswith("_") and not found.has_docstring
            ]
    assert undocumented == []


def test_no_page_asks_another_host(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own: it can be read without the internet."""
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:)?//|<link[^>]+href=\"?(?:https?:)?//"
    )
    styled = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
    assert [page for page in site.rglob("*.html") if loaded.search(page.read_text("utf-8"))] == []
    assert [sheet for sheet in site.rglob("*.css") if styled.search(sheet.read_text("utf-8"))] == []


def parts() -> Any:
    """Return the module that makes the parts of the pages."""
    return runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))


def test_what_is_made_from_the_code_stands_in_the_pages() -> None:
    """`python scripts/site_pages.py` writes it, for those who read a page without the site, too."""
    pages = {path: path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")}
    as_made = parts()["as_made"]
    assert sum("<!-- end -->" in page for page in pages.values()) > 10
    old = [path for path, page in pages.items() if as_made(page) != page]
    assert old == [], "`python scripts/site_pages.py` writes them anew"


def test_every_field_of_an_event_is_explained() -> None:
    """The page has a row for each; the types are those of a shop that ran."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text("utf-8")
    explained = {
        name for row in re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE) for name in row.split("`")[1::2]
    }
    heard = parts()["all_events"]()
    assert {name for event in heard for name in event.data} == explained
    made = {
        type_
        for path in (ROOT / "ojs_bridge").rglob("*.py")
        for type_ in re.findall(r'\b_?[Ee]vent\(\s*"(\w+\.\w+)"', path.read_text("utf-8"))
    }
    assert {event.type for event in heard} == made, "`all_events` of scripts/site_pages.py has one of each"


def test_every_field_of_a_log_line_is_explained() -> None:
    """The page has a row for each field of a record, and no other row."""
    page = (
        (ROOT / "docs" / "reference" / "metrics.md")
        .read_text("utf-8")
        .partition("## Fields of a log line")[2]
    )
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == FIELDS


def test_every_argument_of_a_bridge_is_in_the_settings() -> None:
    """The docstring of a bridge is the source of the table."""
    assert parts()["arguments"]().keys() == inspect.signature(Bridge).parameters.keys()


def test_every_field_of_a_policy_has_its_section() -> None:
    assert parts()["SECTIONS"].keys() == RetryPolicy.model_fields.keys(), "SECTIONS of scripts/site_pages.py"


def test_the_lines_of_the_log_are_in_the_code() -> None:
    """A line that the page explains stands in the package, but for the parts that change."""
    page = (
        (ROOT / "docs" / "how-to" / "something-looks-wrong.md")
        .read_text("utf-8")
        .partition("## By log line")[2]
    )
    lines = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    said = [
        node.value
        for path in (ROOT / "ojs_bridge").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(lines) > 30
    pieces = [piece.strip() for line in lines for piece in line.split("…") if piece.strip()]
    assert [piece for piece in pieces if not any(piece in text for text in said)] == []
