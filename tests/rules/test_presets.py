"""Other systems' retries, against tables that were worked out by hand from their own formulas."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import dramatiq.common
import pytest
from celery.utils.time import get_exponential_backoff_interval
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, NotExpressible, RetryPolicy
from ojs_bridge.engine.layers import Layers
from ojs_bridge.migration import PRESETS, preset
from ojs_bridge.rules.job import Job, decode
from ojs_bridge.rules.policy import LARGEST

CENTURY = 36_500 * 86_400
WEEK = 7 * 86_400
DOUBLING = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


@dataclass(frozen=True)
class Golden:
    """The first ten waits in seconds, the shortest and the longest possible, and those of a retry far off.

    How often the job runs, whether it is kept then, and whether the Open Job Spec can say all of it.
    """

    least: list[float]
    most: list[float]
    far: tuple[float, float]
    runs: int
    expressible: bool
    on_exhaustion: str = "dead_letter"


def steady(waits: list[float], far: float, runs: int, on_exhaustion: str = "dead_letter") -> Golden:
    """Return the table of a system without jitter."""
    return Golden(waits, waits, (far, far), runs, expressible=True, on_exhaustion=on_exhaustion)


# fmt: off
GOLDEN = {
    "bullmq": steady([*DOUBLING], CENTURY, 3),
    "celery": Golden(
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        (0, 600), 4, expressible=False, on_exhaustion="discard",
    ),
    "dramatiq": Golden(
        [15, 30, 60, 120, 240, 480, 960, 1920, 3840, 7680],
        [30, 60, 120, 240, 480, 960, 1920, 3840, 7680, 15360],
        (WEEK / 2, WEEK), 21, expressible=False,
    ),
    "faktory": Golden(
        [15, 16, 31, 96, 271, 640, 1311, 2416, 4111, 6576],
        [44, 74, 118, 212, 416, 814, 1514, 2648, 4372, 6866],
        (CENTURY, CENTURY), 26, expressible=False,
    ),
    "kathikon": steady([5, 20, 45, 80, 125, 180, 245, 320, 405, 500], 86_400, 20),
    "oban": Golden(
        [17, 19, 23, 31, 47, 79, 143, 271, 527, 1039],
        [18, 20, 25, 34, 51, 86, 157, 298, 579, 1142],
        (CENTURY, CENTURY), 20, expressible=False,
    ),
    "sidekiq": Golden(
        [15, 16, 31, 96, 271, 640, 1311, 2416, 4111, 6576],
        [24, 35, 60, 135, 320, 699, 1380, 2495, 4200, 6675],
        (CENTURY, CENTURY), 26, expressible=False,
    ),
    "simple-durable-jobs": Golden(
        [0.09, 0.18, 0.36, 0.72, 1.44, 2.88, 4.5, 4.5, 4.5, 4.5],
        [0.11, 0.22, 0.44, 0.88, 1.76, 3.52, 5.5, 5.5, 5.5, 5.5],
        (4.5, 5.5), 5, expressible=False,
    ),
    "temporal": steady([1, 2, 4, 8, 16, 32, 64, 100, 100, 100], 100, 2**63 - 1, "discard"),
    "zzz_jobs.constant": steady([30, 30, 30, 30, 30, 30, 30, 30, 30, 30], 30, 20),
    "zzz_jobs.exponential": Golden(
        [15, 30, 60, 120, 240, 480, 960, 1920, 3600, 3600],
        [18.75, 37.5, 75, 150, 300, 600, 1200, 2400, 4500, 4500],
        (3600, 4500), 20, expressible=False,
    ),
    "zzz_jobs.linear": steady([60, 120, 180, 240, 300, 360, 420, 480, 540, 600], CENTURY, 20),
}
# fmt: on


class Drawn:
    """A source of randomness that draws the given numbers in turn, and the last one for ever."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        """Return the next number."""
        return self._numbers.pop(0) if len(self._numbers) > 1 else self._numbers[0]


LOWEST, HIGHEST = Drawn(0.0), Drawn(math.nextafter(1.0, 0.0))


def test_there_is_a_table_for_each() -> None:
    """Every preset has a table, and no table lacks a preset; they are sorted."""
    assert list(PRESETS) == sorted(PRESETS) == sorted(GOLDEN)
    assert [one.name for one in PRESETS.values()] == list(PRESETS)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_first_ten_waits(name: str) -> None:
    """The table has the shortest and the longest wait that the jitter allows."""
    policy, golden = preset(name).policy, GOLDEN[name]
    waits = range(1, 11)
    assert [policy.delay(n, rng=LOWEST) for n in waits] == pytest.approx(golden.least, rel=1e-12)
    assert [policy.delay(n, rng=HIGHEST) for n in waits] == pytest.approx(golden.most, rel=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_cap(name: str) -> None:
    """A retry far off waits as long as the cap."""
    policy = preset(name).policy
    bounds = (policy.delay(LARGEST, rng=LOWEST), policy.delay(LARGEST, rng=HIGHEST))
    assert bounds == pytest.approx(GOLDEN[name].far, rel=1e-12)


@pytest.mark.parametrize("name", GOLDEN)
@given(st.integers(1, 10), st.randoms(use_true_random=False))
def test_no_draw_leaves_its_bounds(name: str, n: int, rng: Drawn) -> None:
    """The bounds hold for every draw."""
    least, most = GOLDEN[name].least[n - 1], GOLDEN[name].most[n - 1]
    assert least * (1 - 1e-12) <= preset(name).policy.delay(n, rng=rng) <= most * (1 + 1e-12)


@pytest.mark.parametrize("name", GOLDEN)
def test_how_often_a_job_runs_and_what_then(name: str) -> None:
    """The runs include the first one; the job is kept where the system keeps it."""
    policy, golden = preset(name).policy, GOLDEN[name]
    assert (policy.runs, policy.on_exhaustion) == (golden.runs, golden.on_exhaustion)


@pytest.mark.parametrize("name", GOLDEN)
def test_whether_ojs_can_say_it(name: str) -> None:
    """The preset is marked, and a policy that OJS can express has the same schedule when it is read again."""
    found = preset(name)
    assert found.expressible is GOLDEN[name].expressible
    if not found.expressible:
        with pytest.raises(NotExpressible):
            found.policy.to_ojs()
        return
    again = RetryPolicy.merge(json.loads(json.dumps(found.policy.to_ojs())))
    assert (again.runs, again.on_exhaustion) == (found.policy.runs, found.policy.on_exhaustion)
    assert [again.delay(n, rng=LOWEST) for n in range(1, 11)] == GOLDEN[name].least


@pytest.mark.parametrize("name", GOLDEN)
def test_whether_it_travels_with_a_job(name: str) -> None:
    """A policy that OJS can express travels; any other is refused where the job is sent."""
    found, bridge, job = preset(name), Bridge(), Job("j-1", "t", "q")
    if found.expressible:
        sent = decode(bridge.engine.initial_header(job, bridge.engine.task(), found.policy).text, job)
        assert bridge.engine.task().of_job(sent.retry).policy.runs == GOLDEN[name].runs
    else:
        with pytest.raises(InvalidRetryPolicy, match="exists only in Python code"):
            bridge.engine.initial_header(job, bridge.engine.task(), found.policy)


@pytest.mark.parametrize("name", GOLDEN)
def test_it_is_a_policy_like_any_other(name: str) -> None:
    """A bridge takes it, a task may change it, a child process gets it; its notes are one line."""
    found = preset(name)
    assert Bridge(retry=found.policy).engine.task(Layers(task={"max_attempts": 7})).policy.max_attempts == 7
    assert RetryPolicy.merge(found.policy).delay(3, rng=LOWEST) == found.policy.delay(3, rng=LOWEST)
    assert pickle.loads(pickle.dumps(found)) == found
    assert len({found.policy, RetryPolicy.merge(found.policy)}) == 1
    assert found.notes
    assert "\n" not in found.notes


@pytest.mark.parametrize("name", ["Sidekiq", "zzz_jobs", "", None, ["sidekiq"]])
def test_one_that_there_is_not(name: str) -> None:
    """The error names the known presets."""
    with pytest.raises(ConfigurationError) as error:
        preset(name)
    assert str(error.value) == f"preset: {name!r} must be one of {', '.join(GOLDEN)}"


def draws() -> Iterator[tuple[float, float]]:
    """Return pairs of draws, from end to end."""
    yield from ((a / 8, b / 8) for a in range(8) for b in range(8))


@pytest.mark.parametrize("n", range(1, 21))
def test_dramatiq_itself_waits_as_long(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All retries wait as long for the same draws, to a millisecond, which it cuts; beyond the week, too."""
    policy = preset("dramatiq").policy
    for pair in draws():
        drawn = Drawn(*pair)
        monkeypatch.setattr(
            dramatiq.common, "uniform", lambda a, b, drawn=drawn: a + (b - a) * drawn.random()
        )
        _, theirs = dramatiq.common.compute_backoff(n - 1, factor=15_000, max_backoff=WEEK * 1000)
        assert math.floor(policy.delay(n, rng=Drawn(*pair)) * 1000 + 1e-6) == theirs


@pytest.mark.parametrize("n", range(1, 21))
def test_celery_itself_waits_as_long(n: int) -> None:
    """The longest wait is the same; both draw whole seconds from none to that."""
    policy, most = preset("celery").policy, get_exponential_backoff_interval(1, n - 1, 600)
    drawn = {policy.delay(n, rng=Drawn((second + 0.5) / (most + 1))) for second in range(most + 1)}
    assert drawn == set(range(most + 1))


def test_neither_framework_is_needed() -> None:
    """Presets work where no framework is installed."""
    code = (
        "import sys; from ojs_bridge.migration import preset; print({'celery', 'dramatiq'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
