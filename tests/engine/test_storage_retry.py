"""The bridge insists on store and broker: the numbers of simple-durable-jobs, interruption, wrong values."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import ConfigurationError, StorageRetry
from ojs_bridge.engine.storage_retry import POLLING, pause
from tests.servers import eventually


class Middle:
    """A source of randomness that always draws the middle, so that jitter changes nothing."""

    def random(self) -> float:
        """Return the middle."""
        return 0.5


class Down(Exception):
    """Stands for a store that does not answer."""


def test_the_table_of_the_text() -> None:
    """The waits are 100 ms, doubled, and capped at 5 s."""
    seconds = [round(StorageRetry().delay(n, Middle()), 6) for n in range(1, 9)]
    assert seconds == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert StorageRetry().max_attempts == 5


def test_polling_waits_longer() -> None:
    """Polling has 3 attempts, and waits of 500 ms, doubled, capped at 10 s."""
    seconds = [round(POLLING.delay(n, Middle()), 6) for n in range(1, 8)]
    assert seconds == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert (POLLING.max_attempts, POLLING.jitter) == (3, 0.2)


@given(st.integers(1, 10**9), st.randoms(use_true_random=False))
def test_jitter_is_a_fraction_either_way(n: int, rng: random.Random) -> None:
    """The jitter is 10 % up or down at most, also of the cap."""
    plain = StorageRetry().delay(n, Middle())
    assert 0.9 * plain <= StorageRetry().delay(n, rng) <= 1.1 * plain <= 5.5


def test_one_argument_leaves_the_others() -> None:
    """An omitted multiplier is not 0, and an omitted count is not 1."""
    only_count = StorageRetry(max_attempts=10)
    assert (only_count.multiplier, only_count.initial_interval) == (2.0, timedelta(milliseconds=100))
    assert StorageRetry(initial_interval="PT0.2S", max_interval="PT10S").max_attempts == 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"max_attempts": 1.5}, "max_attempts"),
        ({"max_attempts": None}, "max_attempts"),
        ({"multiplier": 0}, "multiplier"),
        ({"multiplier": 0.9}, "multiplier"),
        ({"multiplier": float("nan")}, "multiplier"),
        ({"multiplier": None}, "multiplier"),
        ({"jitter": -0.1}, "jitter"),
        ({"jitter": 1.1}, "jitter"),
        ({"jitter": float("inf")}, "jitter"),
        ({"initial_interval": "soon"}, "initial_interval"),
        ({"initial_interval": 0.1}, "initial_interval"),
        ({"max_interval": timedelta(-1)}, "max_interval"),
    ],
)
def test_what_cannot_be_names_the_field(options: dict[str, Any], field: str) -> None:
    """The error comes where the value is written, not when the store is down."""
    with pytest.raises(ConfigurationError, match=f"StorageRetry: {field}"):
        StorageRetry(**options)


@pytest.mark.parametrize(
    ("retry", "tries"), [(StorageRetry(), 5), (StorageRetry(3), 3), (StorageRetry.disabled(), 1)]
)
def test_it_tries_so_often_and_raises_the_last_error(retry: StorageRetry, tries: int) -> None:
    """The retry pauses between two attempts, and not after the last."""
    waits: list[float] = []
    errors: list[Down] = []

    def operation() -> None:
        errors.append(Down(len(errors)))
        raise errors[-1]

    with pytest.raises(Down) as raised:
        retry.run(operation, retry_on=(Down,), wait=waits.append)
    assert raised.value is errors[-1]
    assert (len(errors), len(waits)) == (tries, tries - 1)


def test_it_returns_what_comes_of_it() -> None:
    """The retry returns as soon as the operation works."""
    answers = iter([Down(), Down(), "there"])

    def operation() -> str:
        answer = next(answers)
        if isinstance(answer, Down):
            raise answer
        return str(answer)

    assert StorageRetry().run(operation, retry_on=(Down,), wait=lambda _: None) == "there"


@pytest.mark.parametrize("error", [KeyError("other"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_nothing_else_is_tried_again(error: BaseException) -> None:
    """After another error, or an exit of the process, the operation is not tried again."""
    calls = []

    def operation() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)):
        StorageRetry().run(operation, retry_on=(Down,), wait=lambda _: None)
    assert calls == [1]


class Interrupt(BaseException):
    """The exception that Dramatiq sends to a thread whose time is up."""


def test_a_wait_is_interruptible() -> None:
    """An exception that is sent to the thread ends the wait, as time limits and shutdown do."""
    ended = threading.Event()
    raised: list[BaseException] = []

    def wait() -> None:
        def operation() -> None:
            raise Down

        try:
            StorageRetry(initial_interval="PT60S", max_interval="PT60S").run(operation, retry_on=(Down,))
        except BaseException as error:
            raised.append(error)
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waits = pause.__code__
    eventually(lambda: sys._current_frames()[thread.ident or 0].f_code is waits, what="it waits")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_long(thread.ident or 0), ctypes.py_object(Interrupt))
    assert ended.wait(90)
    assert isinstance(raised[0], Interrupt)
