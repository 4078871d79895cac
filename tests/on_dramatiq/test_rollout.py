"""A roll-out and a roll-back: old and new workers and producers on the same queue; real processes."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import dq_name

from ojs_bridge.store import Filter
from tests.on_dramatiq.application import Application, Process, end
from tests.on_dramatiq.fleet import dead_messages, left_in
from tests.servers import Valkey, eventually

MODULE = "tests.on_dramatiq.rolling"
#: The least and the most runs of each kind of job, whichever version runs it.
RUNS = {
    **dict.fromkeys(("instant", "step1", "member2", "callback"), (1, 1)),
    **dict.fromkeys(("flaky", "step2", "step3", "member1", "member3"), (3, 3)),
    "patient": (2, 2),
    "hopeless": (5, 5),
    "wishing": (3, 5),
    "narrow": (3, 6),
}
FORTH, BACK = ("old", "new"), ("new", "old")


class Ran(NamedTuple):
    """One run of a job."""

    version: str
    retries: int
    at: float
    has_state: bool


class Rollout:
    """Processes of both versions, and the ledger that their jobs write."""

    def __init__(self, url: str, queue: str, folder: Path) -> None:
        self.stop = folder / "stop"
        self.application = Application(url, queue, folder, MODULE, store=url, stop=str(self.stop))
        self.broker, self.queue = RedisBroker(url=url, namespace=queue), queue
        self._processes = ExitStack()

    def start(self, version: str, canary: str = "100") -> Process:
        """Start a worker; an old one imports nothing of the bridge."""
        self.application.environment["OJS_BRIDGE_CANARY"] = canary
        process = self.application.start(fault=version, fresh=version == "old")
        self._processes.callback(kill, process)
        return process

    def produce(self, version: str) -> subprocess.Popen[bytes]:
        """Start a producer, which ends when there is a stop file."""
        environment = {**self.application.environment, "APP_FAULT": version}
        with self.application.log.open("ab") as log:
            words = [sys.executable, "-c", f"from {MODULE} import produce; produce()"]
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        self._processes.callback(process.wait, 30)
        self._processes.callback(self.stop.touch)
        return process

    def drain(self) -> dict[str, Any]:
        """Run the command that hands parked retries to the broker."""
        words = ["-m", "ojs_bridge", "retries", "drain", "--app", f"{MODULE}:broker", "--yes", "--json"]
        environment = {**self.application.environment, "APP_FAULT": "new"}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def close(self) -> None:
        """End all processes."""
        self._processes.close()

    def lines(self, what: str) -> list[list[str]]:
        """The ledger's lines of one sort, but what is being written just now."""
        text = self.application.runs.read_text().rpartition("\n")[0]
        return [words[1:] for words in map(str.split, text.splitlines()) if words[0] == what]

    def runs(self) -> dict[str, list[Ran]]:
        """All runs of each job, in order."""
        found: defaultdict[str, list[Ran]] = defaultdict(list)
        for word, version, retries, at, has_state in self.lines("run"):
            found[word].append(Ran(version, int(retries), float(at), has_state == "True"))
        return found

    def crossed(self, before: str, after: str) -> int:
        """The number of retries that version `before` sent and version `after` ran."""
        return sum(
            (a.version, b.version) == (before, after)
            for runs in self.runs().values()
            for a, b in itertools.pairwise(runs)
        )

    def handed_on(self, before: str, after: str) -> int:
        """The number of pipelines and groups that version `before` began and version `after` ended."""
        runs, parts = self.runs(), (("step1", "step3"), ("member2", "callback"))
        pairs = [(f"{name}-{a}", f"{name}-{b}") for (name,) in self.lines("sent") for a, b in parts]
        return sum(
            (runs[a][0].version, runs[b][-1].version) == (before, after)
            for a, b in pairs
            if a in runs and b in runs
        )

    def passed(self, *way: tuple[str, str]) -> bool:
        """Whether many jobs, pipelines and groups went each way."""
        return min(self.crossed(*ab) for ab in way) > 10 and min(self.handed_on(*ab) for ab in way) > 2

    def sent(self) -> set[str]:
        """The jobs that were sent, or follow from those."""
        return {f"{name}-{kind}" for (name,) in self.lines("sent") for kind in RUNS}

    def ended(self) -> Counter[str]:
        """The number of ends of each job: in its own note, in a dead queue or in the store."""
        native = [message.args[0] for message in dead_messages(self.broker, self.queue)]
        store = self.application.store
        kept = [
            letter.reading.args[0] for letter in store.letters.list(Filter(), limit=1000, cursor=None).letters
        ]
        return Counter([*(word for (word,) in self.lines("end")), *native, *kept])

    def left(self) -> int:
        """The number of messages in the queue, with the delayed ones."""
        # The queue is read again, as a message may have come from the delayed ones meanwhile.
        return sum(left_in(self.broker, name) for name in (self.queue, dq_name(self.queue), self.queue))

    def reach(self, what: Callable[[], object], told: str) -> None:
        """Wait until `what` is true. If it never is, print the log of the workers."""

        def seldom() -> object:
            # Reading the ledger all the time would keep the workers from writing it.
            return what() or time.sleep(0.2)

        try:
            eventually(seldom, seconds=50, what=told)
        except BaseException:
            print(self.application.log.read_text()[-10_000:])
            raise


