"""Pipelines and groups whose members fail, wait, die and are replayed: what should follow follows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from tests.on_dramatiq.application import Application
from tests.on_dramatiq.conftest import url_of
from tests.servers import Valkey, eventually

KILLED = ("at work", "before what follows", "before the acknowledgement")
FAULTS = ("retried", "parked", "replayed", *KILLED)
CASES = [(role, fault) for role in ("pipeline", "group") for fault in FAULTS]


def word(role: str, fault: str) -> str:
    return f"{role}-{fault}".replace(" ", "_")


def expected() -> Mapping[str, tuple[int, int]]:
    """The number of runs of each struck member, and of its follower."""
    wanted = {word(role, fault): (2, 1) for role, fault in CASES}
    # Nothing tells a pipeline's step that was sent again from a job that a user has sent twice.
    wanted[word("pipeline", "before the acknowledgement")] = (2, 2)
    return wanted


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_what_should_follow_follows(
    kind: str, request: pytest.FixtureRequest, valkey: Valkey, unique: str, tmp_path: Path
) -> None:
    application = Application(
        url_of(request, kind),
        unique,
        tmp_path,
        "tests.on_dramatiq.composed",
        heartbeat="2000",
        reservation="PT2S",
        limits=valkey.url,
    )
    application.environment["OJS_BRIDGE_PARK_AFTER"] = "PT1S"
    application.produce("\n".join(f"send({role!r}, {fault!r})" for role, fault in CASES))
    halts = {f"{word(role, fault)}-halted" for role, fault in CASES if fault in KILLED}

    def seen() -> Mapping[str, tuple[int, int]]:
        counts = application.counts()
        words = [word(role, fault) for role, fault in CASES]
        return {w: (counts.get(w, 0), counts.get(f"{w}-followed", 0)) for w in words}

    with application.working(threads=12) as process:
        eventually(lambda: halts <= application.counts().keys(), seconds=60, what="all to be killed")
        eventually(lambda: len(application.letters()) == 2, seconds=30)
        eventually(lambda: all(seen()[word(role, "parked")][1] for role in ("pipeline", "group")), seconds=30)
        assert all(seen()[word(role, "replayed")][1] == 0 for role in ("pipeline", "group"))
        # The follower is sent before the job is acknowledged: a kill in between would send it twice.
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
    with application.working(threads=12):
        application.produce("replay_all()")
        with suppress(TimeoutError):
            eventually(lambda: seen() == expected(), seconds=60)
    assert seen() == expected()
