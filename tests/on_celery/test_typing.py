"""What `mypy --strict` says of users' code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

TYPED = Path(__file__).parent / "typed.py"
#: Reading all that the package imports takes a while, the first time.
CACHE = TYPED.parents[2] / ".mypy_cache" / "users"
CONFIGURATION = "[mypy]\nstrict = true\n[mypy-celery.*]\nignore_missing_imports = true\n"


def test_mypy_takes_what_is_right_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    """A decorated function keeps its parameters, and the keys and values of a policy are known."""
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    options = ["--config-file", f"{tmp_path}/mypy.ini", "--cache-dir", str(CACHE)]
    said, wrong, _ = api.run([*options, str(TYPED)])
    assert not wrong
    found = re.findall(r"typed\.py:(\d+): error: .*\[([a-z-]+)\]", said)
    lines = enumerate(TYPED.read_text().splitlines(), 1)
    expected = [(str(number), line.partition("# E: ")[2]) for number, line in lines if "# E: " in line]
    assert found == expected, said
