"""`ojs-bridge dead-letters watch`: each new dead letter as it arrives."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, TypeAlias

from typer import Option

from ..errors import StoreError
from ..operations.dead_letters import DeadLetters
from ..operations.letters import Kind
from ..store import Letter
from .commands import AsJson
from .finding import Place
from .letters import Filter, every, letters_table
from .printing import say, show, show_json

#: A letter comes so long after its death at most: a worker's clock may be late, and its store away.
_LATE = timedelta(seconds=60)
#: The letters of a look, the oldest first, by their ids and times: a job may die again.
Look: TypeAlias = dict[tuple[str, datetime], Letter]


def watch(
    *,
    place: Place,
    chosen: Filter,
    seconds: Annotated[float, Option("--every", min=0.1, help="The seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Print each new dead letter as it arrives, until Ctrl-C; with --since, those since then come first.

    A store that cannot be reached meanwhile is told of once, and asked again.
    """
    if chosen.until is not None:
        raise ValueError("watch: --until does not go with letters that are still to come")
    now = place.bridge.engine.now
    try:
        for letter in _arriving(place, chosen.kind(now()), now, seconds):
            if as_json:
                show_json(letter.to_ojs())
            else:
                show(replace(letters_table([letter]), headed=False))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _arriving(place: Place, kind: Kind, now: Callable[[], datetime], seconds: float) -> Iterator[Letter]:
    """Yield the letters of a kind, each once, as they arrive; raises StoreError only for the first look."""
    letters, looked, since, away = place.bridge.dead_letters, now(), kind["since"], False
    seen = _look(letters, kind, since or looked - _LATE)
    say(f"watching {place} for new dead letters, until Ctrl-C")
    if since is not None:
        yield from seen.values()
    while True:
        time.sleep(seconds)
        begun = now()
        try:
            found = _look(letters, kind, max(looked - _LATE, since or looked - _LATE))
        except StoreError as error:
            if not away:
                say(f"{error}; asking again every {seconds:g} s")
            away = True
            continue
        yield from (letter for key, letter in found.items() if key not in seen)
        seen, looked, away = found, begun, False


def _look(letters: DeadLetters, kind: Kind, since: datetime) -> Look:
    found = [*every(letters, Kind(**{**kind, "since": since}))]
    return {(letter.id, letter.discarded_at): letter for letter in reversed(found)}
