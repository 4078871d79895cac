"""A plugin of pytest: it writes how each test ended into the file that the variable RESULTS names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ENDS = ("passed", "skipped", "failed")
results: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the worst end of a test's set-up, its call, its subtests and its tear-down."""
    before = results.get(report.nodeid, "passed")
    results[report.nodeid] = max(before, report.outcome, key=ENDS.index)


def pytest_sessionfinish() -> None:
    """Write the results."""
    Path(os.environ["RESULTS"]).write_text(json.dumps(results), "utf-8")
