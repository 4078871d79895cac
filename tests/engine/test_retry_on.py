"""`retry_on` names the failures of a task that are retried, alike on both frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import Retry as DramatiqsRetry

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy, Retry, Snooze, celery
from ojs_bridge.celery import OJSTask, ojs_task
from ojs_bridge.celery.worker import check_app
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.dramatiq import install as install_dramatiq
from ojs_bridge.engine.layers import Layers, RetryOn
from ojs_bridge.rules.decision import RetryAt
from ojs_bridge.rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH, Failure
from ojs_bridge.rules.job import Job
from tests.cli.running import run
from tests.contract.steps import Step, raises, retries
from tests.on_celery.by_hand import ByHand
from tests.on_dramatiq.fleet import QUICK, Fleet

JOB = Job("1", "shop.charge", "default")
NOT_ASKED = "which this task does not ask to retry"


def natively(app: Any) -> None:
    """Install nothing."""


class SoldOut(Exception):
    """An error that no task asks to retry."""


class Closed(SoldOut):
    """A subclass of a listed error."""


#: retry_on, what is raised -> whether it is retried
RULES: list[tuple[Any, BaseException, bool]] = [
    ("failure", SoldOut(), True),
    ("asked", SoldOut(), False),
    ("asked", Retry("shop.busy"), True),
    (SoldOut, SoldOut(), True),
    ([SoldOut], Closed(), True),
    ((Closed, OSError), SoldOut(), False),
    ("tests.engine.test_retry_on.SoldOut", Closed(), True),
    (["OSError", "tests.engine.test_retry_on.Closed"], SoldOut(), False),
    (["OSError"], ConnectionError(), True),
    ([SoldOut], Retry("shop.busy"), True),
    ([], SoldOut(), False),
]


@pytest.mark.parametrize(("said", "raised", "retried"), RULES)
def test_what_is_retried(said: Any, raised: BaseException, retried: bool) -> None:
    """The decision says why a failure is not retried."""
    bridge = Bridge()
    task = bridge.engine.task(Layers(retry_on=RetryOn(said)))
    decision = bridge.engine.judge(bridge.engine.admit(JOB, JOB, task), raised)  # type: ignore[arg-type]
    assert isinstance(decision, RetryAt) == retried
    assert (NOT_ASKED in decision.reason) != retried


@pytest.mark.parametrize("error_type", [VISIBILITY_TIMEOUT, WORKER_DEATH])
def test_a_lost_attempt_is_retried_whatever_is_asked(error_type: str) -> None:
    """No code of the task has failed; the broker would deliver the job again without the bridge, too."""
    bridge = Bridge()
    run = bridge.engine.admit(JOB, JOB, bridge.engine.task(Layers(retry_on=RetryOn("asked"))))
    assert isinstance(bridge.engine.judge(run, Failure(error_type)), RetryAt)  # type: ignore[arg-type]


def test_a_response_code_and_the_end_of_a_job_are_as_ever() -> None:
    """`on_exhaustion` decides about a failure that is not asked for; a response code comes first."""
    bridge = Bridge(errors={Closed: ("shop.closed", "DISCARD")})
    task = bridge.engine.task(Layers(task={"on_exhaustion": "dead_letter"}, retry_on=RetryOn("asked")))
    ends = [
        bridge.engine.judge(bridge.engine.admit(JOB, JOB, task), raised) for raised in (SoldOut(), Closed())
    ]
    assert [type(end).__name__ for end in ends] == ["DeadLettered", "Discarded"]
    assert ends[0].reason == f"attempt 1 of 3 failed with tests.engine.test_retry_on.SoldOut, {NOT_ASKED}"


# what is said -> what is wrong with it
WRONG: list[tuple[Any, str]] = [
    (3, "3 must be 'failure', 'asked', or exception classes, or names of them"),
    (["failure", 3], "3 must be"),
    (int, "<class 'int'> must be"),
    ("", "'' must be"),
    ({"a": 1}, "{'a': 1} must be"),
]


@pytest.mark.parametrize(("said", "problem"), WRONG)
@pytest.mark.parametrize("place", ["policies", "task", "actor"])
def test_what_is_no_rule_is_refused_where_it_is_said(
    said: Any, problem: str, place: str, unique: str
) -> None:
    """The error names the place, the value and the rule."""
    with pytest.raises(ConfigurationError, match="retry_on: ") as caught:
        if place == "policies":
            celery.install(ByHand(unique, natively).app, Bridge(), policies={"a.*": {"retry_on": said}})
        elif place == "task":
            ojs_task(retry_on=said)
        else:
            broker = StubBroker()
            broker.add_middleware(OJSRetries(Bridge()))
            dramatiq.actor(broker=broker, actor_name="a", queue_name=unique, ojs_retry_on=said)(print)
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["shop.SoldOut", "nowhere", "tests.engine.test_retry_on.RULES"])
@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_a_worker_does_not_start_with_a_name_that_stands_for_nothing(
    name: str, framework: str, tmp_path: Path, unique: str
) -> None:
    """The error names the file, the pattern and the name; a process that only sends imports nothing."""
    file = tmp_path / "policies.json"
    file.write_text(json.dumps({"policies": {"c*": {"retry_on": ["OSError", name]}}}))
    said = rf"policies.json: policies\['c\*'\]: retry_on: '{name}' "
    if framework == "celery":
        hand = ByHand(unique, lambda app: celery.install(app, Bridge(), policies=str(file)))
        hand.define("charge")
        hand.send("charge", "ok", ojs_retry={"max_attempts": 2})
        with pytest.raises(ConfigurationError, match=said):
            check_app(hand.app)
        return
    stub = StubBroker()
    install_dramatiq(stub, Bridge(), policies=str(file))
    actor = dramatiq.actor(print, broker=stub, actor_name="charge", queue_name=unique)
    actor.send_with_options(ojs_retry={"max_attempts": 2})
    with pytest.raises(ConfigurationError, match=said):
        dramatiq.Worker(stub).start()


def test_policy_check_reads_it(tmp_path: Path) -> None:
    """The check does not import the classes that a file names."""
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[policies."a.*"]\nmax_attempts = 2\nretry_on = ["shop.SoldOut"]\n')
    bad.write_text('[default]\nretry_on = 3\n[policies."a.*"]\nretry_on = "asked"\n')
    assert "policies['a.*']: OK" in run("policy", "check", str(good)).out
    checked = run("policy", "check", str(bad))
    assert "default: retry_on: 3 must be" in checked.err
    assert checked.code == 1


def test_it_is_no_field_of_a_policy() -> None:
    """Neither a message nor an app's default can set `retry_on`."""
    with pytest.raises(InvalidRetryPolicy, match='retry_on: "asked" stands beside a policy'):
        Bridge(retry={"retry_on": "asked"})


