"""The snippets of docs/monitoring.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.instrumentation.snippets import SNIPPETS


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_of_the_docs_runs(name: str) -> None:
    """In a process of its own, because exporters change the libraries that they instrument."""
    subprocess.run([sys.executable, "-c", SNIPPETS[name]], check=True, capture_output=True)
