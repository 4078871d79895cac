"""A job's retry state and its wire form, the `ojs` header (spec section 10)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeAlias

from pydantic_core import from_json, to_json

from ..errors import InvalidState
from .failures import CUT, Failure, cut, nests_deeper, safe_repr, sound_json

#: The version of the wire form. A worker reads no other version.
VERSION = 1
#: The spec's section 10.1 keeps at least this many error entries.
MIN_HISTORY = 10
#: The largest size of the header's JSON, in bytes. An AMQP frame holds 131 KB of headers and loses the rest.
HEADER_BUDGET = 16 * 1024
MIN_HEADER_BUDGET = 8 * 1024
#: The largest counter that a worker reads. Redis counts exactly up to twice as much, so a job can go on.
MAX_COUNT = 2**52
#: The longest JSON of a header that a worker reads, and the longest text of each of its names.
MAX_HEADER, MAX_NAME = 1024 * 1024, 255
#: The deepest nesting of a header. Its next writer has less room on the stack than its reader had.
MAX_DEPTH = 128

#: One failed attempt as the spec's section 10.1 writes it, plus `backtrace`.
ErrorEntry: TypeAlias = dict[str, Any]
#: An entry and its place in the job's whole history, from 0, which no other entry of the job has.
PlacedEntry: TypeAlias = tuple[int, ErrorEntry]


# A frozen dataclass takes five times as long to make, and every job makes some.
class Job(NamedTuple):
    """One job at one attempt, in either framework.

    `attempt` is 1-based and names the run that is due or under way. `retry` is the job's own partial policy.
    At `expires` the framework would drop the message unrun. `fence` grows with every retry, snooze and
    replay: a message with a lower fence is a late copy. `chain` tells jobs apart that a user has sent under
    one id. `operation` is the bulk operation that has replayed the job last, if any. `publication` is the
    mark of a message that its user has sent to the store, and not to the broker; a retry has none. `turn` is
    the id of the hold for whose turn the job has waited.
    """

    id: str
    type: str
    queue: str
    attempt: int = 1
    retry: Mapping[str, Any] | None = None
    errors: tuple[ErrorEntry, ...] = ()
    errors_dropped: int = 0
    next_retry_at: datetime | None = None
    created_at: datetime | None = None
    replay_count: int = 0
    expires: datetime | None = None
    fence: int = 0
    chain: str = ""
    operation: str = ""
    publication: str = ""
    turn: str = ""

    @property
    def key(self) -> str:
        """The key of the job's reservations."""
        return f"{self.id}#{self.chain}" if self.chain else self.id

    @property
    def letter_id(self) -> str:
        """The id of the job's dead letter: the job's own, and its chain after a tilde if it has one."""
        return f"{self.id}~{self.chain}" if self.chain else self.id

    @property
    def own_letter_id(self) -> str:
        """The id of the job's letter where another job's has `letter_id`: it tells of the first error."""
        first = str(self.errors[0].get("timestamp")) if self.errors else ""
        return f"{self.letter_id}~{hashlib.sha256(first.encode('utf-8', 'replace')).hexdigest()[:32]}"

    @property
    def due_at(self) -> datetime | None:
        """The time when the job was due or sent; None where it is not known, as that of a replay."""
        return self.next_retry_at or (None if self.replay_count else self.created_at)

    def failed(
        self,
        failure: Failure,
        *,
        at: datetime,
        next_at: datetime | None = None,
        traceparent: str | None = None,
    ) -> Job:
        """Return the job with this attempt's failure at the end of its history (spec section 10.1).

        With `next_at`, it is the job at its next attempt, due then. `traceparent` is the trace context of the
        run that failed: the span of the next attempt links to it.
        """
        entry: ErrorEntry = {
            "attempt": self.attempt,
            "type": failure.type,
            "message": failure.message,
            "code": failure.code,
            "timestamp": format_time(at),
            "details": dict(failure.details),
        }
        if failure.backtrace:
            entry["backtrace"] = list(failure.backtrace)
        if traceparent:
            entry["traceparent"] = traceparent
        if self.replay_count:
            entry["replay"] = self.replay_count
        return self._replace(
            attempt=self.attempt if next_at is None else self.attempt + 1,
            errors=(*self.errors, entry),
            next_retry_at=next_at,
            fence=self.fence + 1,
            publication="",
            turn="",
        )

    def snoozed(self, at: datetime, turn: str = "") -> Job:
        """Return the job as a snooze publishes it: the same attempt, due at a time, perhaps in its turn."""
        return self._replace(next_retry_at=at, fence=self.fence + 1, publication="", turn=turn)

    def waiting(self, at: datetime) -> Job:
        """Return the job of this delivery, put off until a time."""
        return self._replace(next_retry_at=at)

    def replayed(self, operation: str = "") -> Job:
        """Return the job as a replay starts it: no attempt used, history kept, one more replay."""
        return self._replace(
            attempt=1,
            next_retry_at=None,
            expires=None,
            replay_count=self.replay_count + 1,
            fence=self.fence + 1,
            operation=operation,
            publication="",
            turn="",
        )


