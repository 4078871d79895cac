"""Writes requirements.md: each requirement of the Open Job Spec, with the tests that prove it."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "requirements.md"
COMMAND = "scripts/requirements-table"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One MUST of the specification."""

    id: str
    text: str
    section: str


REQUIREMENTS = (
    Requirement("RET-01", "`max_attempts` is an exact upper bound on executions", "retry 2.2"),
    Requirement("RET-02", "Durations are parsed as ISO 8601", "retry 2.2"),
    Requirement("RET-03", "A `backoff_coefficient` below 1.0 is rejected", "retry 2.2"),
    Requirement("RET-04", "The computed delay is capped at `max_interval`", "retry 2.2"),
    Requirement("RET-05", "Jitter multiplies by `random(0.5, 1.5)`", "retry 5.1"),
    Requirement("RET-06", "The cap is applied again after jitter", "retry 5.3"),
    Requirement("RET-07", "No retry when the error type matches `non_retryable_errors`", "retry 6.3"),
    Requirement("RET-08", "A handler's response code is respected", "retry 7.2"),
    Requirement("RET-09", "The default policy applies when there is none", "retry 8"),
    Requirement("RET-10", "A partial policy is merged with the defaults", "retry 8.1"),
    Requirement("RET-11", "A retry is not available before its delay has elapsed", "retry 9.1"),
    Requirement("RET-12", "An expired visibility timeout is a failed attempt", "retry 9.2"),
    Requirement("RET-13", "A heartbeat extends the reservation", "retry 9.3"),
    Requirement("RET-14", "Attempt, error history and next retry time are tracked", "retry 10"),
    Requirement("RET-15", "At least the 10 newest error entries are kept", "retry 10.1"),
    Requirement("RET-16", "The policy is validated when the job is enqueued", "retry 11"),
    Requirement("RET-17", "Both `discard` and `dead_letter` are supported", "retry 2.2"),
    Requirement("RET-18", "`non_retryable_errors` matches exactly", "retry 6.2"),
    Requirement("RET-19", "Invalid durations are rejected", "retry 4.2"),
    Requirement("RET-20", "Policies are validated against the schema or its equivalent", "retry 14"),
    Requirement("DLQ-001", "An exhausted job with `dead_letter` becomes a dead letter", "dead-letter 4.1"),
    Requirement("DLQ-002", "A dead letter keeps its full error history", "dead-letter 4.1"),
    Requirement("DLQ-003", "A single dead letter can be replayed", "dead-letter 6.1"),
    Requirement("DLQ-004", "Retention by age and by count", "dead-letter 5"),
    Requirement("DLQ-005", "Dead letters are pruned periodically", "dead-letter 8"),
    Requirement("DLQ-006", "Dead letters are listed in pages, filtered by queue and type", "dead-letter 9"),
    Requirement("DLQ-R001", "Many dead letters can be replayed at once", "dead-letter 6"),
    Requirement("DLQ-R002", "A replay can change the job's queue, arguments and policy", "dead-letter 6.3"),
    Requirement("DLQ-R003", "Dead letters can be replayed by rules", "dead-letter 7"),
    Requirement("DLQ-R004", "Dead letters are counted by queue, type and error type", "dead-letter 10"),
    Requirement("DLQ-R005", "Dead letters are filtered by the last error's type", "dead-letter 9"),
)

INTRODUCTION = f"""\
# Requirements and their tests

These are the requirements of the Open Job Spec 1.0.0-rc.1 on retries (`ojs-retry.md`, section 15) and on dead
letters (`ojs-dead-letter.md`). The tests of each have its marker, as in `@pytest.mark.requirement("RET-04")`;
`{COMMAND}` writes this page from the markers.
[Decisions](../explanation/decisions.md) has the choices where the spec leaves room.

| Id | Requirement | Section | Tests |
|----|-------------|---------|-------|
"""


@cache
def proofs() -> dict[str, list[Path]]:
    """Return for each requirement the files with tests that carry its marker; no test is run."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for requirement in sorted(set(_marked(ast.parse(path.read_text(encoding="utf-8"))))):
            found[requirement].append(path.relative_to(ROOT))
    return found


def _marked(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Yield the ids of the requirements that a module or a class marks: itself, or one of its tests."""
    for node in scope.body:
        if _is_pytestmark(node):
            yield from _ids(node)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from (i for decorator in node.decorator_list for i in _ids(decorator))
            yield from _marked(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield from (i for decorator in node.decorator_list for i in _ids(decorator))


def _is_pytestmark(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _ids(tree: ast.AST) -> Iterator[str]:
    """Yield the arguments of each `pytest.mark.requirement(...)` in a tree."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "requirement"
        ):
            yield from (str(ast.literal_eval(argument)) for argument in node.args)


def page() -> str:
    """Return the page as it should be."""
    found = proofs()
    rows = (f"| {r.id} | {r.text} | {r.section} | {_tests(found.get(r.id, []))} |" for r in REQUIREMENTS)
    return INTRODUCTION + "\n".join(rows) + "\n"


def _tests(files: list[Path]) -> str:
    names = (path.relative_to("tests").with_suffix("") for path in files)
    links = (
        f"[{str(name).replace('/test_', '/')}](../../{path})" for name, path in zip(names, files, strict=True)
    )
    return "<br>".join(links) or "none yet"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
