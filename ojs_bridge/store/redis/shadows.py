"""The tallies of shadow mode in Redis: three hashes with the same fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ..records import from_ms, to_ms
from ..shadows import Tally
from .namespace import RedisNamespace
from .server import Word

#: How long Redis remembers a write, so that a repeated write, after a lost answer, is not counted twice.
_KNOWN_MS = 60_000


class RedisShadows:
    """The part of a store that holds the tallies of shadow mode."""

    def __init__(self, redis: RedisNamespace) -> None:
        self._redis = redis
        self._shadow_keys = redis.keys("shadow:counts", "shadow:told", "shadow:examples")

    def record_shadows(self, tallies: Sequence[Tally]) -> None:
        """Add to the counts, in one step."""
        keys = [*self._shadow_keys, self._redis.key(f"shadow:write:{uuid4().hex}")]
        words = [word for tally in tallies for word in _words(tally)]
        self._redis.run("record_shadows", keys, (_KNOWN_MS, *words))

    def shadows(self) -> list[Tally]:
        """Return all tallies, in the order of framework, task and kind."""
        found = map(_tally, self._redis.run("shadows", self._shadow_keys))
        return sorted(found, key=lambda tally: (tally.framework, tally.task, tally.kind))

    def clear_shadows(self) -> int:
        """Delete all tallies; return how many there were."""
        return int(self._redis.run("clear_shadows", self._shadow_keys))


def _words(tally: Tally) -> tuple[Word, ...]:
    field = json.dumps([tally.framework, tally.task, tally.kind])
    told = json.dumps([to_ms(tally.last_seen), tally.explanation])
    return field, tally.count, told, len(tally.examples), json.dumps([*map(dict, tally.examples)])


def _tally(row: Sequence[Any]) -> Tally:
    (framework, task, kind), (last_ms, explanation) = json.loads(row[0]), json.loads(row[2])
    examples = tuple(json.loads(row[3].partition(b" ")[2]))
    return Tally(framework, task, kind, int(row[1]), from_ms(last_ms), explanation, examples)
