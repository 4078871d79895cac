"""The page coming-from.md: its table is of the code, its snippets run, each system has its rows."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import ojs_bridge
from ojs_bridge import Bridge, RetryPolicy
from ojs_bridge.migration import PRESETS, Preset, preset
from ojs_bridge.rules.notations import parse_duration
from ojs_bridge.rules.policy import LARGEST
from tests.lives import live_and_die

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
CENTURY = timedelta(days=36_500)
#: The things that each text names, in its own words.
NAMED = {
    "Kathikon": [
        *("{:error, reason}", "stacktrace", "{:sleep, seconds}", "5, 86400)`", "20 by default"),
        *("max_attempts: 3", ":executing", ":retryable", "available_at", "dispatcher", ":discarded"),
        *("job.errors", "fetch(job_id)", "retention_period", "orphaned", ":retry]", ":discard]", ":stop]"),
    ],
    "zzz_jobs": [
        *("per worker, at registration", "exponential", "base_seconds", "max_seconds", "deterministic"),
        *("25 %", "linear", "constant", "custom", "list of intervals", "incremented", "scheduled_at"),
        *("max_attempts` per worker", "at enqueue", "attempt >= max_attempts", "preserved in `errors`"),
        *("not automatically deleted", "countByState", "deleteCompleted", "job_failed", "job_discarded"),
        *("duration_ms", "error_msg"),
    ],
    "simple-durable-jobs": [
        *("automatically", "MaxAttempts", "InitialBackoff", "MaxBackoff", "BackoffMultiplier"),
        *("JitterFraction", "DefaultRetryConfig", "WithStorageRetry", "WithDequeueRetry", "DisableRetry"),
        *("WithRetryAttempts", "Complete", "Fail", "SaveCheckpoint", "Heartbeat", "fan-out", "Resume job"),
        *("Dequeue", "never retried", "growth", "cap", "independent", "MaxRetries"),
    ],
}


class Drawn:
    """A source of randomness that always draws the same number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        """Return that number."""
        return self.number


LOWEST, HIGHEST = Drawn(0.0), Drawn(math.nextafter(1.0, 0.0))


def rows(title: str) -> list[list[str]]:
    """Return the rows of the first table of a section, without its head."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def calculated(cell: str, **names: float) -> float:
    """Return the value of a formula of the table."""
    return float(eval(cell.strip("`"), {"__builtins__": {}}, names))


ROWS = {row[0].strip("`"): row for row in rows("Presets")}


def test_every_preset_has_its_row() -> None:
    """The rows have the order of the code."""
    assert list(ROWS) == list(PRESETS)


@pytest.mark.parametrize("found", PRESETS.values(), ids=list(PRESETS))
def test_the_waits_of_the_table_are_those_of_the_code(found: Preset) -> None:
    """The formula, the cap and both ends of the jitter are the same."""
    _, formula, low, high, cap, *_ = ROWS[found.name]
    longest = CENTURY if cap == "none" else parse_duration(cap.strip("`"))
    steady = RetryPolicy.merge(found.policy, {"jitter": False})
    for n in range(1, 15):
        delay = min(calculated(formula, n=n), longest.total_seconds())
        assert steady.delay(n, rng=LOWEST) == pytest.approx(delay)
        assert found.policy.delay(n, rng=LOWEST) == pytest.approx(calculated(low, n=n, delay=delay))
        assert found.policy.delay(n, rng=HIGHEST) == pytest.approx(calculated(high, n=n, delay=delay))
    if found.name != "zzz_jobs.constant":
        assert steady.delay(LARGEST, rng=LOWEST) == longest.total_seconds()


@pytest.mark.parametrize("found", PRESETS.values(), ids=list(PRESETS))
def test_the_rest_of_the_table_is_the_code_s(found: Preset) -> None:
    """The number of runs, the end, the form in OJS and the note are the same."""
    runs, kept, expressible, notes = ROWS[found.name][5:]
    assert runs == ("no limit" if found.policy.runs == LARGEST else str(found.policy.runs))
    assert kept == ("yes" if found.policy.on_exhaustion == "dead_letter" else "no")
    assert expressible == ("yes" if found.expressible else "no")
    assert notes == found.notes


@pytest.mark.parametrize("system", NAMED)
def test_every_feature_of_a_text_has_a_row(system: str) -> None:
    """Each row has an answer, and a word of code where there is one."""
    table = rows(system)
    for name in NAMED[system]:
        assert any(name in there for there, _, _ in table), name
    for there, here, code in table:
        assert there
        assert here
        assert code.startswith("`") or not code, there


@pytest.mark.parametrize("system", NAMED)
def test_the_code_words_mean_something(system: str) -> None:
    """An expression that stands by itself is evaluated; of a call that needs a job, the name is looked up."""
    names = {**vars(ojs_bridge), "preset": preset, "random": random, "store": "sqlite:///unused.db", "n": 1}
    bridge = Bridge("sqlite:///unused.db")
    for code in (row[2].strip("`") for row in rows(system)):
        if path := re.match(r"bridge\.([a-z_.]+)\(", code):
            assert callable(attrgetter(path[1])(bridge)), code
        elif code.startswith("{"):
            RetryPolicy.merge(eval(code))
        elif re.match(r"[A-Z]|preset", code):
            eval(code, {**names, "tell": print})


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the snippets one after the other, and return the names that they define."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for snippet in SNIPPET.findall(DOCUMENT.read_text(encoding="utf-8")):
        exec(compile(snippet, str(DOCUMENT), "exec"), names)
    return names


def test_the_snippets_run(namespace: dict[str, Any]) -> None:
    """The snippets run as they stand; their callables are a strategy and a jitter."""
    patience: Callable[..., float] = namespace["patience"]
    assert [patience(n, None) for n in (1, 2)] == [30, 60]
    assert namespace["up_to_a_minute_more"](1, 10, Drawn(0.5)) == 40
    assert namespace["patient"].runs == 10


def test_the_listener_hears_durations_and_messages(
    namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The listener hears of nineteen retries and of the end; the job is counted as discarded."""
    bridge: Bridge = namespace["bridge"]
    live_and_die(bridge, "j-1", "the disk is full")
    assert bridge.flush(30)
    told = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [(job, message) for job, _, message in told] == [
        ("j-1", f"the disk is full {attempt}") for attempt in range(1, 21)
    ]
    assert all(float(duration) >= 0 for _, duration, _ in told)
    assert bridge.counts(queue="default")["discarded"] == 1
