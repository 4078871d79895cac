"""`mypy --strict` accepts right code of users, and refuses wrong code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

TYPED = Path(__file__).parent / "typed.py"
#: Reading all that the package imports takes a while, the first time.
CACHE = TYPED.parents[2] / ".mypy_cache" / "users"
CONFIGURATION = "[mypy]\nstrict = true\n[mypy-celery.*]\nignore_missing_imports = true\n"


def test_mypy_takes_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    """A decorated function keeps its parameters, and the keys and values of a policy are known."""
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    options = ["--config-file", f"{tmp_path}/mypy.ini", "--cache-dir", str(CACHE)]
    command = [sys.executable, "-m", "mypy", *options, str(TYPED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    found = re.findall(r"typed\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout)
    lines = enumerate(TYPED.read_text().splitlines(), 1)
    expected = [(str(number), line.partition("# E: ")[2]) for number, line in lines if "# E: " in line]
    assert found == expected, done.stdout
