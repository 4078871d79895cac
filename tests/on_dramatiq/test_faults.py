"""Whatever is raised between a delivery and its actor: the job runs later or is kept, and is never gone."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import dramatiq
import pytest

from ojs_bridge import open_store
from tests.faults import KINDS, STEPS, VARIABLE, Faults, place_of
from tests.on_dramatiq.application import Application
from tests.on_dramatiq.test_hostile import Queue
from tests.servers import Valkey, eventually


def own_steps() -> list[str]:
    """The steps that are Dramatiq's alone, from a module that only a worker imports."""
    text = (Path(__file__).parent / "faulty.py").read_text()
    return [line.strip(' ",') for line in text.splitlines() if line.startswith('    "dramatiq.')]


@pytest.mark.parametrize("step", [*STEPS, *own_steps()])
def test_every_step_is_there(step: str) -> None:
    owner, name = place_of(step)
    assert callable(getattr(owner, name))


@pytest.mark.requirement("RET-01")
def test_whatever_raises_before_an_actor_keeps_the_job(valkey: Valkey, tmp_path: Path, unique: str) -> None:
    faults = Faults(tmp_path)
    app = Application(valkey.url, unique, tmp_path, "tests.on_dramatiq.faulty", heartbeat="3000")
    app.environment.update(faults.env)
    queue, store = Queue(valkey.url, unique), open_store(app.store_url, namespace=unique)

    def is_somewhere(word: str) -> bool:
        dead = {dramatiq.Message.decode(body).message_id for body in queue.dead()}
        return bool(app.times(word)) or word in dead or store.get(word) is not None

    assert VARIABLE not in os.environ
    with app.working():
        eventually(lambda: "ready for action" in app.log.read_text(), seconds=30, what="a ready worker")
        for n, (step, kind) in enumerate(zip((*STEPS, *own_steps()), itertools.cycle(KINDS), strict=False)):
            word = f"job-{n}"
            with faults.at(step, kind):
                queue.put({"actor_name": "outspoken"}, word)
            eventually(lambda word=word: is_somewhere(word), seconds=30, what=f"a job after {kind} at {step}")
        queue.put({"actor_name": "outspoken"}, "healthy")
        eventually(lambda: app.times("healthy"), seconds=30, what="a healthy job")
