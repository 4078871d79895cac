"""Per-job policies: checked where a job is enqueued, and what becomes of those that were not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import GroupCallbacks, Middleware
from dramatiq.rate_limits.backends import StubBackend

from ojs_bridge import Bridge, InvalidRetryPolicy, RetryPolicy
from ojs_bridge.dramatiq import install
from tests.on_dramatiq.fleet import QUICK, Fleet, Sent, dead_messages, left_in
from tests.servers import eventually

#: An invalid partial policy, and what the error names.
INVALID: list[tuple[Any, str]] = [
    ({"max_attempts": -1}, "max_attempts: -1"),
    ({"max_attempts": "3"}, "max_attempts"),
    ({"initial_interval": "1s"}, "initial_interval"),
    ({"initial_interval": "PT1S\n"}, "initial_interval"),
    ({"backoff_coefficient": 0.5}, "backoff_coefficient"),
    ({"max_interval": "PT0.001S"}, "max_interval"),
    ({"on_exhaustion": "explode"}, "on_exhaustion"),
    ({"non_retryable_errors": [""]}, "non_retryable_errors"),
    ({"attempts": 3}, "attempts"),
    ({"backoff_strategy": lambda n, failure: 1.0}, "backoff_strategy"),
    ({"non_retryable_errors": ["some.error.type"] * 1000}, "budget"),
    ("often", "often"),
]


def fails(n: int) -> None:
    raise OSError("down")


@pytest.mark.requirement("RET-03", "RET-16", "RET-19", "RET-20")
@pytest.mark.parametrize(("policy", "named"), INVALID)
def test_an_invalid_policy_is_refused_and_nothing_is_sent(
    broker: dramatiq.Broker, unique: str, policy: Any, named: str
) -> None:
    fleet = Fleet(broker, unique)
    actor = fleet.actor(fails)
    message = unchecked(actor, "key", ojs_retry=policy)
    for _ in range(2):
        with pytest.raises(InvalidRetryPolicy, match=named):
            actor.message_with_options(args=("key",), ojs_retry=policy)
        with pytest.raises(InvalidRetryPolicy, match=named) as caught:
            broker.enqueue(message)
    assert caught.value.type == "validation.retry_policy_invalid"
    assert actor.actor_name in str(caught.value)
    if not isinstance(broker, dramatiq.brokers.rabbitmq.RabbitmqBroker):
        assert left_in(broker, unique) == 0


@pytest.mark.requirement("RET-16")
def test_pipelines_and_groups_are_checked_when_they_are_enqueued(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    fleet.broker.add_middleware(GroupCallbacks(StubBackend()))
    actor = fleet.actor(fails)
    fine, bad = actor.message("a"), unchecked(actor, "b", ojs_retry={"max_attempts": -1})
    group = dramatiq.group([fine], broker=fleet.broker)
    group.add_completion_callback(bad)
    sendings = [
        dramatiq.pipeline([fine, fine, bad], broker=fleet.broker).run,
        dramatiq.group([bad, fine], broker=fleet.broker).run,
        group.run,
    ]
    for send in sendings:
        with pytest.raises(InvalidRetryPolicy, match=r"max_attempts: -1"):
            send()
    assert fleet.left() == 0


def test_policies_in_pipelines_groups_and_callbacks_are_followed(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    fleet.broker.add_middleware(GroupCallbacks(StubBackend()))
    first, actor = fleet.declare(lambda: None), fleet.actor(lambda n, *_: fails(n))
    two, three, four = (
        actor.message_with_options(args=(f"{n}",), ojs_retry={"max_attempts": n}, pipe_ignore=True)
        for n in (2, 3, 4)
    )
    group = dramatiq.group([first.message()], broker=fleet.broker)
    group.add_completion_callback(four)
    with fleet.working():
        dramatiq.pipeline([first.message(), two], broker=fleet.broker).run()
        dramatiq.group([three], broker=fleet.broker).run()
        group.run()
        for message in (two, three, four):
            fleet.end(Sent(message.message_id))
    assert [len(fleet.runs[key]) for key in ("2", "3", "4")] == [2, 3, 4]


def test_a_replayed_policy_is_the_job_s_own(fleet: Fleet) -> None:
    policy = {"max_attempts": 1, "on_exhaustion": "dead_letter"}
    job = fleet.send(fleet.actor(fails), ojs_retry=policy)
    fleet.end(job)
    fleet.bridge.dead_letters.replay(job.id)
    fleet.end(job, nth=2)
    assert fleet.bridge.dead_letters.get(job.id).retry == policy


def unchecked(actor: dramatiq.Actor[..., Any], *args: Any, **options: Any) -> dramatiq.Message[Any]:
    """Make a message without its actor, which would check a policy."""
    return dramatiq.Message(actor.queue_name, actor.actor_name, args, {}, options)


def sent_natively(
    fleet: Fleet, actor: dramatiq.Actor[..., Any], *, delay: int | None = None, **options: Any
) -> Sent:
    """Send a message as a producer without the middleware does."""
    message = unchecked(actor, "key", **options)
    fleet.retries.before_enqueue, hook = lambda *a: None, fleet.retries.before_enqueue  # type: ignore[method-assign]
    try:
        fleet.broker.enqueue(message, delay=delay)
    finally:
        fleet.retries.before_enqueue = hook  # type: ignore[method-assign]
    return Sent(message.message_id, fleet.runs["key"])


def test_a_producer_without_the_middleware_is_understood(fleet: Fleet) -> None:
    fleet.runs["key"].clear()
    job = sent_natively(fleet, fleet.actor(fails), ojs_retry={"max_attempts": 2})
    end = fleet.end(job)
    assert end.data["total_attempts"] == 2
    assert [error["attempt"] for error in job.runs[-1].ojs["errors"]] == [1]


def test_a_delayed_message_that_no_producer_has_checked_ends_no_consumer(fleet: Fleet) -> None:
    fleet.runs["key"].clear()
    bad = sent_natively(fleet, fleet.actor(fails), delay=50, ojs_retry={"max_attempts": -1})
    good = fleet.send(fleet.actor(lambda n: None), delay=100)
    assert fleet.end(bad).data["last_error"]["type"] == "validation.retry_policy_invalid"
    eventually(lambda: good.runs, what="the delayed message beside it")
    assert bad.runs == []


def test_a_pipeline_of_a_producer_without_the_middleware_goes_on_whatever_it_asks(fleet: Fleet) -> None:
    last = unchecked(fleet.declare(lambda: None), ojs_retry={"max_attempts": -1}, pipe_ignore=True)
    first = fleet.declare(lambda key: None)
    sent_natively(fleet, first, pipe_target=last.asdict())
    event = fleet.end(Sent(last.message_id))
    assert event.data["last_error"]["type"] == "validation.retry_policy_invalid"
    assert fleet.bridge.dead_letters.get(last.message_id).cause == "invalid"


def test_a_message_for_an_actor_that_policies_leave_native_is_refused(stub: StubBroker, unique: str) -> None:
    for name in ("a.in", "b.out"):
        dramatiq.actor(lambda: None, broker=stub, actor_name=name, queue_name=unique)
    install(stub, policies={"a.*": QUICK})
    stub.get_actor("a.in").send_with_options(ojs_retry={"max_attempts": 2})
    with pytest.raises(InvalidRetryPolicy, match=r"b\.out"):
        stub.get_actor("b.out").send_with_options(ojs_retry={"max_attempts": 2})


def test_a_message_of_an_unknown_actor_is_dramatiq_s_own_matter(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    fleet.declare(lambda: None)
    message = dramatiq.Message(fleet.queue, "nobody", (), {}, {"ojs": {"v": 1, "attempt": 1}})
    with fleet.working():
        fleet.broker.enqueue(message)
        eventually(lambda: dead_messages(fleet.broker, fleet.queue))
    assert fleet.left() == 0


def test_a_damaged_timestamp_harms_nothing(fleet: Fleet) -> None:
    actor = fleet.actor(lambda n: None)
    message = dramatiq.Message(
        fleet.queue, actor.actor_name, ("t",), {}, {}, message_timestamp="then",  # type: ignore[arg-type]
    )  # fmt: skip
    fleet.broker.enqueue(message)
    assert fleet.end(Sent(message.message_id)).type == "job.completed"


def test_nothing_of_a_group_is_sent_when_a_member_has_an_invalid_policy(stub: StubBroker) -> None:
    install(stub, Bridge())
    actor = dramatiq.actor(lambda: None, broker=stub, actor_name="charge")
    with pytest.raises(InvalidRetryPolicy, match="ojs_retry of charge: max_interval: PT5M, the default"):
        dramatiq.group(
            [actor.message(), actor.message_with_options(ojs_retry={"initial_interval": "PT10M"})],
            broker=stub,
        ).run()
    assert stub.queues["default"].unfinished_tasks == 0


MISNAMED: list[dict[str, Any]] = [
    {"retry": {"max_attempts": 5}},
    {"retry_policy": {"max_attempts": 5}},
    {"policy": RetryPolicy(max_attempts=5)},
    *({name: 5} for name in sorted(RetryPolicy.model_fields)),
]


@pytest.mark.parametrize("options", MISNAMED, ids=str)
def test_a_misnamed_policy_is_refused_by_name(stub: StubBroker, options: dict[str, Any]) -> None:
    install(stub, Bridge())
    (name,) = options
    with pytest.raises(InvalidRetryPolicy, match=f"actor charge: {name}: .*ojs_retry="):
        dramatiq.actor(lambda: None, broker=stub, actor_name="charge", **options)
    actor = dramatiq.actor(lambda: None, broker=stub, actor_name="charge")
    for send in (actor.send_with_options, actor.message_with_options):
        with pytest.raises(InvalidRetryPolicy, match=f"a message of charge: {name}: .*ojs_retry="):
            send(**options)
    assert stub.queues["default"].unfinished_tasks == 0


def test_a_user_s_own_options_of_such_names_are_the_user_s(stub: StubBroker) -> None:
    class Tagging(Middleware):
        actor_options: ClassVar[set[str]] = {"policy", "max_attempts"}

    stub.add_middleware(Tagging())
    install(stub, Bridge())
    actor = dramatiq.actor(lambda: None, broker=stub, actor_name="charge", policy="gold", max_attempts=3)
    actor.send_with_options(policy={"max_attempts": 5}, max_attempts=4)
    actor.send_with_options(retry=True)
    assert stub.queues["default"].unfinished_tasks == 2


def test_between_intervals_a_native_option_gives_way_to_a_policy(stub: StubBroker) -> None:
    retries = install(
        stub, Bridge(), policies={"c*": {"max_interval": "PT1S"}, "l*": {"initial_interval": "PT10M"}}
    )
    waits = []
    for name in ("charge", "later"):
        dramatiq.actor(lambda: None, broker=stub, actor_name=name, min_backoff=20_000, max_backoff=40_000)
        task = retries.actors.tasks[name]
        assert task is not None
        waits.append((task.policy.initial_interval.total_seconds(), task.policy.max_interval.total_seconds()))
    assert waits == [(1, 1), (600, 600)]
