"""Parked retries handed to their brokers before they are due, so that a fleet goes on without its bridge."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..engine.context import Context
from ..engine.scheduler import CLAIM, UNPARK
from ..errors import Unreachable
from ..rules.job import format_time
from ..rules.patterns import matches
from ..store import Parked, ParkedFilter, Store
from .audit import uninterrupted
from .letters import MAX_PAGE, every_page


@dataclass(frozen=True, slots=True)
class Drained:
    """The outcome of a drain: the number of retries that were published, and the retries that stay.

    `failed` has the errors by job id. `held` counts retries that another process is publishing, or that
    workers have parked again. `others` counts retries by framework, where this process has no app of the
    framework.
    """

    published: int
    failed: Mapping[str, str]
    held: int
    others: Mapping[str, int]


class Draining:
    """A drain of the retries whose job types match one of the patterns `tasks`, or of all retries."""

    def __init__(
        self,
        context: Context,
        store: Store,
        tasks: Sequence[str],
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._context = context
        self._store = store
        self._publishers = context.publishers
        self._tasks = tasks
        self._progress = progress
        self._tried: set[tuple[str, int]] = set()
        self._failed: dict[str, str] = {}
        self._published = 0

    def retries(self) -> Iterator[Parked]:
        """Return the retries that would be published, the next one due first; raises StoreError."""
        return (parked for page in self._pages() for parked in page if parked.framework in self._publishers)

    def run(self) -> Drained:
        """Publish in passes, until a pass can claim no retry; raises StoreError, Unreachable.

        Each retry is tried once: workers that park it again must not keep the drain running.
        """
        while sum(map(self._publish, self._pages())):
            pass
        return self._drained()

    def _pages(self) -> Iterator[list[Parked]]:
        """Yield pages of the retries that match, of every framework."""
        read = partial(self._store.list_parked, ParkedFilter(), limit=MAX_PAGE)
        for page in every_page(lambda cursor: read(cursor=cursor)):
            yield [parked for parked in page.retries if self._wants(parked.type)]

    def _wants(self, type_: str) -> bool:
        return not self._tasks or any(matches(type_, pattern) for pattern in self._tasks)

    def _publish(self, page: Sequence[Parked]) -> int:
        """Publish the retries of a page that can be claimed; return their number."""
        keys = [p.key for p in page if p.framework in self._publishers and self._is_new(p)]
        lots = (keys[start : start + UNPARK] for start in range(0, len(keys), UNPARK))
        return sum(map(self._publish_lot, lots))

    @uninterrupted()
    def _publish_lot(self, keys: Sequence[str]) -> int:
        now, ends = self._context.clock(), time.monotonic() + CLAIM.total_seconds() / 2
        due = self._store.claim_parked(keys, now=now, until=now + CLAIM)
        published: list[Parked] = []
        try:
            for parked in due.retries:
                # After the end of the claim another process may publish the same retries.
                if time.monotonic() < ends and self._is_new(parked) and self._publish_one(parked):
                    published.append(parked)
        finally:
            self._let_go(due.retries, published, due.claim)
        return len(due.retries)

    def _publish_one(self, parked: Parked) -> bool:
        at = parked.next_retry_at
        state = {**parked.state, "next_retry_at": format_time(at)}
        try:
            self._publishers[parked.framework].publish(parked, state, due=at)
        except Unreachable:
            raise
        except Exception as error:  # noqa: BLE001 - one bad retry must not stop the others
            self._failed[parked.id] = str(error) or repr(error)
            return False
        finally:
            self._tried.add((parked.key, parked.fence))
        return True

    def _let_go(self, claimed: Sequence[Parked], published: Sequence[Parked], claim: str) -> None:
        rest = [parked for parked in claimed if parked not in published]
        if published:
            self._context.insist(lambda: self._store.unpark(published, claim))
            self._published += len(published)
            self._progress(self._published)
        if rest:
            self._store.unclaim_parked(rest, claim)

    def _is_new(self, parked: Parked) -> bool:
        return (parked.key, parked.fence) not in self._tried

    def _drained(self) -> Drained:
        held, others = 0, dict[str, int]()
        for parked in (parked for page in self._pages() for parked in page):
            if parked.framework not in self._publishers:
                others[parked.framework] = others.get(parked.framework, 0) + 1
            elif parked.id not in self._failed:
                held += 1
        return Drained(self._published, self._failed, held, others)
