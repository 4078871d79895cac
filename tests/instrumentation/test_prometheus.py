"""The counts of workers, as a Prometheus reads them at their port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from ojs_bridge import Bridge, ConfigurationError, Discard
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import raises, sleeps
from tests.servers import eventually
from tests.servers.ports import free_port

FLEETS = ["celery-valkey", "dramatiq-valkey"]


def served(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples at a port by name and by the values of their labels, sorted by the labels' names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The variables by which workers of several processes serve their counts at one port."""
    return {"OJS_BRIDGE_METRICS_PORT": str(free_port()), "PROMETHEUS_MULTIPROC_DIR": f"{tmp_path}/counts"}


@pytest.mark.parametrize("kind", FLEETS)
def test_a_worker_serves_what_its_processes_have_counted(
    made: Callable[..., Fleet], environment: dict[str, str], kind: str
) -> None:
    """Also what a second worker beside it has counted; that one serves both when the first is gone."""
    fleet, port = made(kind, instruments=("prometheus",)), int(environment["OJS_BRIDGE_METRICS_PORT"])
    first = fleet.start(2, **environment)
    first.await_ready()
    eventually(lambda: served(port), what="the metrics")
    second = fleet.start(2, **environment)
    second.await_ready()
    for job in [fleet.send("act_kept", step) for step in ["ok", raises(OSError), raises(Discard, "a.b")] * 3]:
        end(fleet, job)

    def counts() -> list[float]:
        found = served(port)
        names = ["job_completed_total", "job_retried_total", "job_failed_total", "dead_letter_added_total",
                 "job_queue_time_seconds_count", "workers_active"]  # fmt: skip
        return [sum(found.get(f"ojs_{name}", {}).values()) for name in names]

    eventually(lambda: counts() == [3, 3, 6, 3, 12, 2], seconds=20, what=f"all counts, not {counts()}")
    durations = served(port)["ojs_job_duration_seconds_count"]
    states = [durations[fleet.queue, state, "act_kept"] for state in ("completed", "retryable", "discarded")]
    assert states == [3, 3, 6]
    first.kill()
    eventually(lambda: counts()[:5] == [3, 3, 6, 3, 12], seconds=30, what="the other worker serves")
    assert counts()[5] == 1


@pytest.mark.parametrize("kind", FLEETS)
def test_a_killed_process_is_busy_no_more(
    made: Callable[..., Fleet], environment: dict[str, str], kind: str
) -> None:
    """What a process was busy with when it was killed does not stay on the gauge for ever."""
    fleet, port = made(kind, instruments=("prometheus",)), int(environment["OJS_BRIDGE_METRICS_PORT"])
    fleet.start(2, **environment).await_ready()
    job = fleet.send("act", sleeps(300))
    await_runs(fleet, job)
    eventually(lambda: sum(served(port).get("ojs_workers_busy", {}).values()) == 1, what="a busy worker")
    fleet.worker.kill()
    fleet.start(2, **environment).await_ready()
    eventually(lambda: sum(served(port).get("ojs_workers_busy", {"": 1}).values()) == 0, what="none busy")


@pytest.mark.parametrize("port", ["no", "0", "65536", "localhost:", -1])
def test_a_port_that_is_none(port: int | str) -> None:
    """It is refused where it is given."""
    from ojs_bridge.instrumentation.prometheus import instrument

    with pytest.raises(ConfigurationError, match=r"OJS_BRIDGE_METRICS_PORT: .* is neither a port nor"):
        instrument(Bridge(), port)
