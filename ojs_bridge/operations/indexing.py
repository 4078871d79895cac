"""A chore of the workers: it groups letters of earlier releases, and indexes the texts of all letters."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from ..engine.context import Context
from ..engine.scheduler import once_a_period
from ..errors import StoreError
from ..store import Letter
from .letters import needed, said, shown

logger = logging.getLogger("ojs_bridge")

#: How often a worker of the fleet looks for such letters, and how long it works on them.
PERIOD, WORKED = timedelta(minutes=5), timedelta(minutes=4)
#: The least seconds between two batches.
PAUSE = 0.01


class Indexing:
    """Brings the indexes of dead letters up to date, beside everything else that uses the store."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = needed(context.store, "dead letters")

    def once_a_period(self) -> None:
        """Start `work` on a thread. Only one worker of the fleet starts it in a period."""
        begin = threading.Thread(target=self._safely, name="ojs-indexing", daemon=True).start
        once_a_period(self._store, "indexes", PERIOD, self._context.clock, begin)

    def work(self) -> int:
        """Group and index letters for four minutes at most; return how many were grouped.

        The work may stop at any time and go on later. It pauses for as long as each batch took.
        """
        ends = time.monotonic() + WORKED.total_seconds()
        grouped = _through(self._store.group_older(), ends)
        if grouped:
            logger.info("%d dead letters of an earlier release were grouped", grouped)
        _through(self._store.index_texts(self._text_of), ends)
        return grouped

    def _safely(self) -> None:
        try:
            self.work()
        except StoreError as error:
            logger.warning("dead letters were not all grouped and indexed this time: %s", error)
        except Exception:
            logger.exception("dead letters were not all grouped and indexed this time")

    def _text_of(self, letter: Letter) -> str | None:
        """Return the text of a letter, followed by its redacted text."""
        redactor = self._context.redactor
        try:
            texts = [said(letter), said(shown(letter, redactor))] if redactor else [said(letter)]
        except Exception:  # noqa: BLE001 - a redaction is the user's code
            return None
        return "\n".join(texts)


def _through(work: Iterator[int], ends: float) -> int:
    """Go through batches of work until a time, with pauses; return the sum of their numbers."""
    done, begun = 0, time.monotonic()
    for count in work:
        done += count
        now = time.monotonic()
        if now > ends:
            break
        time.sleep(max(PAUSE, now - begun))
        begun = time.monotonic()
    return done
