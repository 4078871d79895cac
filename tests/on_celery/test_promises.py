"""Set-ups of a task or an app under which a job would be lost or never end, and what is done about them."""

import gc
import os
import signal
import weakref
from typing import Any

import gevent
import pytest
from celery import Celery

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy
from ojs_bridge.celery import OJSTask, install, ojs_task
from ojs_bridge.celery.ends import Over, telling
from ojs_bridge.celery.installation import installation, task_policy
from ojs_bridge.celery.run import is_the_tasks_own, undisturbed


@pytest.fixture
def app() -> Celery:
    """An app in memory."""
    return Celery("promises", broker="memory://", backend="cache+memory://", set_as_current=False)


def nothing() -> None:
    """Do nothing."""


def bound(self: Any) -> None:
    """Do nothing, bound."""


def taking(payload: Any) -> None:
    """Do nothing with something."""


def test_what_requeues_an_ended_job_is_refused(app: Celery) -> None:
    """Such a job would run again, for ever, after its policy has ended it."""
    option = {"reject_on_worker_lost": True}
    with pytest.raises(ConfigurationError, match="task nothing: reject_on_worker_lost="):
        ojs_task(app, **option)(nothing)
    with pytest.raises(ConfigurationError, match="task based: reject_on_worker_lost="):
        app.task(shared=False, base=OJSTask, name="based", lazy=False, **option)(nothing)


@pytest.mark.parametrize("moved", [True, False], ids=["installed", "ojs_task"])
def test_settings_cannot_requeue_an_ended_job_either(app: Celery, moved: bool) -> None:
    """Celery's setting is for the tasks that stay native."""
    app.conf.task_reject_on_worker_lost = True
    make = (
        app.task(shared=False, name="t", lazy=False)
        if moved
        else ojs_task(app, shared=False, name="t", lazy=False)
    )
    task = make(nothing)
    install(app, policies=None if moved else {})
    app.finalize()
    task = app.tasks["t"]
    assert task.reject_on_worker_lost is False


def test_an_untouched_tasks_own_delay_is_kept(app: Celery) -> None:
    """`self.retry()` without a countdown waited `default_retry_delay`, and still does."""
    app.task(shared=False, bind=True, name="slow", default_retry_delay=600, max_retries=4)(bound)
    install(app)
    app.finalize()
    policy = task_policy(app, app.tasks["slow"]).policy
    assert policy.to_ojs()["initial_interval"] == policy.to_ojs()["max_interval"] == "PT10M"
    assert (policy.max_attempts, policy.backoff_strategy, policy.jitter) == (5, "none", False)


def test_a_policy_for_a_native_task_is_refused_and_not_ignored(app: Celery) -> None:
    """Celery would not read the policy."""
    for name in ("a.in", "b.out"):
        app.task(shared=False, name=name)(nothing)
    install(app, policies={"a.*": {}})
    app.finalize()
    app.tasks["a.in"].apply_async(ojs_retry={"max_attempts": 2})
    with pytest.raises(InvalidRetryPolicy, match=r"ojs_retry of b\.out: this task is not under the bridge"):
        app.tasks["b.out"].apply_async(ojs_retry={"max_attempts": 2})


def test_a_partial_policy_may_rely_on_the_apps(app: Celery) -> None:
    """Only the merged policy ever runs, so only it must be whole."""
    install(app, Bridge(retry={"max_interval": "PT1H"}), policies={"x": {"initial_interval": "PT20M"}})
    task = ojs_task(app, shared=False, retry={"initial_interval": "PT10M"}, name="x", lazy=False)(nothing)
    assert task_policy(app, task).policy.to_ojs()["initial_interval"] == "PT10M"


def test_one_bridge_serves_one_app(app: Celery) -> None:
    """A dead letter does not say which app it came from."""
    bridge = Bridge()
    install(app, bridge)
    with pytest.raises(ConfigurationError, match="already serves another celery app"):
        install(Celery("other", broker="memory://", set_as_current=False), bridge)


@pytest.mark.parametrize(("given", "confirms"), [({}, True), ({"confirm_publish": False}, False)], ids=str)
def test_rabbitmq_confirms_what_the_bridge_publishes(
    rabbitmq_url: str, given: dict[str, bool], confirms: bool
) -> None:
    """A user who says otherwise is obeyed, and what Celery itself publishes is left as it was."""
    app = Celery("confirmed", broker=rabbitmq_url, set_as_current=False, broker_transport_options=given)
    with installation(app).broker.producer() as producer, app.producer_or_acquire() as stock:
        assert bool(producer.channel.connection.confirm_publish) is confirms
        assert not stock.channel.connection.confirm_publish
    assert app.conf.broker_transport_options == given


def test_no_soft_time_limit_strikes_while_an_outcome_is_carried_out() -> None:
    """Billiard's signal is ignored then, and back in force afterwards."""
    struck = []
    before = signal.signal(signal.SIGUSR1, lambda *_: struck.append(1))
    try:
        with undisturbed():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert struck == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert struck == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("limit", "own"), [(None, True), ([30, None], False)], ids=["no limit", "hard limit"]
)
def test_a_timeout_of_the_tasks_own_is_its_failure(app: Celery, limit: Any, own: bool) -> None:
    """gevent's pool has a timeout in a task only when there is a hard time limit."""
    task = ojs_task(app, shared=False, name="t", lazy=False)(nothing)
    task.push_request(timelimit=limit)
    assert is_the_tasks_own(gevent.Timeout(1), task, task.request) is own
    assert not is_the_tasks_own(gevent.GreenletExit(), task, task.request)


def test_a_job_that_is_done_is_let_go_of_at_once(app: Celery) -> None:
    """No cycle keeps its arguments until the garbage collector comes."""

    class Payload:
        """Something large."""

    task = ojs_task(app, shared=False, name="t", lazy=False)(taking)
    payload = Payload()
    seen = weakref.ref(payload)
    gc.collect()
    gc.disable()
    try:
        task.apply((payload,))
        del payload
        assert seen() is None
    finally:
        gc.enable()


def test_an_error_that_two_jobs_raise_tells_of_the_end_of_each(app: Celery) -> None:
    """A module may raise one error object in all of its jobs: nothing of an earlier job may stick to it."""
    task, error = app.task(shared=False)(nothing), OSError("down")
    assert vars(telling(task, task.request, Over(error, is_acknowledged=False))) != {}
    assert vars(telling(task, task.request, Over(error))) == {}
