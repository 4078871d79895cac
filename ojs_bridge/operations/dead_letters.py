"""The operator's view of dead letters: find, replay, delete, count, export (DLQ-003, DLQ-006)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.events import deleted, pruned, replayed
from ..engine.runs import Changes, Override
from ..errors import LetterNotFound, StoreError, Unstorable
from ..rules.edits import Edits
from ..rules.job import Job
from ..store import EVERYTHING, Bin, Claimed, Fields, Filter, Letter, Letters, Page, Stats, to_json
from .arguments import LETTERS, Arguments, count_arguments
from .audit import DELETION, Audit, uninterrupted
from .editing import TEN, EditedLetter, previewed
from .groups import Groups, Timeline, timeline
from .letters import (
    CLAIM_SECONDS,
    LOOK_THROUGH,
    READ,
    SEARCH_SECONDS,
    Line,
    count,
    every_page,
    is_among,
    loaded_until,
    lots_of,
    only_id,
    page_size,
    pages_of_ids,
    read_lines,
    says,
    shown,
    without_text,
)
from .replaying import Bulk, Replayer, ReplayRule, apply_rules, job_of, only_claimed, send, why_not
from .retention import Pruner, Retention, limits_of
from .undoing import undo_until

logger = logging.getLogger("ojs_bridge")


class DeadLetters:
    """Dead letters of one bridge. Every method raises ConfigurationError when the bridge has no store.

    The letters that are returned are redacted, and a `text` is searched in the redacted letters. A call takes
    a filter, or its fields as keyword arguments, which take the place of the filter's own.
    """

    #: Begins a bulk operation and carries it out; the bulk operations, which use the letters, set it.
    carry_out: Callable[..., Bulk]

    def __init__(self, context: Context, retention: Retention, rules: Sequence[ReplayRule] = ()) -> None:
        self._context, self._rules, self._clock = context, rules, context.clock
        self._audit = Audit(context)
        #: The limits of the age and the number of letters.
        self.retention = retention
        #: The letters by their errors.
        self.groups = Groups(context)

    def list(
        self,
        where: Filter = EVERYTHING,
        *,
        limit: int = 50,
        cursor: str | None = None,
        **fields: Unpack[Fields],
    ) -> Page:
        """Return a page of the dead letters of a filter, newest first (DLQ-006, DLQ-R005).

        For a text, a page searches 2,000 letters, and begins no further step after 5 s: it may have few
        letters, or none, and still a cursor. Raises ValueError for a limit outside 1 to 1000, for a cursor
        that no page has returned, and for a time without a zone.
        """
        return self._page(replace(where, **fields), page_size(limit), cursor)

    def get(self, letter_id: str) -> Letter:
        """Return a dead letter with its whole history (DLQ-002); raises LetterNotFound."""
        return self._shown(self._get(letter_id))

    def find(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None; raises LetterNotFound for a job that has several."""
        letter = self._found(letter_id)
        return None if letter is None else self._shown(letter)

    def id_of(self, text: str) -> str:
        """Return the id of the dead letter of a job, or else the only one that begins with this text.

        The text has four characters at least. Without such an id it is returned as it is. Raises ValueError
        that names the ids, where there are several, and LetterNotFound where a job has several.
        """
        letter = self._found(text)
        return letter.id if letter else only_id(text, self._letters.ids_beginning)

    @uninterrupted()
    def replay(self, letter_id: str, **changes: Unpack[Changes]) -> Job:
        """Send a dead letter back to its queue: same id, fresh attempts, history kept (DLQ-003, DLQ-R002).

        The changes are `queue`, `args` and `kwargs`, which take the place of the job's own; and `meta`, the
        headers or options, and `retry`, a partial policy, which are merged over its own. The letter leaves
        the store only after its message was published. Raises LetterNotFound; ConfigurationError when this
        process has no publisher for the letter's framework or does not know its type; ValueError and
        InvalidRetryPolicy for the changes; and every error of publishing. After an error the letter stays.
        """
        return self.replay_with(letter_id, Override(**changes))[1]

    @uninterrupted()
    def replay_with(self, letter_id: str, override: Override) -> tuple[Letter, Job]:
        """Replay a dead letter as `replay` does; return the letter, which is gone, and its job."""
        claimed, whole_id = self._claim(letter_id)
        with self._audit.recording("dead_letter.replay", ids=[whole_id], changes=override.words()):
            letter = only_claimed(claimed, whole_id)
            try:
                job = send(self._context, letter, override)
            except BaseException:
                self._letters.unclaim([whole_id], claimed.claim)
                raise
            # A letter that stays is published twice, unless it is a new one: the job may have died again.
            self._context.storage_retry.run(self._letters.delete, [whole_id], claimed.claim)
            self._context.emit(replayed(job, self._clock()))
        return letter, job

    def replay_all(
        self,
        where: Filter = EVERYTHING,
        *,
        confirm: bool = False,
        override: Mapping[str, Any] | None = None,
        rate: float | None = None,
        progress: Callable[[int], object] | None = None,
        **fields: Unpack[Fields],
    ) -> Bulk:
        """Replay all dead letters of a filter, the oldest first (DLQ-R001); count them without `confirm`.

        It is a bulk operation, which `bridge.operations` shows, stops and resumes.
        `override` holds Changes for all letters. `rate` is the most replays in a second. `progress` is called
        with the number of letters done so far. Letters of jobs that die meanwhile are left alone. Letters
        that cannot be replayed stay, and the Bulk tells why. Raises ValueError and InvalidRetryPolicy; and
        Unreachable and StoreError: the letters that are not replayed yet stay.
        """
        changes, where = Override.of(override), replace(where, **fields)
        if not confirm:
            return self._counted(where)
        return self.carry_out("replay", where, progress, override=changes.to_ojs(), rate=rate)

    def preview(
        self,
        where: Filter = EVERYTHING,
        edits: Edits | None = None,
        *,
        ids: Sequence[str] | None = None,
        newest: bool = False,
        **fields: Unpack[Fields],
    ) -> Sequence[EditedLetter]:
        """Return ten letters, the oldest or the `newest`, before and after edits, redacted; or ValueError."""
        if ids is None:
            letters = self.first_of(replace(where, **fields), TEN, newest=newest)
        else:
            letters = [letter for page, _ in self.pages_of_ids(ids[:TEN], None) for letter in page]
        return [*previewed(letters, edits or Edits(), self._context.redactor)]

    def why_not(self, letter: Letter) -> str | None:
        """Return why this process cannot replay a letter; None if nothing is known to prevent it."""
        return why_not(self._context, letter)

    @uninterrupted()
    def delete(self, letter_id: str, *, forever: bool = False) -> Letter:
        """Delete a dead letter, and return it; raises LetterNotFound, also while a process replays it.

        For an hour `bridge.audit.undo` brings it back, unless it is deleted `forever`.
        """
        claimed, whole_id = self._claim(letter_id)
        subject = {"forever": True} if forever else {"undo_until": undo_until(self._clock())}
        with self._audit.recording(DELETION, ids=[whole_id], **subject) as entry:
            letter = only_claimed(claimed, whole_id)
            self._letters.forget_errors(whole_id)
            into = None if forever else Bin(entry.id, self._clock())
            try:
                is_gone = self._letters.delete([whole_id], claimed.claim, into)
            except StoreError:
                # What has no room in a bin may be deleted for ever, at once.
                self._letters.unclaim([whole_id], claimed.claim)
                raise
            if not is_gone:
                raise LetterNotFound(f"dead letter {whole_id!r} was replayed, and its job has died again")
        self._context.emit(deleted(job_of(letter), self._clock()))
        return letter

    def _claim(self, letter_id: str) -> tuple[Claimed, str]:
        """Claim a letter, or the only one of a job; return its id. Raises LetterNotFound if there is none."""
        claimed = self._letters.claim([letter_id], now=self._clock(), seconds=CLAIM_SECONDS)
        if not claimed.letters:
            letter_id, asked = self._get(letter_id).id, letter_id
            if letter_id != asked:
                claimed = self._letters.claim([letter_id], now=self._clock(), seconds=CLAIM_SECONDS)
        return claimed, letter_id

    def purge(
        self,
        where: Filter = EVERYTHING,
        *,
        confirm: bool = False,
        forever: bool = False,
        progress: Callable[[int], object] | None = None,
        **fields: Unpack[Fields],
    ) -> Bulk:
        """Delete all dead letters of a filter; without `confirm` only count them.

        A letter that is being replayed stays, and counts as failed. `bridge.operations.undo` brings others
        back, unless they are deleted `forever`. `progress` is as for `replay_all`.
        """
        where = replace(where, **fields)
        if not confirm:
            return self._counted(where)
        return self.carry_out("purge", where, progress, forever=forever)

    def purge_pages(
        self, pages: Iterable[Sequence[Letter]], progress: Callable[[Bulk], object], deletion: str | None
    ) -> Bulk:
        """Delete pages of letters, into the bin of a deletion; `progress` gets the outcome so far."""
        done = Bulk(0)
        try:
            for page in pages:
                with uninterrupted():
                    matched = done.matched + len(page)
                    into = None if deletion is None else Bin(deletion, self._clock())
                    succeeded = done.succeeded + self._letters.prune(page, now=self._clock(), into=into)
                    done = Bulk(matched, succeeded, matched - succeeded)
                    progress(done)
        finally:
            if done.succeeded:
                with uninterrupted():
                    self._context.emit(pruned(done.succeeded, self._clock(), policy="purge"))
        return done

    def stats(self, where: Filter = EVERYTHING, **fields: Unpack[Fields]) -> Stats:
        """Count the dead letters of a filter, in all and by queue, job type and last error type (DLQ-R004).

        To count those with a text takes as long as to read all others.
        """
        where = replace(where, **fields)
        documents = self._context.store_for("dead letters").documents
        stats = (
            self._letters.stats(where)
            if where.text is None
            else count(each for page in self._pages(where) for each in page)
        )
        return replace(stats, retention=limits_of(self.retention, documents, self._clock()))

    def by_argument(
        self, where: Filter = EVERYTHING, *, limit: int = LETTERS, **fields: Unpack[Fields]
    ) -> Arguments:
        """Count which values the arguments have, in so many of the newest letters of a filter.

        It counts for five seconds at most. A redacted argument is left out. Raises ValueError.
        """
        where = without_text(replace(where, **fields), "arguments")
        return count_arguments(self._letters, where, self._context.redactor, limit)

    def timeline(self, where: Filter = EVERYTHING, *, steps: int = 48, **fields: Unpack[Fields]) -> Timeline:
        """Count the deaths of a filter in so many steps of time, from `since`, or the oldest one, until now.

        Raises ValueError for a text, and for steps outside 1 to 1000.
        """
        where = without_text(replace(where, **fields), "deaths over time")
        return timeline(self._letters, where, self._clock(), steps)

    def export(
        self, where: Filter = EVERYTHING, *, raw: bool = False, **fields: Unpack[Fields]
    ) -> Iterator[str]:
        """Yield the dead letters of a filter, the oldest first, each as a line of JSON that `load` reads.

        Redacted lines cannot be loaded. With `raw` nothing is redacted, and the audit says so; a `text` is
        searched in the redacted letters all the same.
        """
        where = replace(where, **fields)
        with self._audit.recording("dead_letter.export", filter=where.to_json(), raw=raw or None) as entry:
            entry.add(0)
            for page in self._pages(where.until_now(self._clock())):
                for letter in page:
                    yield to_json(letter if raw else self._shown(letter))
                    entry.add(1)

    def load(self, lines: Iterable[str]) -> int:
        """Load lines of `export`, and return their number; a letter of the same id is replaced.

        Raises ValueError that names a damaged line: then no letter is loaded. Raises StoreError that names
        the last line whose letter was loaded: those before it were loaded, too.
        """
        return self.put(read_lines(lines))

    def put(self, lines: Sequence[Line], progress: Callable[[int], object] | None = None) -> int:
        """Load lines that have been read, as `load` does; `progress` is as for `replay_all`."""
        with self._audit.recording("dead_letter.import") as entry:
            entry.count = done = 0

            def bury(lot: Sequence[Line]) -> None:
                nonlocal done
                with uninterrupted():
                    self._letters.bury_all([line.letter for line in lot])
                    entry.count = done = done + len(lot)
                    if progress:
                        progress(done)

            try:
                for lot in lots_of(lines):
                    try:
                        bury(lot)
                    except Unstorable:
                        # One of them is at fault: those before it are loaded, and the error names its line.
                        for line in lot:
                            bury([line])
            except StoreError as error:
                place = f"line {lines[done].number}: " if isinstance(error, Unstorable) else ""
                raise type(error)(f"{place}{error}; {loaded_until(lines, done)}") from error
        return done

    def prune(self) -> int:
        """Delete the letters that exceed the retention now, and return their number; empty the bin (DLQ-004).

        Workers do so every five minutes. Raises OSError when the archive cannot be written.
        """
        with self._audit.recording("dead_letter.prune") as entry:
            entry.count = pruned = self._pruned(self._pruner().prune())
        return pruned

    def prune_once_a_period(self) -> None:
        """Prune, unless another worker of the fleet has pruned in this period, or does now (DLQ-005).

        The audit has what a limit of the number has deleted.
        """
        pruner = self._pruner()
        self._pruned(pruner.prune_once_a_period() or 0)
        if pruner.overflow:
            with self._audit.recording(
                "dead_letter.prune", limit="max_count", groups=pruner.named()
            ) as entry:
                entry.count = pruner.overflow.total()

    def _pruner(self) -> Pruner:
        store, clocks = self._context.store_for("dead letters"), (self._clock, self._context.surely)
        return Pruner(store, self.retention, *clocks, self._shown)

    def _pruned(self, count: int) -> int:
        if count:
            policy = "delete" if self.retention.archive is None else "archive"
            self._context.emit(pruned(count, self._clock(), policy=policy))
            logger.info("%d dead letters were pruned", count)
        return count

    def apply_replay_rules(self) -> None:
        """Replay, in a worker, what the replay rules name, unless another worker did in this minute."""
        apply_rules(self._rules, self._context)

    def replayer(self, on_sent: Callable[[Job], object], operation: str = "") -> Replayer:
        """Return a replayer, for a bulk operation if it has an id; it calls `on_sent` for each job."""

        def sent(job: Job) -> None:
            self._context.emit(replayed(job, self._clock()))
            on_sent(job)

        return Replayer(self._context, sent, operation)

    def _get(self, letter_id: str) -> Letter:
        if letter := self._found(letter_id):
            return letter
        raise LetterNotFound(f"there is no dead letter {letter_id!r}")

    def _found(self, letter_id: str) -> Letter | None:
        if letter := self._letters.get(letter_id):
            return letter
        # The id of a job finds a letter with more after that id, too, if it is the only one.
        of_job = self._letters.ids_beginning(f"{letter_id}~", 2)
        if len(of_job) > 1:
            raise LetterNotFound(f"job {letter_id!r} has more dead letters than one: {' and '.join(of_job)}")
        return self._letters.get(of_job[0]) if of_job else None

    def _counted(self, where: Filter) -> Bulk:
        where = where.until_now(self._clock())
        if where.text is None:
            return Bulk(self._letters.count(where), confirmed=False)
        return Bulk(sum(len(page) for page in self._pages(where)), confirmed=False)

    def pages(self, where: Filter, cursor: str | None) -> Iterator[tuple[Sequence[Letter], str | None]]:
        """Yield pages of letters as `_paged` does; letters that die from now on are left out."""
        return self._paged(where.until_now(self._clock()), cursor)

    def first_of(self, where: Filter, limit: int, *, newest: bool) -> Sequence[Letter]:
        """Return so many letters of a filter at most as they are stored, the oldest ones, or the newest."""
        found = (letter for page, _ in self._paged(where, None, newest=newest) for letter in page)
        return [*islice(found, limit)]

    def pages_of_ids(
        self, ids: Sequence[str], cursor: str | None, where: Filter = EVERYTHING
    ) -> Iterator[tuple[Sequence[Letter], str | None]]:
        """Yield the letters of some ids as they are stored, each page with the cursor after it.

        Letters that a filter does not choose any more, without its text, are left out.
        """
        for page, after in pages_of_ids(self._letters.get, ids, cursor):
            yield [letter for letter in page if is_among(letter, letter.discarded_at, where)], after

    def _pages(self, where: Filter) -> Iterator[Sequence[Letter]]:
        return (page for page, _ in self._paged(where, None))

    def _paged(
        self, where: Filter, cursor: str | None, *, newest: bool = False
    ) -> Iterator[tuple[Sequence[Letter], str | None]]:
        """Yield pages of letters as they are stored, the oldest first, each with the cursor after it."""

        def read(after: str | None) -> Page:
            return self._letters.list(where, limit=READ, cursor=after or cursor, oldest_first=not newest)

        for page in every_page(read):
            yield (
                [letter for letter in page.letters if says(letter, where.text, self._context.redactor)],
                page.next_cursor,
            )

    def _page(self, where: Filter, limit: int, cursor: str | None) -> Page:
        if where.text is None:
            page = self._letters.list(where, limit=limit, cursor=cursor)
            return Page(tuple(map(self._shown, page.letters)), page.next_cursor)
        letters, end = list[Letter](), time.monotonic() + SEARCH_SECONDS
        for _ in range(0, LOOK_THROUGH, READ):
            page = self._letters.list(where, limit=READ, cursor=cursor)
            for letter in page.letters:
                if says(letter, where.text, self._context.redactor):
                    letters.append(self._shown(letter))
                if len(letters) == limit:
                    return Page(tuple(letters), self._letters.cursor_after(letter))
            cursor = page.next_cursor
            if cursor is None or time.monotonic() >= end:
                break
        return Page(tuple(letters), cursor)

    def _shown(self, letter: Letter) -> Letter:
        return shown(letter, self._context.redactor)

    @property
    def _letters(self) -> Letters:
        return self._context.store_for("dead letters").letters
