"""The hazards of a Celery plan: where each one stands, and where it does not."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pickle
import zlib
from typing import Any, ClassVar

import pytest
from celery import Task
from kombu.serialization import register

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.celery.installation import is_bridged
from ojs_bridge.cli.plan import _statements, _worst
from ojs_bridge.migration.plan.celery import plans as of_celery
from tests.migration.planning import app_with, only

AUTO: dict[str, Any] = {"autoretry_for": (OSError,)}
STEADY = {**AUTO, "retry_backoff": True, "retry_jitter": False}
BOUND: dict[str, Any] = {"bind": True}
REDIS = {"broker_url": "redis://localhost:1/0"}
RABBITMQ = {"broker_url": "amqp://localhost:1//"}


class Once(type):
    """A metaclass with a class of each name, and no second."""

    made: ClassVar[set[str]] = set()

    def __new__(cls, name: str, bases: tuple[type, ...], *rest: Any) -> Any:
        if name in cls.made:
            raise KeyError(name)
        cls.made.add(name)
        return super().__new__(cls, name, bases, *rest)


class Single(Task, metaclass=Once):
    abstract = True


class Backing(Task):
    abstract = True
    retry_backoff = 30
    retry_backoff_max = 900


class Retrying(Task):
    abstract = True
    autoretry_for = (OSError,)


def fails() -> None:
    """A task's body."""
    raise OSError("down")


def asks(self: Task) -> None:
    """A task that asks for a retry."""
    raise self.retry(exc=OSError("down"))


def asks_in_time(self: Task) -> None:
    """A task that asks for a retry, and says when."""
    raise self.retry(exc=OSError("down"), countdown=4000, max_retries=2)


def hazards_of(body: Any, options: dict[str, Any], conf: dict[str, Any]) -> dict[str, str]:
    """The hazards of a task of an app with these settings, by name."""
    hazards = only(app_with(body, conf, **options)).hazards
    found = {hazard.name: hazard.text for hazard in hazards}
    assert len(found) == len(hazards)
    return found


#: the hazard: a body, options and settings with it, and what its sentence says
THERE: list[tuple[str, Any, dict[str, Any], dict[str, Any], str]] = [
    ("infinite-retries", fails, {**AUTO, "max_retries": None}, {}, "max_retries=None"),
    ("infinite-retries", asks, {**BOUND, "max_retries": None}, {}, "so does the bridge"),
    ("counts-retries", fails, {**AUTO, "max_retries": 5}, {}, "max_retries=5 counts retries, so that a job "
     "runs 6 times; max_attempts counts runs: 6, not 5"),
    ("counts-retries", fails, {**AUTO, "retry_kwargs": {"max_retries": 7}}, {},
     "max_retries=7 counts retries"),
    ("counts-retries", asks_in_time, BOUND, {}, "max_retries=2 counts retries, so that a job runs 3 times"),
    ("unused-max-retries", fails, {"max_retries": 5}, {}, "max_retries=5 is never read"),
    ("unused-retry-options", fails, {"retry_backoff": True}, {}, "retry_backoff=True without autoretry_for"),
    ("unused-retry-options", asks, {**BOUND, "base": Backing}, {}, "retry_backoff=30, retry_backoff_max=900"),
    ("unused-retry-options", fails, {"retry_kwargs": {"max_retries": 7}}, {}, "{'max_retries': 7} without"),
    ("beyond-visibility-timeout", fails, {**AUTO, "default_retry_delay": 3601}, REDIS, "1 h"),
    ("beyond-visibility-timeout", asks_in_time, BOUND, REDIS, "1 h 6 min"),
    ("beyond-visibility-timeout", fails, STEADY | {"max_retries": 3},
     {**REDIS, "broker_transport_options": {"visibility_timeout": 3}}, "(visibility_timeout, 3 s)"),
    ("beyond-visibility-timeout", fails, {**STEADY, "retry_backoff_max": 10**6, "max_retries": 25},
     {**REDIS, "broker_transport_options": {"visibility_timeout": 900_000}}, "more than once"),
    ("beyond-visibility-timeout", fails, {**AUTO, "default_retry_delay": 3601},
     {"broker_url": "sentinel://localhost:1;sentinel://localhost:2"}, "1 h"),
    ("beyond-consumer-timeout", asks_in_time, BOUND, RABBITMQ, "30 min by default"),
    ("time-limit", fails, {**AUTO, "time_limit": 30}, {}, "time_limit=30 ends a job at once"),
    ("time-limit", asks, BOUND, {"task_time_limit": 40}, "time_limit=40"),
    ("expires", fails, {**AUTO, "expires": 500}, {}, "the retries take up to 9 min"),
    ("acks-early", fails, {}, {}, "acks_late is off: a job that runs when its worker is killed is lost"),
    ("acks-early", fails, AUTO, {}, "is lost"),
    ("acks-late-alone", fails, {"acks_late": True}, {}, "acks_late=True without reject_on_worker_lost"),
    ("acks-late-alone", fails, {}, {"task_acks_late": True}, "not run again"),
    ("reject-without-acks-late", fails, {"reject_on_worker_lost": True}, {}, "no effect without acks_late"),
    ("poison-job", fails, {"acks_late": True, "reject_on_worker_lost": True}, {}, "uncounted"),
    ("retry-on-worker-lost", fails, {"retry_on_worker_lost": True}, {}, "a lost worker uses an attempt"),
    ("pickle", fails, {"serializer": "pickle"}, {}, "the task's serializer is pickle"),
    ("pickle", fails, {}, {"accept_content": ["json", "pickle"]}, "accept_content takes pickle"),
    ("throws", fails, {"throws": (KeyError,)}, {}, "throws=KeyError only lowers the log level"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "options", "conf", "text"), THERE)
