"""Replays send dead letters back to their queues: one, many, or by rules (spec sections dlq 6 and 7)."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..engine.context import Context
from ..engine.events import replayed
from ..engine.runs import Override, Publisher
from ..engine.scheduler import once_a_period
from ..engine.storage_retry import pause
from ..errors import ConfigurationError, InvalidRetryPolicy, LetterNotFound, Unreachable
from ..rules.job import Job, encode, entries_of
from ..rules.notations import duration_at, read_duration
from ..rules.policy import RetryPolicy, fields_of, known_words
from ..store import Claimed, Filter, Letter
from .audit import uninterrupted
from .editing import with_edits
from .letters import CLAIM_SECONDS, READ, every_page

logger = logging.getLogger("ojs_bridge")

#: The most letters that a replay claims at a time.
BATCH = 200
#: The time between two applications of the replay rules.
PERIOD = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Bulk:
    """The outcome of a change of many letters; without `confirmed` the letters were only counted.

    `errors` has the ids of letters that failed and stay, and the reasons: the first hundred.
    """

    matched: int
    succeeded: int = 0
    failed: int = 0
    errors: tuple[tuple[str, str], ...] = ()
    confirmed: bool = True

    def plus(self, count: int, wrong: Sequence[tuple[str, str]]) -> Bulk:
        """Return the outcome with so many more letters, of which some failed, with the reasons."""
        return Bulk(
            self.matched + count,
            self.succeeded + count - len(wrong),
            self.failed + len(wrong),
            (*self.errors, *wrong)[:MAX_ERRORS],
        )


MAX_ERRORS = 100


def publisher_of(context: Context, letter: Letter) -> Publisher:
    """Return the publisher of a letter; raises ConfigurationError if this process has none."""
    publisher, name = context.publishers.get(letter.framework), letter.framework
    if publisher is None:
        raise ConfigurationError(
            f"dead letter {letter.id!r} belongs to {name}, and this process has given the bridge to no "
            f"{name} app or broker: import the module that does"
        )
    if not publisher.knows(letter.type):
        raise ConfigurationError(
            f"dead letter {letter.id!r} is a {letter.type!r}, which {name} here does not know: it would "
            "only die again"
        )
    return publisher


def why_not(context: Context, letter: Letter) -> str | None:
    """Return why this process cannot replay a letter; None if nothing is known to prevent it."""
    try:
        publisher_of(context, letter)
    except ConfigurationError as error:
        return str(error)
    return None


def send(context: Context, letter: Letter, override: Override, operation: str = "") -> Job:
    """Publish a letter's message, and return the job as it goes on; raises every error of publishing.

    The store keeps the errors that the message has no room for. `operation` is the id of the bulk operation
    for which it is sent, if any.
    """
    publisher, job, store = publisher_of(context, letter), job_of(letter), context.store
    if override.edits:
        job, override = with_edits(letter, job, override, context.redactor)
    retry = job.retry
    if override.retry is not None:
        retry = {**(job.retry or {}), **fields_of(override.retry)}
        try:
            RetryPolicy.merge(known_words(retry))
        except InvalidRetryPolicy as error:
            # The override does not go with the job's own policy.
            raise error.under("retry") from None
    again = job.replayed(operation)._replace(retry=retry, queue=override.queue or job.queue)
    header = encode(again, history=context.history, budget=context.budget)
    if header.left_out and store is not None:
        store.letters.forget_errors(job.letter_id)
        store.letters.keep_errors(job.letter_id, header.left_out)
    publisher.republish(letter, header, override)
    return header.job


class Replayer:
    """Replays many dead letters, for a bulk operation if it has an id; `on_sent` is called with each job."""

    def __init__(self, context: Context, on_sent: Callable[[Job], object], operation: str = "") -> None:
        self._context, self._operation = context, operation
        self._letters = context.store_for("dead letters").letters
        self._clock = context.clock
        self._on_sent = on_sent

    def many(
        self,
        pages: Iterable[Sequence[Letter]],
        override: Override,
        *,
        rate: float | None = None,
        progress: Callable[[Bulk], object] = lambda _bulk: None,
    ) -> Bulk:
        """Replay pages of letters, at most `rate` a second; raises Unreachable and StoreError.

        `progress` is called with the outcome so far.
        """
        pace, done = _Pace(rate), Bulk(0)
        size = BATCH if rate is None else max(1, min(BATCH, int(rate)))
        for batch in (page[at : at + size] for page in pages for at in range(0, len(page), size)):
            done = done.plus(len(batch), self._batch(batch, override, pace))
            progress(done)
        return done

    def _batch(self, letters: Sequence[Letter], override: Override, pace: _Pace) -> list[tuple[str, str]]:
        wrong = {letter.id: why for letter in letters if (why := why_not(self._context, letter))}
        rest = [letter.id for letter in letters if letter.id not in wrong]
        while rest:
            # A slow pace may wait for longer than a claim lasts.
            pace.wait()
            rest = self._claim_and_send(rest, override, pace, wrong)
        return [*wrong.items()]

    @uninterrupted()
    def _claim_and_send(
        self, ids: Sequence[str], override: Override, pace: _Pace, wrong: dict[str, str]
    ) -> list[str]:
        """Replay letters under one claim; return the ids for which the claim was too short."""
        ends = time.monotonic() + CLAIM_SECONDS / 2
        claimed = self._letters.claim(ids, now=self._clock(), seconds=CLAIM_SECONDS)
        left = {letter.id: letter for letter in claimed.letters}
        wrong.update({i: "it is being replayed, or is gone" for i in ids if i not in left})
        done: dict[str, Job] = {}
        try:
            while left and time.monotonic() < ends:
                self._send(left.pop(next(iter(left))), override, done, wrong)
                if left:
                    pace.wait()
        finally:
            # The letters that failed are released, and those that were not tried.
            # A letter that stays would be published twice.
            self._context.storage_retry.run(self._letters.delete, [*done], claimed.claim)
            self._letters.unclaim([i for i in ids if i not in done], claimed.claim)
            for job in done.values():
                self._on_sent(job)
        return [*left]

    def _send(self, letter: Letter, override: Override, done: dict[str, Job], wrong: dict[str, str]) -> None:
        try:
            done[letter.id] = send(self._context, letter, override, self._operation)
        except Unreachable:
            raise
        except Exception as error:  # noqa: BLE001 - one bad letter must not stop the others
            wrong[letter.id] = str(error) or repr(error)


def only_claimed(claimed: Claimed, letter_id: str) -> Letter:
    """Return the letter of a claim on one; raises LetterNotFound."""
    if not claimed.letters:
        raise LetterNotFound(f"dead letter {letter_id!r} is being replayed, or is gone")
    return claimed.letters[0]


def check_rate(rate: float | None) -> None:
    """Raise ValueError for a rate that is no number of jobs a second."""
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate < math.inf):
        raise ValueError(f"rate: {rate!r} must be a number of jobs a second above zero")


class _Pace:
    """The pace of a replay: at most `rate` letters a second."""

    def __init__(self, rate: float | None) -> None:
        check_rate(rate)
        self._between = 1 / rate if rate else 0.0
        self._next = time.monotonic()

    def wait(self) -> None:
        """Wait for the time of the next letter."""
        if self._between:
            pause(self._next - time.monotonic())
            self._next = max(self._next, time.monotonic() - self._between) + self._between


def job_of(letter: Letter) -> Job:
    """Return the job of a letter, as it ended."""
    job_id = letter.job_id
    return Job(
        id=job_id,
        type=letter.type,
        queue=letter.queue,
        attempt=letter.attempt,
        retry=letter.retry,
        errors=tuple(entries_of(letter.errors)),
        created_at=letter.created_at,
        replay_count=letter.replay_count,
        fence=max(letter.fence, letter.attempt - 1),
        chain=letter.key.removeprefix(job_id).removeprefix("#"),
    )


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """Replays dead letters of some kind a `delay` after their death, each job at most `max_replays` times.

    `queue`, `type` and `error_type` are filters as in a listing. `delay` is an ISO 8601 duration or a
    timedelta. Replays by an operator count, too. Raises ConfigurationError.
    """

    name: str
    queue: str | None = None
    type: str | None = None
    error_type: str | None = None
    delay: str | timedelta = "PT1H"
    max_replays: int = 1
    enabled: bool = True

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ConfigurationError(f"replay rule: name: {self.name!r} must be a name")
        delay = duration_at(f"replay rule {self.name!r}: delay", self.delay, may_be_zero=True)
        if type(self.max_replays) is not int or self.max_replays < 1:
            wrong = f"max_replays: {self.max_replays!r} must be an integer of at least 1"
            raise ConfigurationError(f"replay rule {self.name!r}: {wrong}")
        try:
            Filter(self.queue, self.type, self.error_type)
        except ValueError as error:
            raise ConfigurationError(f"replay rule {self.name!r}: {error}") from None
        object.__setattr__(self, "delay", delay)

    def where(self, now: datetime) -> Filter:
        """Return the filter for the letters that are due under this rule."""
        return Filter(self.queue, self.type, self.error_type, until=now - read_duration(self.delay))


def checked(rules: Iterable[ReplayRule]) -> tuple[ReplayRule, ...]:
    """Return the rules; raises ConfigurationError for a wrong type, or for a name that stands twice."""
    if not isinstance(rules, Iterable):
        raise ConfigurationError(f"replay_rules: {rules!r} must be a list of ReplayRules")
    all_rules = tuple(rules)
    for rule in all_rules:
        if not isinstance(rule, ReplayRule):
            raise ConfigurationError(f"replay_rules: {rule!r} is not a ReplayRule")
    names = [rule.name for rule in all_rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"replay_rules: two rules are called {name!r}")
    return all_rules


def apply_rules(rules: Sequence[ReplayRule], context: Context) -> None:
    """Apply replay rules, unless another worker of the fleet has done so in this minute, or does now."""
    store, enabled = context.store_for("replay rules"), [rule for rule in rules if rule.enabled]
    for framework in context.publishers if enabled else ():
        apply = functools.partial(_apply_all, enabled, framework, context)
        once_a_period(store.reservations, f"replay:{framework}", PERIOD, context.clock, apply)


def _apply_all(rules: Sequence[ReplayRule], framework: str, context: Context) -> None:
    for rule in rules:
        _apply(rule, framework, context)


def _apply(rule: ReplayRule, framework: str, context: Context) -> None:
    publisher, letters = context.publishers[framework], context.store_for("replay rules").letters

    def due(letter: Letter) -> bool:
        ours = letter.framework == framework and publisher.knows(letter.type)
        return ours and letter.replay_count < rule.max_replays

    def emit(job: Job) -> None:
        context.emit(replayed(job, context.clock(), rule.name))

    read = functools.partial(letters.list, rule.where(context.clock()), limit=READ, oldest_first=True)
    pages = ([*filter(due, page.letters)] for page in every_page(lambda cursor: read(cursor=cursor)))
    done = Replayer(context, emit).many(pages, Override())
    if done.matched:
        logger.info("replay rule %r: %d replayed, %d not", rule.name, done.succeeded, done.failed)
