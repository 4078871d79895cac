"""A figure of speed that a document quotes names its row of `docs/explanation/speed.md`, and is no kinder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "speed.md"
#: As in: 1.20 ("Dramatiq"), or: 1.14 of no store ("Celery, 1 child, store on the same Valkey").
QUOTED = re.compile(r'(\d+\.\d+)(\s+of\s+no\s+store)?\s+\("([^"]+)"\)')
TIME, OF_NO_STORE = 2, 7


def test_no_quoted_figure_is_kinder_than_its_row() -> None:
    lines = [
        line[2:-2].split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")
    ]
    rows = {line[0]: line for line in lines if len(line) > OF_NO_STORE}
    documents = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path != PAGE)]
    quoted = [(path.name, *found) for path in documents for found in QUOTED.findall(path.read_text("utf-8"))]
    assert {"README.md"} <= {name for name, *_ in quoted}
    for name, figure, of_no_store, row in quoted:
        measured = re.search(r"\d+\.\d+", rows[" ".join(row.split())][OF_NO_STORE if of_no_store else TIME])
        assert measured, (name, row)
        assert float(figure) >= float(measured[0]), (name, row)
