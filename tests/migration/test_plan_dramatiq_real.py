"""Real workers run actors as often as their plan says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install
from ojs_bridge.migration.plan.dramatiq import plans as of_dramatiq
from tests.servers import eventually

REAL: dict[str, dict[str, Any]] = {
    "three": {"max_retries": 3, "min_backoff": 10, "max_backoff": 20},
    "none": {"max_retries": 0},
    "thrown": {"throws": (OSError,)},
    "half": {"max_retries": 1.5, "min_backoff": 5},
}


@pytest.fixture(params=["dramatiq alone", "the bridge, by the plan"])
def fleet(request: pytest.FixtureRequest) -> Iterator[tuple[dict[str, int | None], Counter[str]]]:
    """Actors that fail, each sent once; how often a plan says they run, and how often they did."""
    broker, ran = StubBroker(), Counter[str]()

    def failing(name: str) -> None:
        ran[name] += 1
        raise OSError("down")

    for name, options in REAL.items():
        dramatiq.actor(failing, broker=broker, actor_name=name, **options)
    plan = of_dramatiq(broker)
    if request.param != "dramatiq alone":
        policies = {one.name: {**(one.policy or {}), "max_interval": "PT0.02S", "initial_interval": "PT0.01S"}
                    for one in plan}  # fmt: skip
        install(broker, Bridge(), policies=policies)
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=4)
    worker.start()
    for name in REAL:
        broker.get_actor(name).send(name)
    eventually(lambda: len(broker.dead_letters) == len(REAL))
    worker.stop()
    expected = {one.name: one.native.runs if one.native else None for one in plan}
    yield {**expected, "thrown": 1}, ran


def test_a_real_worker_runs_them_as_often_as_planned(
    fleet: tuple[dict[str, int | None], Counter[str]],
) -> None:
    """The actor with `throws` runs once, the others use up their retries; all jobs end up dead."""
    expected, ran = fleet
    assert expected == {"three": 4, "none": 1, "thrown": 1, "half": 3}
    assert dict(ran) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("options", [{"max_retries": "5"}, {"min_backoff": None}, {"throws": "OSError"}])
def test_a_job_is_lost_over_options_that_a_plan_cannot_read(options: dict[str, Any]) -> None:
    """The job is acknowledged, not retried and not kept as a dead letter, as the plan says."""
    broker, ran = StubBroker(), []

    def failing() -> None:
        ran.append(1)
        raise OSError("down")

    actor = dramatiq.actor(failing, broker=broker, **options)
    [found] = of_dramatiq(broker)
    assert "a job that fails is lost" in found.unreadable
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    actor.send()
    eventually(lambda: ran and not broker.queues["default"].unfinished_tasks)
    worker.stop()
    assert (len(ran), broker.dead_letters, broker.queues["default.DQ"].qsize()) == (1, [], 0)
