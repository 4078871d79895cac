"""Documents and rates in Redis, which itself forgets the rates: a hash for each minute and each hour."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime

from ..documents import BOUNDS, KEPT, SECONDS, Document, DocumentPage, Rate, Span, begun
from ..records import from_json, from_ms, index_id, index_text, to_json, to_ms
from .index import RedisIndex, entry_of, lots, moment, rows_of
from .server import RedisServer, Word

#: How long Redis remembers a writer's last batch, so that a batch is not counted twice after a lost answer.
_KNOWN_MS = 3_600_000
#: How many hashes one script reads.
_AT_ONCE = 24


class RedisDocuments:
    """The documents and rates of a store."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        names = ("documents", "documents:by_time", "documents:by_kind", "documents:kinds")
        self._document_keys = server.keys(*names)
        self._documents = self._document_keys[0]
        self._document_index = RedisIndex(server, self._document_keys, newest_first=True)

    def write(self, document: Document, *, of_operator: bool = False) -> bool:
        """Write a document in place of its earlier revision."""
        field = _field(document.kind, document.id)
        entry = entry_of((document.kind,), document.at, field)
        # The script that replaces the record takes its entry away.
        record = f'{to_json(document)[:-1]}, "moment": "{moment(document.at)}"}}'
        words = (field, document.revision, record, entry, int(of_operator))
        return bool(self._server.run("write_document", self._document_keys, words))

    def get(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""
        record = self._server.ask("HGET", self._documents, _field(kind, document_id))
        return None if record is None else from_json(Document, record.decode())

    def list(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first."""
        rows, more = self._document_index.page(lambda texts: texts == [kind], limit, cursor)
        documents = (from_json(Document, record.decode()) for _, record in rows)
        return DocumentPage(tuple(documents), more)

    def count(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Count documents by kind."""
        counts = self._document_index.counts(lambda texts: texts[0] in kinds, None, None)
        return {texts[0]: count for texts, count, _, _ in counts}

    def forget(self, kind: str, *, before: datetime) -> int:
        """Delete older documents."""
        return int(self._server.run("forget_documents", self._document_keys, (kind, moment(before))))

    def record_rates(self, rates: Sequence[Rate], writer: str, number: int) -> None:
        """Add to the counts, in one step, unless this batch of the writer was added."""
        added: dict[tuple[Span, int], Counter[str]] = defaultdict(Counter)
        for rate in rates:
            for span in SECONDS:
                added[span, begun(rate.at, span)] += Counter(dict(_fields(rate)))
        words: list[Word] = [_KNOWN_MS, number]
        for (span, at), fields in added.items():
            words += [at + int((KEPT[span].total_seconds() + SECONDS[span]) * 1000), len(fields)]
            words += [word for field in fields.items() for word in field]
        keys = [self._server.key(f"rates:writer:{writer}"), *(self._key(*one) for one in added)]
        self._server.run("record_rates", keys, words)

    def rates(self, since: datetime, until: datetime, span: Span) -> Sequence[Rate]:
        """Return the rates of the spans that begin in a time, by time."""
        step = SECONDS[span] * 1000
        times = range(-(-to_ms(since) // step) * step, to_ms(until), step)
        return [rate for lot in lots(times, _AT_ONCE) for rate in self._read(span, lot)]

    def forget_rates(self, now: datetime) -> None:
        """Do nothing: the hashes expire."""

    def _read(self, span: Span, times: Sequence[int]) -> Iterator[Rate]:
        answers = self._server.run("rates", [self._key(span, at) for at in times])
        for at, words in zip(times, answers, strict=True):
            counts: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BOUNDS) + 1))
            for field, count in rows_of(words):
                place, _, texts = field.decode().partition(" ")
                # Another version may tell longer times apart.
                counts[texts][min(int(place), len(BOUNDS))] += int(count)
            for texts in sorted(counts):
                type_, queue, outcome, *_ = json.loads(texts)
                yield Rate(from_ms(at), type_, queue, outcome, tuple(counts[texts]))

    def _key(self, span: Span, at: int) -> bytes:
        return self._server.key(f"rates:{span}:{at // 1000}")


def _field(kind: str, document_id: str) -> str:
    return index_id(f"{kind}:{document_id}")


def _fields(rate: Rate) -> Iterator[tuple[str, int]]:
    texts = json.dumps([*map(index_text, (rate.type, rate.queue, rate.outcome))])
    return ((f"{place} {texts}", count) for place, count in enumerate(rate.counts) if count)
