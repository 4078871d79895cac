"""The dead queues of a Dramatiq broker (`.XQ`): their messages are read as dead letters, and taken out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import dramatiq
from dramatiq.broker import Broker
from dramatiq.common import q_name

from ..bridge import Bridge
from ..engine.runs import TaskPolicy
from ..errors import Unreachable
from ..messages import HEADER, parameters_of
from ..operations.broker_letters import found_letter
from ..rules.failures import Failure
from ..rules.job import ErrorEntry, Job, count_of
from ..store import Letter
from .brokers import outages, told
from .compat import message_in
from .dead_places import Held, places_of
from .publishing import FRAMEWORK, original
from .translate import bare_job, job_of, time_of

logger = logging.getLogger("ojs_bridge")


class DramatiqDeadQueues:
    """The dead queues of all queues that a broker has declared."""

    def __init__(self, broker: Broker, bridge: Bridge, tasks: Mapping[str, TaskPolicy | None]) -> None:
        self._broker = broker
        self._bridge = bridge
        self._tasks = tasks
        self._places = places_of(broker)

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most so many letters; on RabbitMQ the oldest of each queue, on Redis the newest."""
        queues = sorted({q_name(name) for name in self._broker.get_declared_queues()})
        with _reaching():
            held = self._places.read(queues, most)
        found = (self._letter(message, at) for message, at in held)
        return [letter for letter in found if letter is not None]

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete it unless `then` raises; False if it is not there."""

        def is_it(held: Held) -> bool:
            found = _read(held)
            if found is None or str(found[0].message_id) != letter.job_id:
                return False
            return bool(found[1]["encoded"] == letter.message["encoded"])

        with _reaching():
            return self._places.take(q_name(letter.queue), is_it, lambda: then(letter))

    def _letter(self, held: Held, at: datetime | None) -> Letter | None:
        found = _read(held)
        if found is None:
            return None
        try:
            return self._letter_of(*found, at)
        except Exception as error:  # noqa: BLE001 - the message may hold anything
            _left(error)
            return None

    def _letter_of(self, message: dramatiq.Message[Any], kept: dict[str, Any], at: datetime | None) -> Letter:
        engine = self._bridge.engine
        actor, bare = self._broker.actors.get(message.actor_name), _ended(message)
        kept["parameters"] = [*parameters_of(actor.fn)] if actor else []
        task = self._tasks.get(message.actor_name) or engine.task()
        begun = engine.admit(job_of(message, bare), bare, task)
        return found_letter(begun, FRAMEWORK, kept, at=at, now=engine.now())


def _read(held: Held) -> tuple[dramatiq.Message[Any], dict[str, Any]] | None:
    """Return a message, and the form in which a dead letter keeps it; None if it cannot be read."""
    try:
        message = dramatiq.Message.decode(held) if isinstance(held, bytes) else message_in(held)
        return message, original(message)
    except Exception as error:  # noqa: BLE001 - the application's own encoder may raise anything
        _left(error)
        return None


def _left(error: Exception) -> None:
    logger.warning("a message in a dead queue cannot be read, and stays there: %s", told(error))


def _ended(message: dramatiq.Message[Any]) -> Job:
    """Return the job of a dead message by Dramatiq's own options."""
    bare = bare_job(message)
    state = message.options.get(HEADER)
    if not isinstance(state, Mapping):
        return bare._replace(errors=_native_errors(message, bare))
    # The native counter has counted the last run only where the message has its final state.
    said = state.get("attempt")
    return bare._replace(attempt=max(bare.attempt - 1, count_of(said) or 1))


def _native_errors(message: dramatiq.Message[Any], bare: Job) -> tuple[ErrorEntry, ...]:
    """Return the error that Dramatiq itself wrote into a message: the last error before its last retry."""
    text, said_at = message.options.get("traceback"), message.options.get("requeue_timestamp")
    at = time_of(said_at) or bare.created_at
    if not (isinstance(text, str) and text.strip() and at):
        return ()
    type_, _, said = text.strip().splitlines()[-1].partition(": ")
    failed = bare._replace(attempt=max(bare.attempt - 1, 1))
    return failed.failed(Failure(type_, said), at=at).errors


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except outages() as error:
        raise Unreachable(told(error)) from error
