"""What a worker of `-I tests.on_celery.struck` does besides: a message's header says where it is struck."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker.request import Request

from ojs_bridge.engine import heartbeat
from tests.contract.notes import Noting, Settings
from tests.strikes import Strike

STRUCK = ("/ojs_bridge/", "/celery/app/trace.py", "/celery/concurrency/", "/celery/worker/request.py")

heartbeat.CLEAR_SECONDS = 0.1
noting = Noting(Settings.from_env().backend)
strikes: dict[str, Strike] = {}
accepted, acknowledge = Request.on_accepted, Request.acknowledge


def greenlet_exit(at: str) -> BaseException:
    return sys.modules["greenlet"].GreenletExit(at)


def struck(job: str, error: Callable[[str], BaseException], at: str) -> BaseException:
    print(f"struck {job} at {at}", file=sys.stderr, flush=True)
    return error(at)


ERRORS = {"MemoryError": MemoryError, "GreenletExit": greenlet_exit}


def on_accepted(self: Request, *args: Any) -> None:
    headers = self.request_dict
    if "strike" in headers and self.id not in strikes:
        nth, error = headers["strike"]
        strike = strikes[self.id] = Strike(
            nth, partial(struck, self.id, ERRORS[error]), STRUCK, "apply_target"
        )
        strike.arm()
    return accepted(self, *args)


def acknowledge_and_note(self: Request) -> None:
    acknowledge(self)
    strike = strikes.get(self.id)
    if strike:
        noting.note("strikes", self.id, [strike.lines, strike.at])


Request.on_accepted, Request.acknowledge = on_accepted, acknowledge_and_note
