"""Sends a job in a transaction, and dies: `python -m tests.contract.sender FRAMEWORK WAY STEP ID`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ojs_bridge.engine.scheduler import Scheduler
from ojs_bridge.store.sql.jobs import SQLParkedJobs
from tests.contract.conftest import KINDS
from tests.contract.notes import Settings
from tests.transactions import WAYS


def die(*_: Any) -> None:
    """Die as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_as(owner: type, name: str) -> Callable[[], None]:
    """Die as soon as a method is called."""
    return lambda: setattr(owner, name, die)


#: What has been done when the sender dies; all but the first are after the commit.
STEPS: Mapping[str, Callable[[], None]] = {
    "sent": lambda: None,
    "committed": lambda: None,
    "claimed": die_as(Scheduler, "publish"),
    "published": die_as(SQLParkedJobs, "unpark"),
}


def main(framework: str, way: str, step: str, job: str) -> None:
    """Send, and die."""
    STEPS[step]()
    settings = Settings.from_env()
    fleet = KINDS[framework](settings, Path(tempfile.mkdtemp()))
    _, begin = WAYS[way]
    with begin(fleet.store) as given:
        fleet.send("act", "ok", within=given, id=job)
        if step == "sent":
            die()
    if step != "committed":
        time.sleep(5)  # a worker may be quicker, and then it does not die before
    die()


if __name__ == "__main__":
    main(*sys.argv[1:])
