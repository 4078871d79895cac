"""The options of `self.retry(...)` and of `retry_kwargs`: the next run has them, as under Celery alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, signature
from kombu.serialization import loads

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.celery.installation import attach, bridge_of
from tests.on_celery.by_hand import ByHand, by_hand, natively
from tests.servers import eventually

#: Options that a message carries.
OPTIONS: list[dict[str, Any]] = [
    {"time_limit": 9, "soft_time_limit": 7},
    {"soft_time_limit": 7},
    {"time_limit": None},
    {"expires": 600},
    {"expires": "2099-01-01T00:00:00+00:00"},
    {"expires": None},
    {"link": signature("collect", (1,))},
    {"link_error": [signature("collect", (2,)), signature("collect", (3,))]},
    {"chain": [signature("collect", (4,))]},
    {"chord": signature("collect", (5,))},
    {"shadow": "other"},
    {"ignore_result": True},
    {"group_id": "g", "group_index": 4},
    {"root_id": "r", "parent_id": "p"},
    {"origin": "here"},
    {"replaced_task_nesting": 2},
    {"argsrepr": "(***)", "kwargsrepr": "{***}"},
    {"task_id": "another"},
    {"reply_to": "me"},
    {"priority": 7},
    {"serializer": "pickle"},
    {"serializer": "yaml"},
    {"compression": "gzip"},
    {"delivery_mode": 1},
    {"expiration": 500},
    {"user_id": "u"},
    {"stamped_headers": ["tenant"], "tenant": "acme"},
    {"headers": {"mine": 1}},
]
#: What every message has anew, and what only the bridge's messages have.
APART = {"eta", "ojs", "compression"}


def plain(app: Celery, folder: Path) -> None:
    install(app, Bridge())


def under_a_policy(app: Celery, folder: Path) -> None:
    retry = {"max_attempts": 4, "initial_interval": "PT0.001S", "on_exhaustion": "dead_letter"}
    install(app, Bridge(store=f"sqlite:///{folder}/{app.main}.db", retry=retry))


def parked(app: Celery, folder: Path) -> None:
    retry = {"max_attempts": 4, "initial_interval": "PT1H", "max_interval": "PT1H"}
    install(app, Bridge(store=f"sqlite:///{folder}/{app.main}.db", retry=retry, park_after="PT1S"))


def asking(installing: Any, unique: str, wish: dict[str, Any] | None = None, **options: Any) -> ByHand:
    """An app whose task `asks` calls self.retry with a wish, and `fails` leaves it to autoretry."""
    hand = by_hand(installing, unique)
    hand.app.conf.accept_content = ["json", "pickle", "yaml"]

    @hand.app.task(shared=False, bind=True, name="asks", lazy=False, max_retries=3)
    def asks(self: Task, *rest: Any) -> None:
        self.retry(**copy.deepcopy(wish or {}))

    @hand.app.task(shared=False, name="fails", lazy=False, autoretry_for=(KeyError,), **options)
    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("k")

    return hand


def retried(hand: ByHand, task: str, *args: Any) -> dict[str, Any]:
    """What the message of a job's retry says, and how it is written."""
    ids = {"task_id": "job", "root_id": "root", "parent_id": "parent", "reply_to": "reply"}
    hand.app.tasks[task].apply_async(args, headers={"old": 1}, soft_time_limit=30, **ids)
    assert hand.deliver()
    if (bridge := bridge_of(hand.app)) and bridge.store and bridge.retries.count():
        bridge.retries.run("job")
        bridge.start()
        eventually(lambda: bridge.retries.count() == 0, what="a published retry")
        bridge.stop()
    message = taken(hand)
    headers = {name: value for name, value in message.headers.items() if name not in APART}
    if headers["expires"]:
        # Each app has a clock of its own, which stands still.
        left = datetime.fromisoformat(headers["expires"]) - hand.app.now()
        headers["expires"] = Near(left.total_seconds())
    if "mine" in headers:
        # Celery forgets the headers of the run before, and the bridge does not.
        headers.setdefault("old", 1)
    body = loads(message.body, message.content_type, message.content_encoding, force=True)
    ours = ("delivery_tag", "delivery_info", "expiration" if headers["expires"] else "")
    properties = {name: value for name, value in message.properties.items() if name not in ours}
    compressed = message.headers.get("compression")
    priority = message.properties["delivery_info"].get("priority") or message.properties.get("priority")
    kind = {"content": message.content_type, "compressed": compressed, "priority": priority}
    return {**headers, **properties, **kind, "args": [*body[0]], "kwargs": body[1], **body[2]}


