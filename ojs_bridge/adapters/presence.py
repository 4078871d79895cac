"""The presence of workers on Redis, where a broker does not say whose connection has ended.

Each worker says every second that it lives, and is subscribed to a channel of its own. Redis ends the
subscription with the connection: at once when the process is killed, and not while it is slow or frozen. The
messages of a worker that is silent and has no subscription are given back by another worker.

A child that C code forked keeps the subscription of a killed worker. So a worker on the same machine looks
whether the process of a silent one still lives.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from ..engine.heartbeat import has_ended
from ..engine.threads import keep_going
from ..errors import StoreError

logger = logging.getLogger("ojs_bridge")

#: How often, in seconds, a worker says that it lives, and looks after the others.
LOOK_SECONDS = 1.0
#: After how many seconds of silence a worker without a subscription is suspected, and then taken for dead.
SUSPECTED_AFTER, DEAD_AFTER = 1.5, 4.0
#: For how many seconds after an outage of Redis nobody is taken for dead: all have to come back.
GRACE = 15.0
#: How often, in seconds, a worker uses its subscription, so that no network forgets the connection.
PING_SECONDS = 15.0

#: KEYS: the times at which workers said that they live, what they say of themselves, and lists.
#: ARGV: a worker, what it says, seconds, and the worker's channel. Returns how many are subscribed to the
#: channel, -1 if that may not be asked, and the workers that have been silent for longer, by the server's
#: clock: each with what it said, its time, and the seconds of its silence. Then the length of each list, or
#: -1 if that may not be asked.
_LOOK = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
redis.call('ZADD', KEYS[1], string.format('%.6f', now), ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
local silent = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])) do
  local at = redis.call('ZSCORE', KEYS[1], worker)
  silent[#silent + 1] = {worker, redis.call('HGET', KEYS[2], worker) or '["", []]', at, tostring(now - at)}
end
local lengths = {}
for n = 3, #KEYS do
  local length = redis.pcall('LLEN', KEYS[n])
  lengths[n - 2] = type(length) == 'number' and length or -1
end
local subscribed = redis.pcall('PUBSUB', 'NUMSUB', ARGV[4])
return {subscribed.err and -1 or subscribed[2], silent, lengths}
"""
#: KEYS as above; ARGV: a worker and its time. Forgets the worker, unless it has said since that it lives.
_FORGET = """
if redis.call('ZSCORE', KEYS[1], ARGV[1]) == ARGV[2] then
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('HDEL', KEYS[2], ARGV[1])
end
"""


#: The presences of this process.
_here: WeakSet[Presence] = WeakSet()


class Dead(NamedTuple):
    """A worker that has died, its queues, and when it last said that it lived, in seconds since 1970."""

    worker: str
    queues: Sequence[str]
    last_seen: float


