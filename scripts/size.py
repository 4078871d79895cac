"""Print the size of the package and of its tests.

A line of code is no blank, no docstring, no comment and no import. A small file is small in all its lines.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL_FILE, LARGE_FUNCTION = 60, 40
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One Python file; `code` holds the numbers of its lines of code."""

    path: Path
    lines: int
    tree: ast.Module
    code: frozenset[int]

    def large_functions(self) -> list[str]:
        """Return the place and the size of each function that is too large."""
        sizes = [(n, len(self.code & lines_of(n))) for n in ast.walk(self.tree) if isinstance(n, FUNCTION)]
        where = self.path.relative_to(ROOT)
        return [f"  {where}:{n.lineno} {n.name}: {size}" for n, size in sizes if size > LARGE_FUNCTION]


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


def report(name: str) -> None:
    """Print the sizes of a folder and of the folders in it."""
    sources = [read(path) for path in sorted((ROOT / name).rglob("*.py"))]
    folders: dict[str, list[int]] = {}
    for source in sources:
        folder = source.path.parent.relative_to(ROOT)
        folders.setdefault(str(folder), []).append(len(source.code))
    for place, sizes in [*sorted(folders.items()), (f"{name}, in all", [len(s.code) for s in sources])]:
        print(f"{sum(sizes):7,} lines of code in {len(sizes):3} files  {place}")
    small = sum(source.lines < SMALL_FILE for source in sources)
    print(f"{small} of {len(sources)} files ({small / len(sources):.0%}) are under {SMALL_FILE} lines")
    large = [line for source in sources for line in source.large_functions()]
    print(f"{len(large)} functions are over {LARGE_FUNCTION} lines of code", *large, "", sep="\n")


if __name__ == "__main__":
    report("ojs_bridge")
    report("tests")