class Near(float):
    """Seconds that are the same but for the time that a test takes."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and abs(self - other) < 20

    __hash__ = float.__hash__


def taken(hand: ByHand) -> Any:
    message = hand.take()
    assert message is not None, hand.notes
    return message


@pytest.mark.parametrize("way", [plain, under_a_policy, parked])
@pytest.mark.parametrize("option", OPTIONS, ids=repr)
def test_the_next_run_has_the_options_of_a_retry(
    unique: str, tmp_path: Path, option: dict[str, Any], way: Callable[[Celery, Path], None]
) -> None:
    wish = {"exc": KeyError("k"), "countdown": 0.5, **option}
    native = retried(asking(natively, f"{unique}-native", wish), "asks")
    bridged = retried(asking(lambda app: way(app, tmp_path), unique, wish), "asks")
    assert bridged == native


@pytest.mark.parametrize("way", [plain, under_a_policy, parked])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_retries": 3, "countdown": 0.5, "time_limit": 9, "priority": 7, "headers": {"mine": 1}},
        {"countdown": 0.5, "expires": 600, "shadow": "other", "args": (7,), "max_retries": 3},
        {"countdown": 0.5, "kwargs": {"b": 8}, "serializer": "pickle", "queue": None},
    ],
    ids=["limits", "arguments", "names"],
)
def test_the_next_run_has_the_options_of_retry_kwargs(
    unique: str, tmp_path: Path, kwargs: dict[str, Any], way: Callable[[Celery, Path], None]
) -> None:
    native = retried(asking(natively, f"{unique}-native", retry_kwargs=kwargs), "fails", 5)
    bridged = retried(asking(lambda app: way(app, tmp_path), unique, retry_kwargs=kwargs), "fails", 5)
    assert bridged == native


@pytest.mark.parametrize(
    "option",
    [
        {"expires": "soon"},
        {"serializer": "none"},
        {"compression": "none"},
        {"queue": 5},
        {"args": (object(),)},
    ],
    ids=lambda option: next(iter(option)),
)
@pytest.mark.parametrize("way", [natively, plain, under_a_policy])
def test_a_retry_that_cannot_be_sent_is_kept_and_runs_once(
    unique: str, tmp_path: Path, option: dict[str, Any], way: Any
) -> None:
    """Celery rejects its message, and the job is lost; its dead letter says why it is not retried."""
    hand = by_hand_asking(way, unique, tmp_path, {"exc": OSError(), **option})
    hand.app.tasks["asks"].apply_async(task_id="job")
    hand.deliver_all()
    assert [note[0] for note in hand.notes if note[0] != "delivered"] == [
        "reject" if way is natively else "ack"
    ]
    if way is not natively:
        bridge = attach(hand.app)
        letter = (bridge.broker_letters if way is plain else bridge.dead_letters).get("job")
        assert letter.attempt == 1
        assert way is plain or "cannot be followed up" in letter.reason


def by_hand_asking(way: Any, unique: str, folder: Path, wish: dict[str, Any]) -> ByHand:
    return asking(natively if way is natively else lambda app: way(app, folder), unique, wish)


def test_a_limit_that_the_policy_says_is_said_once(
    unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hand = asking(lambda app: under_a_policy(app, tmp_path), unique, {"exc": OSError(), "max_retries": 9})
    for _ in range(2):
        hand.app.tasks["asks"].apply_async()
    hand.deliver_all()
    told = [r.getMessage() for r in caplog.records if "does not count" in r.getMessage()]
    assert told == ["task asks: self.retry(max_retries=...) does not count: its policy has max_attempts=4"]


def test_a_dead_letter_and_its_replay_have_the_options_of_the_retry_before(
    unique: str, tmp_path: Path
) -> None:
    link = signature("collect", (1,))
    wish = {"exc": OSError(), "time_limit": 9, "shadow": "other", "link": link, "compression": "gzip"}
    hand = asking(lambda app: under_a_policy(app, tmp_path), unique, wish)
    hand.app.tasks["asks"].apply_async(task_id="job")
    hand.deliver_all()
    attach(hand.app).dead_letters.replay("job")
    message = hand.take()
    assert message.headers["timelimit"] == [9, None]
    assert (message.headers["shadow"], message.headers["compression"]) == ("other", "application/x-gzip")
    embed = loads(message.body, message.content_type, message.content_encoding)[2]
    assert [link["args"] for link in embed["callbacks"]] == [[1]]


def test_a_job_whose_retry_would_come_after_the_expiry_that_it_asks_for_ends_at_once(
    unique: str, tmp_path: Path
) -> None:
    wish = {"exc": OSError(), "countdown": 60, "expires": 5}
    hand = asking(lambda app: under_a_policy(app, tmp_path), unique, wish)
    hand.app.tasks["asks"].apply_async(task_id="job")
    hand.deliver_all()
    letter = attach(hand.app).dead_letters.get("job")
    assert (letter.cause, letter.attempt) == ("expired", 1)


def test_an_eager_retry_has_the_options_too(unique: str, tmp_path: Path) -> None:
    told = []
    for installing in (natively, lambda app: plain(app, tmp_path)):
        hand = by_hand(installing, f"{unique}-{len(told)}")

        @hand.app.task(shared=False, bind=True, name="eager", lazy=False, max_retries=1)
        def eager(self: Task, seen: list[Any]) -> None:
            seen.append(dict(self.request.headers or {}))
            self.request.callbacks and seen.append([link["args"] for link in self.request.callbacks])
            if self.request.retries == 0:
                self.retry(countdown=0, link=self.app.signature("collect", (1,)), headers={"mine": 1})

        seen: list[Any] = []
        hand.app.tasks["eager"].apply((seen,))
        told.append(seen)
    assert told[0] == told[1]
    assert told[0][-1] == [(1,)]


def test_a_retry_without_an_error_has_a_true_name_in_the_history(unique: str, tmp_path: Path) -> None:
    """No attempt is left only at the last one."""
    hand = asking(lambda app: under_a_policy(app, tmp_path), unique, {"countdown": 0})
    hand.app.tasks["asks"].apply_async(task_id="job")
    hand.deliver_all()
    errors = attach(hand.app).dead_letters.get("job").errors
    asked = ("celery.exceptions.Retry", "self.retry() was called without an error")
    left = ("celery.exceptions.MaxRetriesExceededError", "self.retry() was called, and no attempt is left")
    assert [(error["type"], error["message"]) for error in errors] == [asked, asked, asked, left]


@pytest.mark.parametrize("way", [natively, plain, under_a_policy])
@pytest.mark.parametrize("asks", [True, False], ids=["asked", "automatic"])
def test_arguments_that_a_task_changes_in_place(unique: str, tmp_path: Path, way: Any, asks: bool) -> None:
    """Under plain `install` a retry has them as they are then, as natively; a policy keeps what was sent."""
    hand = by_hand(natively if way is natively else lambda app: way(app, tmp_path), unique)
    options: dict[str, Any] = {} if asks else {"autoretry_for": (OSError,), "default_retry_delay": 0}

    @hand.app.task(shared=False, bind=True, name="changes", lazy=False, max_retries=3, **options)
    def changes(self: Task, order: dict[str, int]) -> None:
        seen.append(dict(order))
        order["seen"] = len(seen)
        if asks:
            self.retry(exc=OSError(), countdown=0)
        raise OSError

    seen: list[dict[str, int]] = []
    hand.app.tasks["changes"].apply_async(({"id": 7},), task_id="job")
    hand.deliver_all()
    if way is under_a_policy:
        assert seen == [{"id": 7}] * 4
        letter = attach(hand.app).dead_letters.get("job")
        assert letter.reading.args == [{"id": 7}]
    else:
        assert seen == [{"id": 7}, *({"id": 7, "seen": n} for n in (1, 2, 3))]
