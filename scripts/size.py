"""Print the size of the package and of its tests.

A line of code is no blank, no docstring, no comment and no import. A function is measured by its lines of
code, a file by all its lines. `tests/test_architecture.py` limits these figures.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
LARGE_FILE, LARGE_FUNCTION = 450, 60
#: The lines of code in the body of a function that is hardly more than its name.
SHORT_BODY = 3
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


@dataclass(frozen=True)
class Source:
    """One Python file; `code` holds the numbers of its lines of code."""

    path: Path
    lines: int
    tree: ast.Module
    code: frozenset[int]

    def functions(self) -> list[Function]:
        """Return the functions and methods, those in others among them."""
        return [node for node in ast.walk(self.tree) if isinstance(node, FUNCTION)]

    def place(self, node: Function) -> str:
        """Return the file, the line and the name of a function."""
        return f"{self.path.relative_to(ROOT)}:{node.lineno} {node.name}"


def lines_of(node: ast.stmt) -> frozenset[int]:
    """Return the numbers of a statement's lines."""
    return frozenset(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def no_code(node: ast.AST) -> ast.stmt | None:
    """Return the node if it is an import, its docstring if it has one."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return node
    documented = isinstance(node, (*FUNCTION, ast.ClassDef, ast.Module))
    return node.body[0] if documented and ast.get_docstring(node, clean=False) is not None else None


def read(path: Path) -> Source:
    """Read a file and find its code."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    written = {n for t in tokens if t.type not in LAYOUT for n in range(t.start[0], t.end[0] + 1)}
    ignored = {n for node in ast.walk(tree) if (found := no_code(node)) for n in lines_of(found)}
    return Source(path, len(text.splitlines()), tree, frozenset(written - ignored))


def read_all(folder: str) -> list[Source]:
    """Read the files of a folder and of the folders in it."""
    return [read(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def floors(room: str) -> int:
    """Return on how many floors the files of a room stand: each imports from those below it."""
    below: dict[str, set[str]] = {}
    for source in read_all(room):
        found = [node for node in source.tree.body if isinstance(node, ast.ImportFrom) and node.level == 1]
        names = {
            name
            for node in found
            for name in ([node.module] if node.module else [alias.name for alias in node.names])
        }
        below[source.path.stem] = {str(name) for name in names}
    # Its `__init__` only names what users import.
    del below["__init__"]
    sorter = TopologicalSorter(below)
    sorter.prepare()
    count = 0
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        count += 1
    return count


def large_functions(sources: list[Source]) -> list[str]:
    """Return the place and the size of each function that is too large."""
    sizes = [(s.place(n), len(s.code & lines_of(n))) for s in sources for n in s.functions()]
    return [f"{place}: {size}" for place, size in sizes if size > LARGE_FUNCTION]


def large_files(sources: list[Source]) -> list[str]:
    """Return the name and the size of each file that is too large."""
    return [f"{s.path.relative_to(ROOT)}: {s.lines}" for s in sources if s.lines > LARGE_FILE]


def short_and_called_once(sources: list[Source]) -> list[str]:
    """Return the place of each private function that a reader looks up for little.

    Its name begins with one underscore, its body has up to three lines of code, and in all the files its name
    is read at one place: as a variable or an attribute.
    """
    names = [node for source in sources for node in ast.walk(source.tree)]
    read_at = Counter(node.id for node in names if isinstance(node, ast.Name))
    read_at += Counter(node.attr for node in names if isinstance(node, ast.Attribute))
    return [
        source.place(node)
        for source in sources
        for node in source.functions()
        if node.name.startswith("_") and not node.name.endswith("__") and read_at[node.name] == 1
        if sum(len(source.code & lines_of(statement)) for statement in node.body) <= SHORT_BODY
    ]


def report(name: str) -> None:
    """Print the sizes of a folder and of the folders in it."""
    sources = read_all(name)
    folders: dict[str, list[int]] = {}
    for source in sources:
        folder = source.path.parent.relative_to(ROOT)
        folders.setdefault(str(folder), []).append(len(source.code))
    for place, sizes in [*sorted(folders.items()), (f"{name}, in all", [len(s.code) for s in sources])]:
        print(f"{sum(sizes):7,} lines of code in {len(sizes):3} files  {place}")
    for found, what in (
        (large_files(sources), f"files are over {LARGE_FILE} lines"),
        (large_functions(sources), f"functions are over {LARGE_FUNCTION} lines of code"),
        (short_and_called_once(sources), f"private functions of up to {SHORT_BODY} lines are called once"),
    ):
        print(f"{len(found)} {what}", *(f"  {place}" for place in found), sep="\n")
    print()


if __name__ == "__main__":
    report("ojs_bridge")
    report("tests")