def test_a_hazard(name: str, body: Any, options: dict[str, Any], conf: dict[str, Any], text: str) -> None:
    """A hazard is one line. It names the value and the consequence."""
    found = hazards_of(body, options, conf)
    assert text in found[name]
    assert "\n" not in found[name]


#: the hazard that is not there: a body, options and settings like those that have it
NOT_THERE: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("infinite-retries", fails, {"max_retries": None}, {}),
    ("counts-retries", asks, {**BOUND, "max_retries": 0}, {}),
    ("counts-retries", fails, {**AUTO, "max_retries": None}, {}),
    ("unused-max-retries", asks, {**BOUND, "max_retries": 5}, {}),
    ("unused-retry-options", fails, {**AUTO, "retry_backoff": True}, {}),
    ("unused-retry-options", fails, {"retry_backoff": False}, {}),
    ("unused-retry-options", fails, {"base": Retrying, "retry_backoff": 3}, {}),
    ("stays-native", fails, {**AUTO}, {}),
    ("beyond-visibility-timeout", fails, {**AUTO, "default_retry_delay": 3600}, REDIS),
    ("beyond-visibility-timeout", fails, {"default_retry_delay": 3601}, REDIS),
    ("beyond-visibility-timeout", asks_in_time, BOUND, RABBITMQ),
    ("beyond-consumer-timeout", fails, {**AUTO, "default_retry_delay": 1800}, RABBITMQ),
    ("time-limit", fails, {"time_limit": 30}, {}),
    ("expires", fails, {**AUTO, "expires": 540}, {}),
    ("expires", fails, {"expires": 1}, {}),
    ("acks-late-alone", fails, {"acks_late": True, "reject_on_worker_lost": True}, {}),
    ("acks-late-alone", fails, {}, {}),
    ("reject-without-acks-late", fails, {"acks_late": True, "reject_on_worker_lost": True}, {}),
    ("pickle", fails, {}, {}),
    ("throws", fails, {"throws": ()}, {}),
]


@pytest.mark.parametrize(("name", "body", "options", "conf"), NOT_THERE)
def test_no_hazard(name: str, body: Any, options: dict[str, Any], conf: dict[str, Any]) -> None:
    """Harmless settings that look like a hazard are not reported as one."""
    assert name not in hazards_of(body, options, conf)


@pytest.mark.parametrize(
    ("options", "is_exact"),
    [({}, True), ({"acks_late": True}, False), ({"acks_late": True, "reject_on_worker_lost": True}, False),
     ({"expires": 1}, False), ({"time_limit": 3}, False), ({"retry_on_worker_lost": True}, False),
     ({"throws": (KeyError,)}, True)],
)  # fmt: skip
def test_a_hazard_that_is_a_difference(options: dict[str, Any], is_exact: bool) -> None:
    """A task that the bridge treats otherwise is not one that does exactly what it does today."""
    found = only(app_with(fails, **STEADY, **options))
    assert (found.differences, found.exact) == ((), is_exact)
    differs = [text for heading, text in _statements(found) if heading == "differs"]
    assert (differs == ["in nothing"]) is is_exact
    assert any(text.startswith("changes: ") or "bridge" in text for _, text in _worst(found)) is not is_exact


