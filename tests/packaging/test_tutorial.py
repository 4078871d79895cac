"""The tutorial is done from an empty folder to its end, as a newcomer types it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.packaging.walking import FRAMEWORKS, TUTORIAL, Newcomer, text_for


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_tutorial(framework: str, tmp_path: Path) -> None:
    """The environment is that of the tests; `make wheels` does the same in a fresh one."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / ".venv").symlink_to(sys.prefix)
    newcomer = Newcomer(tmp_path, dict(os.environ), is_installed=True)
    newcomer.follow(text_for(framework))
    said = newcomer.said.read_text()
    assert "acme is up to date" in said
    assert said.count("the report for acme begins") == 2


def test_both_frameworks_have_the_same_tabs() -> None:
    """A reader of one framework misses nothing that the other's has."""
    names = re.findall(r'^=== "(\w+)"$', TUTORIAL.read_text("utf-8"), re.MULTILINE)
    assert names == [*FRAMEWORKS] * (len(names) // 2)
    counts = {text_for(framework).count("```") for framework in FRAMEWORKS}
    assert len(counts) == 1
