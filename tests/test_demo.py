"""The demonstration of `make demo`, with real workers of both frameworks."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo"

#: Runs the demonstration with an expectation that is wrong.
WRONG = """
import dataclasses, sys
sys.path.insert(0, sys.argv[1])
import demo, jobs
jobs.JOBS["succeeds at once"] = dataclasses.replace(jobs.JOBS["succeeds at once"], ending="discarded")
sys.exit(demo.main())
"""


def run(*arguments: str, folder: Path) -> tuple[int, str]:
    """Run Python in an empty folder; return its exit status and its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.requirement("DLQ-001", "DLQ-003")
def test_the_demonstration(tmp_path: Path) -> None:
    """Every job ends as its policy says within a minute, and no process or file is left."""
    began = time.monotonic()
    status, said = run(str(DEMO / "demo.py"), folder=tmp_path)
    assert (status, said.strip().splitlines()[-1]) == (
        0,
        "every job ended as its policy says, and no retry ran early",
    ), said
    for framework in ("celery", "dramatiq"):
        assert re.search(
            rf"{framework}: the worker was killed with signal 9 while it ran the job: attempt 1 counts, as "
            r"visibility_timeout; another worker began it again after \d+\.\d s",
            " ".join(said.split()),
        ), said
    assert time.monotonic() - began < 60
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_does_not_end_as_it_should(tmp_path: Path) -> None:
    """The output names the job, and the exit status is not 0."""
    status, said = run("-c", WRONG, str(DEMO), folder=tmp_path)
    assert status == 1, said
    for framework in ("celery", "dramatiq"):
        assert f"not as planned: {framework}: succeeds at once: completed after 1 runs" in said, said
