"""The Lua files of the Redis store: each is used, and names its KEYS and ARGV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ojs_bridge.store import redis as redis_store
from ojs_bridge.store.redis.server import lua

FOLDER = Path(redis_store.__file__).parent
FILES = sorted((FOLDER / "lua").glob("*.lua"))
#: The others hold functions, which a script gets by its line `-- NEEDS:`.
SCRIPTS = [file for file in FILES if not file.name.startswith("_")]


def names_in(script: Path, what: str) -> list[str]:
    """The names that a script's header has for its KEYS or ARGV."""
    found = re.findall(rf"^-- {what}: (.+)$", script.read_text("utf-8"), re.MULTILINE)
    assert len(found) == 1, f"{script.name} needs one line `-- {what}: ...`"
    return [] if found == ["none"] else str(found[0]).split(", ")


@pytest.mark.parametrize("what", ["KEYS", "ARGV"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_header_names_as_many_as_the_script_uses(script: Path, what: str) -> None:
    """A last name with dots stands for any number."""
    names, code = names_in(script, what), lua(script.stem)
    used = max(map(int, re.findall(rf"{what}\[(\d+)", code)), default=0)
    is_open = bool(names) and "..." in names[-1]
    assert is_open == bool(re.search(rf"#{what}(?!\[)|{what}\[n|{what}\[\d+ \+ n|\({what}[,)]", code))
    assert used <= len(names) if is_open else used == len(names)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_opens_with_what_it_is_for_and_is_used(file: Path) -> None:
    """The store or another of the files uses it."""
    assert re.match(r"-- \w", file.read_text("utf-8"))
    others = [*FOLDER.glob("*.py"), *(other for other in SCRIPTS if other != file)]
    used = rf"""NEEDS: .*\b{file.stem}\b|"{file.stem}"[,)]"""
    assert any(re.search(used, other.read_text("utf-8")) for other in others)


def test_no_script_stands_in_python() -> None:
    """All Lua of the store is in these files."""
    assert not [file.name for file in FOLDER.glob("*.py") if "redis.call" in file.read_text("utf-8")]
