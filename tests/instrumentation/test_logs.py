"""A log line about a job carries its facts as fields of its record."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

import ojs_bridge
from ojs_bridge.engine.events import FIELDS
from ojs_bridge.rules.job import Job
from tests.contract.fleet import Fleet, end
from tests.contract.notes import Noting
from tests.contract.steps import raises
from tests.instrumentation.snippets import snippet

METRICS = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()

LOGGER = logging.getLogger("ojs_bridge")


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_the_lines_of_a_worker_have_the_facts_of_their_jobs(made: Callable[..., Fleet], kind: str) -> None:
    """A retry has its delay, and both lines have the job, its type, its queue, its attempt and its error."""
    fleet = made(kind, instruments=("logs",))
    fleet.start().await_ready()
    job = fleet.send("act_kept", raises(TimeoutError, "slow"))
    end(fleet, job)
    retrying, dead = Noting(fleet.settings.backend).read("lines", job)
    same = {"job_id": job, "job_type": "act_kept", "queue": fleet.queue, "error_type": "external.timeout"}
    assert same.items() <= retrying.items()
    assert same.items() <= dead.items()
    assert (retrying["level"], retrying["attempt"], retrying["decision"]) == ("WARNING", 1, "retrying")
    assert (dead["level"], dead["attempt"], dead["decision"]) == ("ERROR", 2, "dead-lettered")
    assert retrying["delay_ms"] == 100
    assert dead["message"].startswith(f"job {job} (act_kept) dead-lettered: attempt 2 of 2 failed with")


def test_the_formatter_of_the_docs_writes_one_line() -> None:
    """Also for an error with a traceback, and for a job whose id would begin a new line."""
    formatter = snippet("json_logs.py")["Json"]()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(formatter.format(record))  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    try:
        try:
            raise OSError("away")
        except OSError:
            LOGGER.exception("job %s: %d things went wrong", Job("a\nb", "mail", "default", 2), 3)
        LOGGER.error("job %s is known by its id alone", "j-1")
        LOGGER.error("nothing of a job")
    finally:
        LOGGER.removeHandler(handler)
    first, second, third = (json.loads(line) for line in lines)
    assert first.pop("error").endswith("OSError: away")
    assert not first.pop("time").startswith("0")
    assert first == {
        "level": "ERROR", "logger": "ojs_bridge", "message": "job a\\nb: 3 things went wrong",
        "job_id": "a\nb", "job_type": "mail", "queue": "default", "attempt": 2,
    }  # fmt: skip
    assert second["job_id"] == "j-1"
    assert "job_id" not in third
    assert not any("\n" in line for line in lines)


def test_the_fields_are_no_names_of_logging_s_own() -> None:
    """A record refuses an extra field with the name of one of its own."""
    own = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    assert own.isdisjoint(FIELDS)
    assert all(f"`{field}`" in METRICS for field in FIELDS)


def test_every_line_about_a_job_begins_with_the_job() -> None:
    """A line that names a job elsewhere, or that formats it before it is logged, would have no facts."""
    calls = [
        node
        for path in Path(ojs_bridge.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name) and node.func.value.id == "logger"
    ]  # fmt: skip
    texts = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    lines = [text for text in texts if isinstance(text, str) and "job %s" in text]
    assert len(lines) > 30
    assert [text for text in lines if not text.startswith("job %s")] == ["listener %r failed on %s of job %s"]