@dataclass(frozen=True, slots=True)
class Header:
    """A job's wire form: as JSON text, as an object, and the job with the error entries that remain.

    `left_out` holds the dropped entries, and those that remain only in part (marked `"cut": true`).
    """

    text: str
    state: dict[str, Any]
    job: Job
    left_out: tuple[PlacedEntry, ...] = ()


def encode(job: Job, *, history: int = MIN_HISTORY, budget: int = HEADER_BUDGET) -> Header:
    """Return the `ojs` header, JSON of at most `budget` bytes.

    The newest `history` errors stay. Where they are too long, their details, backtraces and messages are cut.
    Raises InvalidState when even the cut form is too long; only a huge retry policy can cause that.
    """
    kept = job
    for length, is_cut_down in ((history, False), (history, True), (MIN_HISTORY, True)):
        excess = len(kept.errors) - length
        if excess > 0:
            kept = kept._replace(errors=kept.errors[excess:], errors_dropped=kept.errors_dropped + excess)
        errors = _shrunk(kept, budget) if is_cut_down else kept.errors
        state = _state(kept, errors)
        text = _dumps(state)
        if len(text) <= budget:
            return Header(text, state, kept, () if errors is job.errors else _left_out(job, errors))
    raise InvalidState(f"the job's retry state needs {len(text)} bytes, its budget is {budget}")


def _left_out(job: Job, carried: tuple[ErrorEntry, ...]) -> tuple[PlacedEntry, ...]:
    dropped = len(job.errors) - len(carried)
    return tuple(
        (job.errors_dropped + index, entry)
        for index, entry in enumerate(job.errors)
        if index < dropped or not (carried[index - dropped] is entry or is_cut(entry))
    )


def is_cut(entry: ErrorEntry) -> bool:
    """Return whether an entry is only a part of the recorded one."""
    return entry.get("cut") is True


def _state(job: Job, errors: tuple[ErrorEntry, ...]) -> dict[str, Any]:
    state: dict[str, Any] = {"v": VERSION, "attempt": job.attempt}
    if job.retry:
        state["retry"] = dict(job.retry)
    if errors:
        state["errors"] = list(errors)
    for name in ("errors_dropped", "replay_count", "chain", "operation", "publication", "turn"):
        if value := getattr(job, name):
            state[name] = value
    for name in ("next_retry_at", "created_at"):
        if at := getattr(job, name):
            state[name] = format_time(at)
    if job.fence != job.attempt - 1:
        state["fence"] = job.fence
    return state


# All values were decoded from JSON or made plain before: they have no cycles.
_escaped = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _dumps(value: object) -> str:
    """Return ASCII, which every transport carries. The faster writer escapes nothing and refuses some."""
    try:
        raw = to_json(value)
    except ValueError:
        return _escaped(value)
    return raw.decode() if raw.isascii() else _escaped(value)


def _shrunk(job: Job, budget: int) -> tuple[ErrorEntry, ...]:
    if not job.errors:
        return ()
    fixed = len(_dumps(_state(job, ())))
    share = (budget - fixed) // len(job.errors) - 16
    return tuple(_shrink(entry, share) for entry in job.errors)


def _shrink(entry: ErrorEntry, share: int) -> ErrorEntry:
    if _size(entry) <= share:
        return entry
    small = {key: entry.get(key) for key in _ENTRY_KEYS}
    small |= {"details": entry.get("details") or {}, "cut": True}
    small |= {key: entry[key] for key in ("replay", "traceparent") if key in entry}
    if _size(small) > share and small["details"]:
        small["details"] = {"cut": True}
    for key in ("message", "type", "code", "timestamp", "attempt", "replay"):
        excess = _size(small) - share
        if excess > 0 and key in small:
            small[key] = _cut_bytes(str(small[key]), max(_size(small[key]) - excess - 2 * len(CUT), 32))
    return small


_ENTRY_KEYS = ("attempt", "type", "message", "code", "timestamp")


