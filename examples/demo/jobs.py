"""The demonstration's jobs: the errors of each, its policy, and the end that it must have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ojs_bridge import DeadLetter, Discard, Fail, Retry, Snooze

Ending = Literal["completed", "discarded", "dead-lettered", "refused"]

#: The app's own default policy, over the spec's.
DEFAULT_POLICY: dict[str, Any] = {"initial_interval": "PT0.4S", "max_interval": "PT2S"}

#: The policy of the task and of the actor that run every job of the demonstration.
TASK_POLICY: dict[str, Any] = {"non_retryable_errors": ["payment.card_stolen", "auth.*"]}

#: The job that is replayed at the end, once its cause is mended.
REPLAYED = "exhausts, is dead-lettered"
#: The job whose worker is killed while it runs.
KILLED = "loses its worker to kill -9"


class CardStolen(Exception):
    """Mapped to payment.card_stolen."""


class TokenExpired(Exception):
    """Mapped to auth.token_expired."""


ERRORS: dict[type[BaseException], Any] = {
    CardStolen: "payment.card_stolen",
    TokenExpired: "auth.token_expired",
    ConnectionError: "external.unreachable",
}


@dataclass(frozen=True)
class DemoJob:
    """One job: the exception of run n, or None; how it ends, after how many runs."""

    behaviour: Callable[[int], BaseException | None]
    ending: Ending
    runs: int
    retry: dict[str, Any] | None = field(default=None)


def _always(exc: BaseException) -> Callable[[int], BaseException | None]:
    return lambda _run: exc


def _until(last: int, exc: BaseException) -> Callable[[int], BaseException | None]:
    return lambda run: exc if run <= last else None


def _until_killed(run: int) -> None:
    if run == 1:
        time.sleep(60)


DOWN = ConnectionError("the other side is down")

JOBS: dict[str, DemoJob] = {
    "succeeds at once": DemoJob(_until(0, DOWN), "completed", 1),
    "fails twice, then succeeds": DemoJob(_until(2, DOWN), "completed", 3),
    "exhausts, is discarded": DemoJob(_always(DOWN), "discarded", 3),
    REPLAYED: DemoJob(_always(DOWN), "dead-lettered", 3, {"on_exhaustion": "dead_letter"}),
    "hits payment.card_stolen": DemoJob(_always(CardStolen("reported stolen")), "discarded", 1),
    "hits auth.*": DemoJob(
        _always(TokenExpired("expired")), "dead-lettered", 1, {"on_exhaustion": "dead_letter"}
    ),
    "says Retry, after 1.2 s": DemoJob(
        _until(1, Retry("external.rate_limited", "429", after="PT1.2S")), "completed", 2
    ),
    "says Discard": DemoJob(_always(Discard("payment.card_declined", "declined")), "discarded", 1),
    "says DeadLetter": DemoJob(_always(DeadLetter("payment.fraud", "look at this")), "dead-lettered", 1),
    "says Fail": DemoJob(_always(Fail("validation.amount", "negative")), "discarded", 1),
    "says Snooze, for 1 s": DemoJob(_until(1, Snooze("PT1S")), "completed", 2),
    KILLED: DemoJob(_until_killed, "completed", 2),
    "brings its own policy": DemoJob(
        _until(3, DOWN),
        "completed",
        4,
        {"max_attempts": 5, "backoff_strategy": "linear", "initial_interval": "PT0.3S", "jitter": False},
    ),
    "brings an invalid policy": DemoJob(_always(DOWN), "refused", 0, {"max_attempts": -1}),
}
