"""The page of speed has what `make bench` writes; no figure that a document quotes is kinder than its row."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.rows import GROUPS
from benchmarks.tables import TABLES, WRITTEN

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "speed.md"
#: As in: 1.20 ("Dramatiq"), or: 1.14 of no store ("Celery, 1 child, store on the same Valkey").
#: Or: 3.03 ("Dramatiq, store PostgreSQL", servers 2 ms away).
QUOTED = re.compile(r'(\d+\.\d+)(\s+of\s+no\s+store)?\s+\("([^"]+)"(,\s+servers\s+2\s+ms\s+away)?\)')
TIME, OF_NO_STORE = 2, 7


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a text by their names."""
    lines = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line for line in lines}


def test_no_quoted_figure_is_kinder_than_its_row() -> None:
    work, _, far = PAGE.read_text("utf-8").partition("| 2 ms to servers and back |")
    tables = {"": rows_of(work.partition("| Idle worker |")[0]), "far": rows_of(far.partition("\n\n")[0])}
    documents = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path != PAGE)]
    quoted = [(path.name, *found) for path in documents for found in QUOTED.findall(path.read_text("utf-8"))]
    assert {"README.md"} <= {name for name, *_ in quoted}
    assert any(is_far for *_, is_far in quoted)
    for name, figure, of_no_store, row, is_far in quoted:
        cells = tables["far" if is_far else ""][" ".join(row.split())]
        measured = re.search(r"\d+\.\d+", cells[OF_NO_STORE if of_no_store else TIME])
        assert measured, (name, row)
        assert float(figure) >= float(measured[0]), (name, row)


def test_the_page_has_each_table_that_is_measured() -> None:
    page = PAGE.read_text("utf-8")
    assert [page.count("\n".join(table.head)) for table in TABLES] == [1] * len(TABLES)
    written = page.partition("\n".join(WRITTEN.head))[2].partition("\n\n")[0]
    names = {group.name for group in GROUPS.values() if "postgres" in group.stores}
    assert set() < rows_of(written).keys() <= names
