"""The dead letters' routes: list, get, replay, delete, replay and purge many, stats (spec dlq 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from starlette.responses import Response

from ..bridge import Bridge
from ..errors import InvalidRetryPolicy, LetterNotFound
from ..messages import OWN_META
from ..operations.letters import Kind
from ..operations.replaying import Bulk, overrides_of
from ..spec.job import Job, format_time
from ..spec.policy import RetryPolicy
from ..store import Letter, Page
from . import shapes
from .answers import conflicts, invalid, not_found
from .bulk import Bulks
from .fields import (
    CONFIRM,
    CONFIRM_WORD,
    PATTERN,
    TIME,
    WORD,
    Field,
    Fields,
    Schema,
    nested,
    number,
    read_object,
)
from .paging import PAGE, Counts, page_of
from .routes import Asked, Operation, answers

#: A longer pause between two replays looks like a replay that hangs.
SLOWEST, FASTEST = 0.1, 10_000
#: The most retries of a policy that are shown.
SCHEDULED = 50

KIND: Fields = {
    "queue": WORD,
    "type": PATTERN,
    "error_type": PATTERN,
    "text": WORD,
    "since": TIME,
    "until": TIME,
}


def _unread(schema: Schema) -> Field:
    """Return a field that `overrides_of` reads, together with the others of an override."""
    return Field(schema, lambda _name, told: told)


_META: Schema = {
    "type": "object",
    "propertyNames": {"not": {"enum": sorted(OWN_META)}},
    "description": "Merged over the job's own headers or options",
}
_POLICY: Schema = {
    "type": "object",
    "properties": RetryPolicy.json_schema()["properties"],
    "additionalProperties": False,
}
_OVERRIDE: Fields = {
    "queue": _unread({"type": "string", "minLength": 1}),
    "args": _unread({"type": "array"}),
    "kwargs": _unread({"type": "object"}),
    "meta": _unread(_META),
    "retry": _unread(_POLICY),
}


def _override(name: str, told: object) -> dict[str, Any]:
    override = read_object(name, told, _OVERRIDE)
    if not isinstance(override.get("retry", {}), dict):
        raise invalid("retry: must be an object of retry policy fields")
    try:
        overrides_of(override)
    except InvalidRetryPolicy:
        raise
    except ValueError as error:
        raise invalid(str(error)) from None
    return override


_PURGE: Fields = {"filter": nested(KIND), "confirm": CONFIRM}
_REPLAY: Fields = {**_PURGE, "rate": number(SLOWEST, FASTEST, "a number of jobs a second")}

LETTERS: list[Operation] = []


class Letters:
    """Serves the dead letters of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._letters = bridge.dead_letters
        self._now = bridge.engine.now
        self._counts = Counts(bridge.dead_letters.stats)
        self._bulks = Bulks(changed=self._counts.forget)

    @answers(LETTERS, "GET", "/dead-letter", query={**KIND, **PAGE})
    def list(self, asked: Asked) -> shapes.Page:
        """List dead letters, the newest first."""
        kind = _kind(asked.query)
        if "text" in kind and asked.query.get("offset"):
            # To skip entries with a text might read all that there are.
            raise invalid("offset: does not go with a text; go on by next_cursor")

        def read(limit: int, cursor: str | None) -> Page:
            return self._letters.list(limit=limit, cursor=cursor, **kind)

        def total(page: Page, offset: int) -> int | None:
            return None if "cursor" in asked.query else self._total(kind, page, offset)

        page, place = page_of(read, asked.query, total)
        jobs = [cast(shapes.Letter, letter.to_ojs()) for letter in page.letters]
        return {"jobs": jobs, "pagination": place}

    def _total(self, kind: Kind, page: Page, offset: int) -> int | None:
        """Return the number of letters of a kind, None where only a count would tell."""
        if page.next_cursor is None and (page.letters or not offset):
            return offset + len(page.letters)
        return self._counts.of(kind)

    @answers(
        LETTERS, "DELETE", "/dead-letter", query={**KIND, "confirm": CONFIRM_WORD}, body=_PURGE, many=True
    )
    async def purge(self, asked: Asked) -> Response:
        """Purge dead letters."""
        if asked.query and asked.body:
            raise invalid("filters and confirm go into the query or into the body, not into both")
        told = asked.body or {"filter": asked.query, **asked.query}
        return await self._many(asked, "purge", self._letters.purge, told)

    @answers(LETTERS, "GET", "/dead-letter/stats")
    def stats(self, _asked: Asked) -> shapes.Stats:
        """Count dead letters."""
        return cast(shapes.Stats, self._counts.get().to_ojs())

    @answers(LETTERS, "GET", "/dead-letter/timeline", query=KIND)
    def timeline(self, asked: Asked) -> shapes.Timeline:
        """Count deaths in steps of time; a text is not looked for."""
        found = self._letters.timeline(**_kind(asked.query))
        since, step = format_time(found.since), found.step.total_seconds()
        return {"since": since, "step_seconds": step, "counts": [*found.counts]}

    @answers(LETTERS, "POST", "/dead-letter/retry", body=_REPLAY, many=True)
    async def retry_all(self, asked: Asked) -> Response:
        """Replay dead letters."""
        rate = asked.body.get("rate")
        return await self._many(asked, "retry", self._letters.retry_all, asked.body, rate=rate)

    async def _many(
        self,
        asked: Asked,
        action: shapes.Action,
        act: Callable[..., Bulk],
        told: Mapping[str, Any],
        **options: Any,
    ) -> Response:
        """Act on all letters of a kind; without `confirm` refuse, and tell their number."""
        kind = _kind(told.get("filter", {}))
        if not told.get("confirm"):
            found = (await self._bulks.run(lambda: act(**kind))).matched
            raise invalid(f"confirm: must be true; {found} dead letters are matched", matched=found)
        return await self._bulks.answer(
            asked.request, action, lambda progress: act(confirm=True, progress=progress, **options, **kind)
        )

    @answers(
        LETTERS,
        "POST",
        "/dead-letter/{id}/retry",
        body={"override": Field(nested(_OVERRIDE).schema, _override)},
    )
    def retry(self, asked: Asked) -> shapes.ReplayedJob:
        """Replay a dead letter."""
        letter = self._letter(asked.id)
        try:
            with conflicts():
                job = self._letters.retry(letter.id, **asked.body.get("override", {}))
        finally:
            self._counts.forget()
        return {"job": self._replayed(letter, job)}

    def _replayed(self, letter: Letter, job: Job) -> shapes.Replayed:
        return {
            "id": letter.id,
            "type": letter.type,
            "state": "available",
            "queue": job.queue,
            "attempt": 0,
            "max_attempts": (job.retry or {}).get("max_attempts", letter.max_attempts),
            "retry": None if job.retry is None else dict(job.retry),
            "metadata": {"framework": letter.framework, "ojs.replay_count": job.replay_count},
            "re_enqueued_at": format_time(self._now()),
        }

    @answers(LETTERS, "GET", "/dead-letter/{id}")
    def get(self, asked: Asked) -> shapes.LetterDetail:
        """Get a dead letter, its whole history and the delays that its policy asks for."""
        letter = self._letter(asked.id)
        return cast(shapes.LetterDetail, {**letter.to_ojs(), "schedule": _schedule(letter)})

    @answers(LETTERS, "DELETE", "/dead-letter/{id}")
    def delete(self, asked: Asked) -> shapes.Deleted:
        """Delete a dead letter."""
        letter = self._letter(asked.id)
        try:
            with conflicts():
                self._letters.delete(letter.id)
        finally:
            self._counts.forget()
        return {"deleted": True, "job_id": letter.id}

    def _letter(self, letter_id: str) -> Letter:
        try:
            return self._letters.get(letter_id)
        except LetterNotFound:
            raise not_found("dead_letter_job", letter_id) from None


def _kind(told: Mapping[str, Any]) -> Kind:
    """Return the kind of letters that a query, or the filter of a body, names."""
    return cast(Kind, {name: told[name] for name in KIND if name in told})


def _schedule(letter: Letter) -> list[float]:
    """Return the seconds before each retry of a letter's policy, without jitter, fifty at most."""
    policy = RetryPolicy.merge(letter.policy, {"jitter": False})
    retries = range(1, min(policy.runs, SCHEDULED + 1)) if letter.policy else ()
    return [policy.delay(n) for n in retries]