def _signed(data: bytes) -> bytes:
    return hmac.new(b"key", data, hashlib.sha256).digest() + data


def _checked(data: Any) -> Any:
    if not hmac.compare_digest(bytes(data), _signed(bytes(data)[32:])):
        raise ValueError("not signed")
    return pickle.loads(bytes(data)[32:])


#: A decoder of a fleet's own, and whether it runs what anyone may have sent.
DECODERS: dict[str, tuple[Any, bool]] = {
    "pickle-signed": (_checked, False),
    "pickle-of-nothing": (json.loads, False),
    "fast": (pickle.loads, True),
    "small": (lambda data: pickle.loads(zlib.decompress(data)), True),
    "readable": (lambda data: pickle.loads(base64.b64decode(data)), True),
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_decoder_does_and_not_its_name(name: str) -> None:
    """A serializer is a hazard if its decoder runs the code of a pickle that nobody has signed."""
    decode, is_hazard = DECODERS[name]
    register(name, json.dumps, decode, f"application/x-{name}", "binary")
    for conf in ({"task_serializer": name}, {"accept_content": ["json", name]}):
        assert ("pickle" in hazards_of(fails, {}, conf)) is is_hazard


def test_autoretry_that_celery_does_not_read() -> None:
    """Options that are set on a task which is there already make no automatic retries."""
    app = app_with(fails)
    vars(app.tasks["job"]).update(AUTO)
    found = only(app)
    assert found.policy == {"max_attempts": 1}
    assert "unused-autoretry" in {hazard.name for hazard in found.hazards}


def test_throws_rules_nothing_out() -> None:
    """Celery retries what it names like anything else, and a policy that ruled it out would not."""
    found = only(app_with(fails, **AUTO, throws=(OSError,)))
    assert found.policy is not None
    assert "non_retryable_errors" not in found.policy


def test_a_moved_task_has_the_hazards_of_its_own_options() -> None:
    """The plan leaves out the hazards of acknowledgements, which the bridge then handles."""
    app = app_with(fails, acks_late=True, reject_on_worker_lost=True, throws=(KeyError,))
    install(app, Bridge())
    found = only(app)
    assert {hazard.name for hazard in found.hazards} == {"already-moved", "throws"}


def test_a_task_whose_class_cannot_be_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    """`install` says it, leaves the task to Celery, and takes the others."""
    Once.made.clear()
    app = app_with(asks, bind=True, base=Single)
    app.task(name="other", shared=False)(fails)
    told = {hazard.name: hazard.text for hazard in only(app).hazards}
    install(app, Bridge(), policies={"*": {"max_attempts": 2}})
    app.finalize()
    sentence = "its class asks cannot be taken over: KeyError: 'asks'"
    assert told["stays-native"] == f"{sentence}; `install` leaves the task to Celery"
    assert caplog.messages == [f"task job stays native: {sentence}"]
    assert [is_bridged(app.tasks[name]) for name in ("job", "other")] == [False, True]
    assert type(app.tasks["job"]).__mro__[1] is Single
    assert app.tasks["job"].apply().state == "FAILURE"


#: a task -> its entry under a plan that protects its jobs
PROTECTED: list[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (fails, {}, {}, {"acks_late": True, "retry_on": "asked", "max_attempts": 3}),
    (fails, {"acks_late": True}, {}, {"retry_on": "asked", "max_attempts": 3}),
    (fails, {}, {"task_acks_late": True}, {"retry_on": "asked", "max_attempts": 3}),
    (fails, {**AUTO, "max_retries": 5}, {}, {"acks_late": True, "max_attempts": 6}),
    (
        asks,
        {**BOUND, "max_retries": 0},
        {},
        {"acks_late": True, "max_attempts": 1, "on_exhaustion": "dead_letter"},
    ),
]


@pytest.mark.parametrize(("body", "options", "conf", "entry"), PROTECTED)
def test_a_plan_that_protects(
    body: Any, options: dict[str, Any], conf: dict[str, Any], entry: dict[str, Any]
) -> None:
    """Each task has `acks_late`; one that retries nothing has attempts, or a letter, for a killed job."""
    (found,) = of_celery(app_with(body, conf, **options), protect=True)
    assert {
        name: value
        for name, value in found.entry.items()
        if name in ("acks_late", "retry_on", "max_attempts", "on_exhaustion")
    } == entry
    assert ("acks_late" in found.entry) is any(text.startswith("acks_late:") for text in found.differences)
    assert not (found.exact and "acks_late" in found.entry)
