"""The specification's retry semantics on every broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ojs_bridge import DeadLetter, Discard, Fail, LetterNotFound, Retry, Snooze
from ojs_bridge.bridge import Bridge
from tests.on_dramatiq.fleet import QUICK, Fleet
from tests.servers import eventually

#: How late a run may be on a loaded machine, in seconds.
LATE = 6.0

KEEP = {"on_exhaustion": "dead_letter"}


class CardStolen(Exception):
    pass


class AuthExpired(Exception):
    pass


def raising(error: BaseException, *, times: int = 1000) -> Callable[[int], None]:
    def handler(n: int) -> None:
        if n <= times:
            raise error.with_traceback(None)

    return handler


# what the handler does, the actor's policy, its errors -> runs, how it ends, the last error's type, the cause
ENDINGS: dict[str, tuple[Any, dict[str, Any], dict[Any, Any], int, str, str | None, str | None]] = {
    "succeeds at once": (raising(OSError(), times=0), {}, {}, 1, "completed", None, None),
    "fails twice, then succeeds": (
        raising(OSError(), times=2), {"max_attempts": 3}, {}, 3, "completed", None, None,
    ),
    "three attempts by default": (
        raising(OSError()), {}, {}, 3, "discarded", "builtins.OSError", "exhausted",
    ),
    "exhausted and discarded": (
        raising(KeyError("k")), {"max_attempts": 4}, {}, 4, "discarded", "builtins.KeyError", "exhausted",
    ),
    "exhausted and kept": (
        raising(KeyError("k")), {"max_attempts": 2, **KEEP}, {}, 2, "dead", "builtins.KeyError", "exhausted",
    ),
    "max_attempts 1": (
        raising(OSError()), {"max_attempts": 1}, {}, 1, "discarded", "builtins.OSError", "exhausted",
    ),
    "max_attempts 0": (
        raising(OSError()), {"max_attempts": 0, **KEEP}, {}, 1, "dead", "builtins.OSError", "exhausted",
    ),
    "exact match": (
        raising(Retry("auth.expired")), {"non_retryable_errors": ["auth.expired"]}, {},
        1, "discarded", "auth.expired", "non_retryable",
    ),
    "prefix match": (
        raising(Retry("auth.expired")), {"non_retryable_errors": ["auth.*"], **KEEP}, {},
        1, "dead", "auth.expired", "non_retryable",
    ),
    "no match": (
        raising(Retry("auth.expired")), {"non_retryable_errors": ["auth", "au.*"], "max_attempts": 2}, {},
        2, "discarded", "auth.expired", "exhausted",
    ),
    "match by class name": (
        raising(AuthExpired()), {"non_retryable_errors": ["AuthExpired"]}, {},
        1, "discarded", f"{__name__}.AuthExpired", "non_retryable",
    ),
    "mapped by the actor": (
        raising(CardStolen()), {"non_retryable_errors": ["payment.*"]}, {CardStolen: "payment.card_stolen"},
        1, "discarded", "payment.card_stolen", "non_retryable",
    ),
    "mapped with a code": (
        raising(CardStolen()), {}, {CardStolen: ("payment.card_stolen", "DEAD_LETTER")},
        1, "dead", "payment.card_stolen", "handler",
    ),
    "mapped by the app": (
        raising(TimeoutError()), {"max_attempts": 2}, {}, 2, "discarded", "external.timeout", "exhausted",
    ),
    "Discard": (raising(Discard("a.b", "m")), KEEP, {}, 1, "discarded", "a.b", "handler"),
    "Fail": (raising(Fail("a.b", "m")), KEEP, {}, 1, "discarded", "a.b", "handler"),
    "DeadLetter": (raising(DeadLetter("a.b", "m")), {}, {}, 1, "dead", "a.b", "handler"),
    "Discard on the second attempt": (
        lambda n: raising(OSError() if n == 1 else Discard("a.b"))(n), KEEP, {},
        2, "discarded", "a.b", "handler",
    ),
    "Retry never outlives its attempts": (
        raising(Retry("a.b", after="PT0.01S")), {"max_attempts": 3}, {}, 3, "discarded", "a.b", "exhausted",
    ),
    "Snooze uses no attempt": (
        raising(Snooze("PT0.05S"), times=4), {"max_attempts": 1}, {}, 5, "completed", None, None,
    ),
}  # fmt: skip


@pytest.mark.requirement("RET-01", "RET-07", "RET-08", "RET-17", "RET-18")
def test_every_job_ends_as_its_policy_says(fleet: Fleet) -> None:
    sent = {}
    for name, (handler, policy, errors, *_) in ENDINGS.items():
        actor = fleet.actor(handler, ojs_retry=policy, ojs_errors=errors)
        sent[name] = fleet.send(actor)
    for name, (*_, runs, ending, error_type, cause) in ENDINGS.items():
        event = fleet.end(sent[name])
        assert len(sent[name].runs) == runs, name
        assert event.type == ("job.completed" if ending == "completed" else "job.discarded"), name
        if ending == "completed":
            continue
        assert event.data["last_error"]["type"] == error_type, name
        assert (event.data["cause"], event.data["dead_lettered"]) == (cause, ending == "dead"), name
        assert event.data["total_attempts"] == runs, name
        assert fleet.dead(sent[name]) == [], name
        if ending == "dead":
            letter = fleet.bridge.dead_letters.get(sent[name].id)
            assert (letter.attempt, letter.error_type, letter.cause) == (runs, error_type, cause), name
            assert len(letter.errors) == runs, name
        else:
            with pytest.raises(LetterNotFound):
                fleet.bridge.dead_letters.get(sent[name].id)


# policy -> the delays before each retry, in seconds
DELAYS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "none": ({"backoff_strategy": "none", "initial_interval": "PT0.2S"}, [0.2, 0.2, 0.2]),
    "constant": ({"backoff_strategy": "constant", "initial_interval": "PT0.2S"}, [0.2, 0.2]),
    "linear": ({"backoff_strategy": "linear", "initial_interval": "PT0.1S"}, [0.1, 0.2, 0.3]),
    "exponential": ({"initial_interval": "PT0.1S"}, [0.1, 0.2, 0.4]),
    "exponential 3": ({"initial_interval": "PT0.1S", "backoff_coefficient": 3.0}, [0.1, 0.3, 0.9]),
    "polynomial": (
        {"backoff_strategy": "polynomial", "initial_interval": "PT0.1S", "backoff_coefficient": 2.0},
        [0.1, 0.4, 0.9],
    ),
    "capped": (
        {"initial_interval": "PT0.1S", "backoff_coefficient": 10.0, "max_interval": "PT0.3S"},
        [0.1, 0.3, 0.3],
    ),
    "one millisecond": ({"initial_interval": "PT0.001S"}, [0.001, 0.002]),
}


@pytest.mark.requirement("RET-02", "RET-04", "RET-11", "RET-14")
def test_a_retry_comes_after_its_delay_and_never_before(fleet: Fleet) -> None:
    def fails(n: int) -> None:
        raise OSError("down")

    sent = {}
    for name, (policy, delays) in DELAYS.items():
        actor = fleet.actor(fails, ojs_retry={"jitter": False, **policy, "max_attempts": len(delays) + 1})
        sent[name] = fleet.send(actor)
    for name, (_, delays) in DELAYS.items():
        fleet.end(sent[name])
        assert len(sent[name].gaps) == len(delays), name
        for gap, delay in zip(sent[name].gaps, delays, strict=True):
            assert delay <= gap < delay + LATE, name
        for due, run in zip(fleet.due(sent[name]), sent[name].runs[1:], strict=True):
            assert run.at >= due, name


@pytest.mark.requirement("RET-05", "RET-06")
def test_jitter_stays_within_its_bounds_and_the_cap(fleet: Fleet) -> None:
    def fails(n: int) -> None:
        raise OSError("down")

    policy = {"jitter": True, "initial_interval": "PT0.4S", "max_interval": "PT0.5S", "max_attempts": 2}
    actor = fleet.actor(fails, ojs_retry=policy)
    sent = [fleet.send(actor) for _ in range(12)]
    for job in sent:
        fleet.end(job)
        assert 0.2 <= job.gaps[0] < 0.5 + LATE
    planned = [fleet.due(job)[0] - job.runs[0].at for job in sent]
    assert len({round(delay, 3) for delay in planned}) > 1
    assert all(0.2 <= delay <= 0.5 + LATE for delay in planned)


@pytest.mark.requirement("RET-04", "RET-08", "RET-11")
def test_a_hint_replaces_the_delay_and_is_still_capped(fleet: Fleet) -> None:
    hint = fleet.actor(raising(Retry("a.b", after="PT0.5S"), times=1))
    capped = fleet.actor(raising(Retry("a.b", after="PT1H"), times=1), ojs_retry={"max_interval": "PT0.5S"})
    for job in [fleet.send(hint), fleet.send(capped)]:
        assert fleet.end(job).type == "job.completed"
        assert 0.5 <= job.gaps[0] < 0.5 + LATE


@pytest.mark.requirement("RET-10")
def test_policies_of_app_actor_and_job_are_merged_field_by_field(fleet: Fleet) -> None:
    def fails(n: int) -> None:
        raise OSError("down")

    actor = fleet.actor(fails, ojs_retry={"max_attempts": 2, "on_exhaustion": "dead_letter"})
    plain, more, other = (
        fleet.send(actor),
        fleet.send(actor, ojs_retry={"max_attempts": 4}),
        fleet.send(actor, ojs_retry={"on_exhaustion": "discard", "initial_interval": "PT0.3S"}),
    )
    for job, runs, kept in ((plain, 2, True), (more, 4, True), (other, 2, False)):
        event = fleet.end(job)
        assert (len(job.runs), event.data["dead_lettered"]) == (runs, kept)
    assert fleet.planned(plain)[0] < 0.2 <= more.gaps[2]  # the app's interval, grown
    assert other.gaps[0] >= 0.3
    assert more.runs[3].ojs["retry"] == {"max_attempts": 4}
    assert fleet.bridge.dead_letters.get(more.id).retry == {"max_attempts": 4}


@pytest.mark.requirement("RET-14", "RET-15")
def test_a_message_keeps_the_ten_newest_errors_and_its_dead_letter_all(fleet: Fleet) -> None:
    def fails(n: int) -> None:
        raise OSError(f"down for the {n}. time")

    policy = {"max_attempts": 14, "initial_interval": "PT0.001S", "max_interval": "PT0.001S", **KEEP}
    job = fleet.send(fleet.actor(fails, ojs_retry=policy))
    fleet.end(job)
    assert len(job.runs) == 14
    for run in range(1, 14):
        state = job.runs[run].ojs
        assert [e["attempt"] for e in state["errors"]] == list(range(max(1, run - 9), run + 1))
        assert state["attempt"] == run + 1 == job.runs[run].options["retries"] + 1
        assert state.get("errors_dropped", 0) == max(0, run - 10)
    letter = fleet.bridge.dead_letters.get(job.id)
    assert [e["attempt"] for e in letter.errors] == list(range(1, 15))
    assert [e["message"] for e in letter.errors] == [f"down for the {n}. time" for n in range(1, 15)]
    eventually(lambda: fleet.bridge.store.kept_errors(job.id) == [])


@pytest.mark.requirement("RET-14")
def test_an_error_entry_has_the_fields_of_the_spec(fleet: Fleet) -> None:
    job = fleet.send(fleet.actor(raising(Retry("a.b", "m", details={"order": 7}), times=1)))
    fleet.end(job)
    (entry,) = job.runs[1].ojs["errors"]
    assert {k: entry[k] for k in ("attempt", "type", "message", "code", "details")} == {
        "attempt": 1, "type": "a.b", "message": "m", "code": "RETRY", "details": {"order": 7},
    }  # fmt: skip
    assert entry["timestamp"].endswith("Z")
    assert entry["backtrace"][-1].endswith("in handler")


@pytest.mark.requirement("RET-11")
def test_a_delivery_before_its_time_waits(fleet: Fleet) -> None:
    from ojs_bridge.spec.job import format_time

    actor = fleet.actor(lambda n: "ran")
    due = time.time() + 0.6
    when = format_time(fleet.bridge.engine.now().fromtimestamp(due, tz=fleet.bridge.engine.now().tzinfo))
    state = {"v": 1, "attempt": 3, "next_retry_at": when}
    job = fleet.send(actor, ojs=state, retries=2)
    assert fleet.end(job).data["attempt"] == 3
    assert len(job.runs) == 1
    assert due - 0.001 <= job.runs[0].at < due + LATE


@pytest.mark.requirement("RET-14")
def test_a_replay_has_the_same_id_fresh_attempts_and_the_whole_history(fleet: Fleet) -> None:
    def fails(n: int) -> str:
        if n <= 3:
            raise OSError("down")
        return "done"

    actor = fleet.actor(fails, ojs_retry={"max_attempts": 2, **KEEP})
    job = fleet.send(actor)
    fleet.end(job)
    fleet.bridge.dead_letters.retry(job.id)
    assert fleet.end(job, nth=2).type == "job.completed"
    assert len(job.runs) == 4
    first, second = job.runs[2], job.runs[3]
    assert "retries" not in first.options and "traceback" not in first.options
    assert (first.ojs["attempt"], first.ojs["replay_count"], len(first.ojs["errors"])) == (1, 1, 2)
    assert (second.ojs["attempt"], len(second.ojs["errors"])) == (2, 3)
    with pytest.raises(LetterNotFound):
        fleet.bridge.dead_letters.get(job.id)


def test_a_replay_that_fails_again_is_a_dead_letter_again(fleet: Fleet) -> None:
    actor = fleet.actor(raising(OSError("down")), ojs_retry={"max_attempts": 2, **KEEP})
    job = fleet.send(actor)
    for replays in (1, 2):
        fleet.end(job, nth=replays)
        fleet.bridge.dead_letters.retry(job.id)
    fleet.end(job, nth=3)
    letter = fleet.bridge.dead_letters.get(job.id)
    assert (letter.replay_count, letter.attempt, len(letter.errors), len(job.runs)) == (2, 2, 6, 6)


def test_huge_and_unserialisable_errors_are_cut_and_the_header_stays_in_its_budget(fleet: Fleet) -> None:
    import json

    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    def fails(n: int) -> None:
        raise Retry("a" * 1000, "m" * 100_000, details={"object": Odd(), "blob": "x" * (n - 1) * 100_000})

    policy = {"max_attempts": 12, "initial_interval": "PT0.001S", "max_interval": "PT0.001S", **KEEP}
    job = fleet.send(fleet.actor(fails, ojs_retry=policy))
    fleet.end(job)
    assert max(len(json.dumps(run.ojs, separators=(",", ":"))) for run in job.runs) <= 16 * 1024
    assert job.runs[1].ojs["errors"][0]["details"] == {"object": "<odd>", "blob": ""}
    letter = fleet.bridge.dead_letters.get(job.id)
    assert len(letter.errors) == 12
    assert "[cut]" in letter.errors[-1]["message"]


@pytest.mark.requirement("RET-09")
def test_without_any_policy_the_default_of_the_spec_applies(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed(retry={})
    job = fleet.send(fleet.actor(raising(OSError("down")), ojs_retry={}))
    with fleet.working():
        event = fleet.end(job)
    assert (len(job.runs), event.data["dead_lettered"]) == (3, False)
    assert 0.5 <= job.gaps[0] < 1.5 + LATE
    assert 1.0 <= job.gaps[1] < 3.0 + LATE


def test_the_header_s_history_can_be_longer_than_ten(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed(history=12)
    policy = {**QUICK, "max_attempts": 13, "initial_interval": "PT0.001S", "backoff_strategy": "none"}
    job = fleet.send(fleet.actor(raising(OSError("down")), ojs_retry=policy))
    with fleet.working():
        fleet.end(job)
    assert len(job.runs[12].ojs["errors"]) == 12
    assert isinstance(fleet.bridge, Bridge)