def _cut_bytes(text: str, limit: int) -> str:
    """Shorten a text until its JSON fits the limit; one character can take twelve bytes."""
    while _size(text) > limit and len(text) > len(CUT) + 1:
        text = cut(text.removesuffix(CUT), max(len(text) * 3 // 4, len(CUT) + 1))
    return text


def _size(value: object) -> int:
    return len(_dumps(value))


#: The type of each field of the header's JSON. An integer is a count.
_KINDS = {
    "attempt": int,
    "retry": dict,
    "errors": list,
    "errors_dropped": int,
    "next_retry_at": str,
    "created_at": str,
    "replay_count": int,
    "fence": int,
    "chain": str,
    "operation": str,
    "publication": str,
    "turn": str,
}
_COUNT = f"an integer from 0 to {MAX_COUNT}"


def decode(state: object, job: Job) -> Job:
    """Return the job with the state of its `ojs` header: a JSON string or an object.

    `job` has the framework's part: id, type, queue, its own retry options and, from the native counter, the
    attempt. That counter wins over the header's, so that rolled-back workers and foreign requeues count, too.
    The header's policy wins over the framework's options.
    Raises InvalidState for a damaged header or an unknown version.
    """
    header = _read(state)
    fields: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        value = header.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidState(f"the ojs header's {name} must be {kind.__name__}, not {cut(repr(value), 80)}")
        if kind is int and count_of(value) is None:
            raise InvalidState(f"the ojs header's {name} must be {_COUNT}, not {cut(repr(value), 80)}")
        if isinstance(value, str) and len(value) > MAX_NAME and not name.endswith("_at"):
            raise InvalidState(
                f"the ojs header's {name} must have at most {MAX_NAME} characters: {cut(value, 80)}"
            )
        fields[name] = value
    attempt = fields.get("attempt", job.attempt)
    steps = job.attempt - attempt
    fence = fields.get("fence", max(attempt - 1, 0))
    retry = fields.get("retry")
    return Job(
        job.id,
        job.type,
        job.queue,
        job.attempt,
        {**job.retry, **(retry or {})} if job.retry else retry,
        tuple(entries_of(fields.get("errors", ()))),
        fields.get("errors_dropped", 0),
        _time(fields, "next_retry_at") if steps == 0 else None,
        _time(fields, "created_at") or job.created_at,
        fields.get("replay_count", 0),
        job.expires,
        # Where someone else has changed the native counter, the fence is a new one.
        fence if steps == 0 else fence + max(steps, 1),
        fields.get("chain", job.chain),
        fields.get("operation", ""),
        fields.get("publication", ""),
        fields.get("turn", ""),
    )


def decoded(state: object, job: Job, retries: object = None) -> Job | InvalidState:
    """Return the job with the state in its message, or as it is without any; else why that cannot be read.

    `retries` is the message's native counter, from which `job` has its attempt if it is a count.
    """
    if retries and count_of(retries) is None:
        return InvalidState(f"the message's retries must be {_COUNT}, not {cut(safe_repr(retries), 80)}")
    if state is None:
        return job
    try:
        return decode(state, job)
    except InvalidState as error:
        return error


def count_of(value: object) -> int | None:
    """Return a counter; None for a negative number, one beyond MAX_COUNT, or no integer."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _read(written: object) -> dict[str, Any]:
    """Return the fields of a header of our version."""
    state = written
    if isinstance(written, (str, bytes)):
        if len(written) > MAX_HEADER:
            raise _too_long(len(written), written[:80])
        try:
            state = from_json(written)
        except (ValueError, TypeError):
            # The faster reader refuses lone surrogates, but an exception's message may hold some.
            try:
                state = json.loads(written)
            except (ValueError, RecursionError) as error:
                raise InvalidState(f"the ojs header is not JSON: {cut(str(error), 200)}") from None
    if not isinstance(state, dict):
        raise InvalidState(f"the ojs header must be a JSON object, not {type(state).__name__}")
    if nests_deeper(state, MAX_DEPTH):
        raise InvalidState(f"the ojs header is nested more than {MAX_DEPTH} deep")
    version = state.get("v")
    if version != VERSION or isinstance(version, bool):
        raise InvalidState(
            f"the ojs header has version {cut(repr(version), 80)}, this worker reads {VERSION}"
        )
    return state


def entries_of(errors: Sequence[Any]) -> Sequence[ErrorEntry]:
    """Return the entries of a history; raises InvalidState for an entry that is no object.

    It raises InvalidState, too, where they are too long: an object in a message has no length before. A lone
    surrogate is spelt out, because an encoder may refuse it.
    """
    for entry in errors:
        if not isinstance(entry, dict):
            raise InvalidState(f"the ojs header's errors must hold objects, not {cut(repr(entry), 80)}")
    try:
        size = len(to_json(errors))
    except ValueError:
        text = json.dumps(errors)
        size, errors = len(text), json.loads(sound_json(text))
    if size > MAX_HEADER:
        raise _too_long(size, "errors")
    return errors


def _too_long(size: int, beginning: str | bytes) -> InvalidState:
    return InvalidState(
        f"the ojs header has {size:,} bytes, and this worker reads {MAX_HEADER:,} at most: {beginning!r}…"
    )


def _time(fields: Mapping[str, Any], name: str) -> datetime | None:
    text = fields.get(name)
    try:
        return None if text is None else parse_time(text)
    except ValueError:
        raise InvalidState(f"the ojs header's {name} is no timestamp: {cut(repr(text), 80)}") from None


def format_time(at: datetime) -> str:
    """Write a time as RFC 3339 in UTC with milliseconds."""
    if at.tzinfo is not timezone.utc:
        at = at.astimezone(timezone.utc)
    return at.isoformat(timespec="milliseconds")[: -len("+00:00")] + "Z"


def parse_time(text: str) -> datetime:
    """Read an RFC 3339 time with a zone as UTC; raises ValueError without one, or out of range."""
    if len(text) > MAX_NAME:
        raise ValueError(f"a time of more than {MAX_NAME} characters")
    at = datetime.fromisoformat(text.replace("Z", "+00:00"))
    if at.tzinfo is None:
        raise ValueError("a time without a zone")
    try:
        return at.astimezone(timezone.utc)
    except OverflowError:
        raise ValueError("a time that UTC cannot hold") from None
