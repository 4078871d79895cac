"""Workers add their runs up in the store, by job type, queue and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest

from ojs_bridge import Discard, Snooze
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import raises, sleeps
from tests.servers import eventually


def counted(fleet: Fleet) -> Counter[tuple[str, str, str]]:
    """The counts of the last hours, by job type, queue and outcome."""
    store = fleet.bridge.store
    assert store is not None
    now, found = datetime.now(timezone.utc), Counter[tuple[str, str, str]]()
    for rate in store.documents.rates(now - timedelta(hours=2), now, "hour"):
        found[rate.type.rpartition(".")[2], rate.queue, rate.outcome] += sum(rate.counts)
    return found


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey", "dramatiq-rabbitmq"])
def test_each_run_is_counted_once(made: Callable[..., Fleet], kind: str) -> None:
    """What a worker has counted is written when it ends; an attempt whose worker died is counted as lost."""
    fleet = made(kind, reservation="PT2S", visibility=3)
    fleet.start(2)
    for steps in (
        ["ok"],
        ["ok"],
        [raises(OSError), "ok"],
        [raises(Snooze, "PT0.1S"), "ok"],
        [raises(Discard, "a.b")],
    ):
        end(fleet, fleet.send("act", *steps))
    end(fleet, fleet.send("act_kept", raises(OSError), raises(OSError)))
    fleet.worker.stop()
    fleet.start(1)
    job = fleet.send("act_kept", sleeps(60), "ok")
    await_runs(fleet, job)
    fleet.replace(1)
    end(fleet, job, seconds=90)
    fleet.worker.stop()
    queue = fleet.queue
    assert counted(fleet) == {
        ("act", queue, "completed"): 4,
        ("act", queue, "retried"): 1,
        ("act", queue, "waits_in_broker"): 1,
        ("act", queue, "recovered"): 1,
        ("act", queue, "snoozed"): 1,
        ("act", queue, "discarded"): 1,
        ("act_kept", queue, "retried"): 2,
        ("act_kept", queue, "waits_in_broker"): 2,
        ("act_kept", queue, "dead_lettered"): 1,
        ("act_kept", queue, "exhausted"): 1,
        ("act_kept", queue, "lost"): 1,
        ("act_kept", queue, "completed"): 1,
        ("act_kept", queue, "recovered"): 1,
    }


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-rabbitmq"])
def test_an_error_is_in_a_group_before_its_job_dies(made: Callable[..., Fleet], kind: str) -> None:
    """The group tells how many jobs retry; after a death it is the group of the letter, too."""
    fleet = made(kind)
    fleet.start(1)
    slow = {"initial_interval": "PT5M", "max_attempts": 2}
    for number in range(3):
        fleet.send("act_kept", raises(OSError, f"user {number} is slow"), policy=slow)
    fleet.send("act_kept", raises(OSError, "user 9 is slow"), policy={"max_attempts": 1})
    groups = fleet.bridge.groups

    def told() -> list[tuple[int, int, str]]:
        return [(one.retrying, one.group.count, one.pattern) for one in groups.list()]

    eventually(lambda: told() == [(3, 1, "user # is slow")], seconds=60, what="one group of four errors")
    [group] = groups.list()
    assert (group.state, group.per_minute > 0) == ("new", True)
    assert groups.list(state="growing") == ()