class Presence:
    """The presence of one worker, under a prefix that the workers of one broker share.

    `suspect` is called with the family of a worker that may be dead, and `give_back` gives back the messages
    of a dead worker and returns how many; None leaves the worker to others, which know its queues. Both may
    raise any error: then the next look tries again. `lists` returns keys of lists, each with what hears the
    length that a look has found, or -1.
    """

    def __init__(
        self,
        prefix: str,
        worker: str,
        family: str,
        *,
        queues: Callable[[], Sequence[str]] = tuple,
        lists: Callable[[], Mapping[str, Callable[[int], object]]] = dict,
        suspect: Callable[[str], object],
        give_back: Callable[[Dead], int | None],
    ) -> None:
        self._keys = (present_key(prefix), f"{prefix}_ojs.workers")
        self._channel = f"{prefix}_ojs.worker."
        self._worker, self._family, self._queues, self._lists = worker, family, queues, lists
        self._suspect, self._give_back = suspect, give_back
        self._client: Any = None
        self._subscription: Any = None
        #: This process's number, and its machine.
        self._place = (0, "")
        #: The monotonic time from which on this worker judges others; None before its first look.
        self._judges_from: float | None = None
        #: The monotonic time at which the last answer to a look came.
        self._answered = time.monotonic()
        self._pinged = 0.0
        #: The monotonic time of the last trouble of Redis, or of this machine: others may have it, too.
        self._troubled_at = 0.0
        #: Whether the log has the error of the last look.
        self._is_reported = False
        self._looked, self._over = threading.Event(), threading.Event()
        _here.add(self)

    def start(self, client: Callable[[], Any]) -> None:
        """Begin to look, on a thread; `client` returns the redis-py client of this moment.

        Returns after the first look: a worker that is killed with its first message must be known. Waits for
        some seconds at most.
        """
        keep_going("ojs-presence", partial(self._round, client))
        self._looked.wait(DEAD_AFTER)

    def stop(self) -> None:
        """End the thread soon. What this worker has not given back itself, another worker gives back."""
        self._over.set()

    def _round(self, client: Callable[[], Any]) -> bool:
        try:
            self.look(client())
            self._is_reported = False
        except Exception as error:  # noqa: BLE001 - whatever is wrong with Redis, another look follows
            self.missed()
            # The scheduler tells of an outage of the store.
            if not self._is_reported and not isinstance(error, StoreError):
                logger.warning("the messages of a killed worker come back late: %r", error)
            self._is_reported = True
        self._looked.set()
        is_over = self._over.wait(LOOK_SECONDS)
        if is_over:
            self._leave()
        return not is_over

    def look(self, client: Any) -> None:
        """Say that this worker lives, and give back what dead workers had; raises any error of Redis."""
        if client is not self._client:
            self._enter(client)
        said = json.dumps([self._family, [*self._queues()], *self._place])
        words = self._worker, said, SUSPECTED_AFTER, self._channel + self._worker
        hearers, asked = self._lists(), time.monotonic()
        keys = *self._keys, *hearers
        subscribed, silent, lengths = client.eval(_LOOK, len(keys), *keys, *words)
        for hear, length in zip(hearers.values(), lengths, strict=True):
            hear(length)
        is_in_doubt = subscribed < 1 or time.monotonic() - self._pinged >= PING_SECONDS
        if is_in_doubt and not self._is_still_subscribed():
            # redis-py has connected anew by itself: an outage that raised no error.
            self._troubled()
        answered, self._answered = self._answered, time.monotonic()
        stood_still = self._answered - answered > DEAD_AFTER
        if stood_still:
            self._troubled_at = self._answered
        if self._judges_from is None or stood_still:
            # If Redis or this machine stood still, others may be about to come back.
            self._judges_from = max(self._judges_from or 0.0, self._answered + DEAD_AFTER)
        if not silent or time.monotonic() < self._judges_from:
            return
        names = [self._worker, *(text_of(worker) for worker, *_ in silent)]
        mine, *theirs = (
            count for _, count in client.pubsub_numsub(*(self._channel + name for name in names))
        )
        # Behind some proxies nobody is subscribed.
        gone = [each for each, count in zip(silent, theirs, strict=True) if mine and not count]
        gone += [each for each in silent if each not in gone and _has_died_here(each[1])]
        errors = [error for each in gone if (error := self._error_of_judging(client, asked, *each))]
        if errors:
            raise errors[0]

    def _error_of_judging(
        self, client: Any, asked: float, worker: bytes, facts: bytes, at: bytes, seconds: bytes
    ) -> Exception | None:
        """Judge a worker that is gone, and return an error: it may concern this worker alone.

        `asked` is the monotonic time of the question whose answer has the seconds of its silence.
        """
        try:
            family, queues, *_ = json.loads(facts)
            # After a trouble of Redis, silence is no evidence before the worker has been heard again.
            # The time since the question does not count: a slow look would make an old silence a new one.
            if float(seconds) < asked - self._troubled_at:
                self._suspect(family)
            if float(seconds) >= DEAD_AFTER or _has_died_here(facts):
                count = self._give_back(Dead(text_of(worker), queues, float(at)))
                if count is not None:
                    client.eval(_FORGET, len(self._keys), *self._keys, worker, at)
                if count:
                    logger.warning("a worker has died, and its messages go back: %d", count)
        except Exception as error:  # noqa: BLE001 - the look raises it when it has judged all
            return error
        return None

    def missed(self) -> None:
        """Judge nobody for a while: Redis did not answer."""
        self._troubled()
        self._client = None

    def _troubled(self) -> None:
        self._troubled_at = time.monotonic()
        self._judges_from = self._troubled_at + GRACE

    def _is_still_subscribed(self) -> bool:
        self._pinged = time.monotonic()
        self._subscription.ping()
        is_same, ends = True, time.monotonic() + LOOK_SECONDS
        while (left := ends - time.monotonic()) > 0:
            answer = self._subscription.get_message(timeout=left)
            if answer is not None and answer["type"] == "pong":
                return is_same
            # The answer to a new subscription comes before that to the ping.
            is_same = answer is None and is_same
        return False

    def _enter(self, client: Any) -> None:
        if self._client is not None:
            # An outage between two looks. Others may need longer to connect anew.
            self._troubled()
        subscription = client.pubsub(ignore_subscribe_messages=False)
        subscription.subscribe(self._channel + self._worker)
        # Nobody may learn of this worker before it is subscribed.
        subscription.get_message(timeout=LOOK_SECONDS)
        # The one before may still stand: for a moment without any, a silent worker would be dead.
        self._leave()
        self._subscription, self._client = subscription, client
        self._place = os.getpid(), _machine()
        self._pinged = time.monotonic()

    def _leave(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None


def _machine() -> str:
    """Return a name of this machine, since its start, and of its room of process numbers; "" without any."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _has_died_here(facts: bytes) -> bool:
    """Return whether a silent worker was a process of this machine that has ended, by what it has said."""
    _, _, *place = json.loads(facts)
    process, machine = place or (0, "")
    return bool(machine) and machine == _machine() and has_ended(process)


def _in_child() -> None:
    """Close the connections that a fork has of its parent, which would not be missed while the fork lives."""
    for presence in _here:
        if presence._subscription is not None and presence._subscription.connection is not None:
            # In a fork redis-py leaves the other end alone.
            presence._subscription.connection.disconnect()
    _here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def present_key(prefix: str) -> str:
    """Return the key of the sorted set that has one member for each worker that lives."""
    return f"{prefix}_ojs.present"


def text_of(word: bytes | str) -> str:
    """Return a word of an answer as text, whatever the client's settings are."""
    return word if isinstance(word, str) else word.decode()