@pytest.fixture
def rollout(valkey: Valkey, unique: str, tmp_path: Path) -> Iterator[Rollout]:
    """A roll-out of which nothing has started yet."""
    rollout = Rollout(valkey.url, unique, tmp_path)
    yield rollout
    rollout.close()


def test_a_fleet_rolls_out_and_back(rollout: Rollout) -> None:
    """No job is lost, none runs beyond its bound, and the native counter says at each run how many were."""
    store = rollout.application.store
    producers = [rollout.produce("old"), rollout.produce("new")]
    old = rollout.start("old")
    rollout.reach(lambda: rollout.crossed("old", "old") > 20, "native retries")

    part = rollout.start("new", canary='{"*": 50, "flaky": 100, "patient": 0}')
    rollout.reach(lambda: rollout.passed(FORTH, BACK), "both ways")

    new = rollout.start("new")
    with ThreadPoolExecutor() as pool:
        [*pool.map(end, (old, part))]
    alone = rollout.crossed("new", "new")
    rollout.reach(
        lambda: rollout.crossed("new", "new") > alone + 30 and rollout.application.dead(), "retries"
    )

    old = rollout.start("old")
    back = rollout.crossed("new", "old")
    rollout.reach(
        lambda: rollout.crossed("new", "old") > back + 10 and store.parked.count() > 3, "the way back"
    )
    end(new)
    drained = rollout.drain()
    assert drained.pop("published") > 0
    assert drained == {"failed": [], "held": 0, "others": {}}
    assert store.parked.count() == 0

    rollout.stop.touch()
    assert [producer.wait(90) for producer in producers] == [0, 0]
    rollout.reach(lambda: rollout.left() == 0, "an empty queue")
    check(rollout.runs(), rollout.sent())
    assert rollout.ended() == dict.fromkeys(rollout.sent(), 1)


def kill(worker: Process) -> None:
    """End a worker that has nothing to do any more, with all its processes."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(90)


def check(runs: dict[str, list[Ran]], sent: set[str]) -> None:
    """Read in the ledger what must be true of every job."""
    assert runs.keys() == sent
    for word, ran in runs.items():
        kind = word.rpartition("-")[2]
        least, most = RUNS[kind]
        assert least <= len(ran) <= most, (word, ran)
        assert [run.retries for run in ran] == [*range(len(ran))], (word, ran)
        if kind == "patient":
            assert ran[1].at - ran[0].at > 1.49, word
        if kind == "wishing" and {run.version for run in ran} == {"old"}:
            # An old worker passes on the wish for three runs, and does not follow it.
            assert len(ran) == 5, (word, ran)
            assert all(run.has_state for run in ran) or word.startswith("old"), (word, ran)
