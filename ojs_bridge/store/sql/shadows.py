"""The tallies of shadow mode in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from ..records import from_ms, index_id, index_text, to_ms
from ..shadows import Tally
from .database import Database
from .statements import New, Upsert
from .tables import shadows as table

_c = table.c


def _added(new: New) -> dict[str, Any]:
    more = new["shown"] >= _c.shown
    examples = {name: sa.case((more, new[name]), else_=_c[name]) for name in ("examples", "shown")}
    return {"total": _c.total + new["total"], **examples}


_ADD = Upsert(table, "last_ms", "explanation", changes=_added)


class SQLShadows(Database):
    """The part of a store that holds the tallies of shadow mode."""

    def record_shadows(self, tallies: Sequence[Tally]) -> None:
        """Add to the counts, in one transaction."""
        # All processes write in the same order, so that no two of them wait for each other's rows.
        rows = sorted((self._row(tally) for tally in tallies), key=lambda row: row["key"])
        with self._transaction() as connection:
            for row in rows:
                _ADD(connection, row)

    def shadows(self) -> list[Tally]:
        """Return all tallies, in the order of framework, task and kind."""
        with self._statement() as connection:
            rows = connection.execute(sa.select(table).where(_c.namespace == self._namespace)).all()
        return sorted(map(_tally, rows), key=lambda tally: (tally.framework, tally.task, tally.kind))

    def clear_shadows(self) -> int:
        """Delete all tallies; return how many there were."""
        return self._change(sa.delete(table), [_c.namespace == self._namespace])

    def _row(self, tally: Tally) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "key": index_id("\n".join((tally.framework, tally.task, tally.kind))),
            "framework": index_text(tally.framework),
            "task": index_text(tally.task),
            "kind": index_text(tally.kind),
            "total": tally.count,
            "last_ms": to_ms(tally.last_seen),
            "explanation": tally.explanation.encode("utf-8", "replace").decode().replace("\0", "\ufffd"),
            "examples": json.dumps([*map(dict, tally.examples)]),
            "shown": len(tally.examples),
        }


def _tally(row: Any) -> Tally:
    examples = tuple(json.loads(row.examples))
    return Tally(
        row.framework, row.task, row.kind, row.total, from_ms(row.last_ms), row.explanation, examples
    )
