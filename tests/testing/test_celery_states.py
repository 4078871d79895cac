"""The states of results, the handlers of tasks and expiries under Celery, while jobs wait in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task

import ojs_bridge.celery
from ojs_bridge import Bridge
from ojs_bridge.testing import VirtualTime, virtual_time
from tests.testing.conftest import CRM, NOWHERE

called: list[Any] = []


class Handled(Task):
    """A base class of a user's, whose handlers note their calls."""

    abstract = True

    def on_retry(self, exc: Any, *_: Any) -> None:
        called.append(["on_retry", repr(exc)])

    def on_success(self, *_: Any) -> None:
        called.append(["on_success"])

    def on_failure(self, exc: Any, *_: Any) -> None:
        called.append(["on_failure", repr(exc)])

    def after_return(self, status: str, *_: Any) -> None:
        called.append(["after_return", status])


@pytest.fixture
def app() -> Celery:
    called.clear()
    app = Celery("shop", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    ojs_bridge.celery.install(app, Bridge(), policies={})
    return app


@pytest.fixture
def ojs(app: Celery) -> Iterator[VirtualTime]:
    with virtual_time(app) as ojs:
        yield ojs


def steps(app: Celery, *errors: BaseException | None, **options: Any) -> Any:
    """A task that raises these errors, run by run; the last one repeats."""
    left = list(errors)

    @ojs_bridge.celery.ojs_task(app, base=Handled, shared=False, name="handled", retry=CRM, **options)
    def handled() -> str:
        error = left.pop(0) if len(left) > 1 else left[0]
        if error:
            raise error
        return "ok"

    return handled


def test_states_and_handlers_are_those_of_celery(app: Celery, ojs: VirtualTime) -> None:
    job = steps(app, OSError("one"), OSError("two"), None).delay()
    states = [job.state]
    for _ in range(3):
        ojs.step()
        states.append(job.state)
    assert states == ["PENDING", "RETRY", "RETRY", "SUCCESS"]
    assert called == [
        ["on_retry", "OSError('one')"],
        ["on_retry", "OSError('two')"],
        ["on_success"],
        ["after_return", "SUCCESS"],
    ]


def test_the_last_failure_is_shown_as_celerys(app: Celery, ojs: VirtualTime) -> None:
    failed = steps(app, KeyError("k")).delay()
    ojs.run()
    retried = [["on_retry", "KeyError('k')"]] * 4
    assert called == [*retried, ["on_failure", "KeyError('k')"], ["after_return", "FAILURE"]]
    with pytest.raises(KeyError):
        failed.get(timeout=1)
    assert "in handled" in failed.traceback


def test_a_job_that_waits_for_its_retry_says_so(app: Celery, ojs: VirtualTime) -> None:
    job = steps(app, OSError("first"), None).delay()
    ojs.step()
    stored = app.AsyncResult(job.id)
    assert stored.state == "RETRY"
    assert isinstance(stored.result, OSError)
    assert "in handled" in stored.traceback
    assert stored.traceback.rstrip().endswith("OSError('first')")
    ojs.run()
    assert job.state == "SUCCESS"


@pytest.mark.requirement("DLQ-003")
def test_a_replay_has_no_expiry_that_is_over(app: Celery, ojs: VirtualTime) -> None:
    task = steps(app, *[OSError()] * 5, None)
    job = task.apply_async(expires=timedelta(hours=1).total_seconds())
    ojs.run()
    assert ojs.dead_letters[0].message["headers"]["expires"]
    ojs.advance("PT1H")
    ojs.bridge.dead_letters.replay(job.id)
    assert ojs.run().outcome == "completed"
    assert ojs.dead_letters == ()


def test_a_job_expires_before_its_retry(app: Celery, ojs: VirtualTime) -> None:
    steps(app, OSError()).apply_async(expires=60)
    job = ojs.run()
    assert (job.attempts, job.outcome) == (2, "dead_letter")
    assert job.reason.endswith("and the job expires before a retry in 60.000 s")