#: a policy's retry_on, a task's own, what is raised -> runs
SAID: list[tuple[Any, Any, str, int]] = [
    (None, None, "OSError", 3),
    ("asked", None, "OSError", 1),
    ("asked", None, "native", 2),
    ("asked", None, "ours", 2),
    ("asked", None, "snooze", 2),
    (["OSError"], None, "OSError", 3),
    (["OSError"], None, "KeyError", 1),
    (["OSError"], None, "native", 2),
    ("asked", "failure", "KeyError", 3),
    ("failure", [KeyError], "OSError", 1),
]
#: what a Celery task does, and what an actor raises
MAKES: dict[str, tuple[list[Step], Callable[[], BaseException]]] = {
    "OSError": ([raises(OSError)], OSError),
    "KeyError": ([raises(KeyError, "k")], lambda: KeyError("k")),
    "native": ([retries(countdown=0), "ok"], lambda: DramatiqsRetry(delay=1)),
    "ours": ([raises(Retry, "a.b"), "ok"], lambda: Retry("a.b")),
    "snooze": ([raises(Snooze, "PT0.01S"), "ok"], lambda: Snooze("PT0.01S")),
}


@pytest.mark.parametrize(("policy", "own", "raised", "runs"), SAID)
def test_on_celery(policy: Any, own: Any, raised: str, runs: int, unique: str) -> None:
    """The task's own rule wins over that of a pattern; a retry that the code asks for always counts."""
    entry = {**QUICK, "max_attempts": 3, "retry_on": policy}
    hand = ByHand(unique, lambda app: celery.install(app, Bridge(), policies={"c*": entry}))
    hand.define("charge", **({"base": OJSTask, "ojs_retry_on": own} if own else {}))
    job = hand.send("charge", *MAKES[raised][0])
    hand.deliver_all()
    assert len(hand.runs(job)) == runs


@pytest.mark.parametrize(("policy", "own", "raised", "runs"), SAID)
def test_on_dramatiq(policy: Any, own: Any, raised: str, runs: int, unique: str) -> None:
    fleet = Fleet(StubBroker(), unique, policies={"c*": {**QUICK, "max_attempts": 3, "retry_on": policy}})

    def act(n: int) -> None:
        if n == 1 or raised.endswith("Error"):
            raise MAKES[raised][1]()

    job = fleet.send(fleet.actor(act, name="charge", ojs_retry_on=own))
    with fleet.working():
        fleet.end(job)
    assert len(job.runs) == runs
