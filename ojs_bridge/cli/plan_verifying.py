"""`ojs-bridge plan --verify`: what was read is run in memory, and put beside what production did."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from ..config.sources import layered
from ..migration.plan import Planned
from ..migration.shadowing import bridge_of_shadow
from ..migration.shadowing.comparing import TaskReport, reports
from ..store import Store, open_store
from .apps import is_celery


def verified(app: Any, found: Sequence[Planned]) -> list[Planned]:
    """Return a plan with what was measured, and with what shadow mode has seen; raises StoreError.

    Raises ConfigurationError for an app that is under the bridge already.
    """
    store = _store_of(app)
    seen = {one.task: _told(one) for one in reports(store.shadows())} if store else {}
    logging.disable(logging.CRITICAL)  # each run fails, and says so
    try:
        with redirect_stdout(sys.stderr):
            found = _measured(app, found)
    finally:
        logging.disable(logging.NOTSET)
    return [replace(one, production=seen.get(one.name, "")) for one in found]


def _measured(app: Any, found: Sequence[Planned]) -> list[Planned]:
    if is_celery(app):
        from ..migration.plan.celery.measuring import measured

        return measured(app, found)
    from ..migration.plan.dramatiq.measuring import measured as measured_on_dramatiq

    return measured_on_dramatiq(app, found)


def _store_of(app: Any) -> Store | None:
    """Return the store that has tallies of shadow mode: that of the app's shadow, or the configured one."""
    if shadowed := bridge_of_shadow(app):
        return shadowed.store
    url = layered(store=None)["store"].value
    return open_store(str(url)) if url else None


def _told(one: TaskReport) -> str:
    rate = "" if one.shadow_match_rate is None else f", shadow_match_rate {one.shadow_match_rate:.4f}"
    kinds = "".join(f", {tally.kind} {tally.count:,}" for tally in one.differences)
    return f"{one.compared:,} of {one.failed:,} failed runs compared{rate}{kinds}"
