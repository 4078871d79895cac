"""The settings of a night, which one variable carries to all its processes, and what the jobs do."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from ojs_bridge import Breaker, Bridge, Dependency, standard_errors
from tests.chaos.ledger import Ledger

VARIABLE = "OJS_NIGHT"
#: The variable that a worker has besides: its app is made at import.
WORKER = "OJS_NIGHT_WORKER"
#: Each job type with its queue; those of Celery, and those of Dramatiq.
CELERY = {"billing.charge": "billing", "mail.send": "mail"}
DRAMATIQ = {"reports.build": "reports", "images.scale": "images"}
#: The seconds that a report takes, and those of a night in which its database is slow; other jobs take none.
REPORT, SLOW_REPORT = 0.1, 10.0


@dataclass(frozen=True)
class Settings:
    """The broker, the store, the folder with the ledger and the switches, and the bank's port."""

    broker: str
    store: str
    folder: str
    bank: int

    def to_env(self) -> dict[str, str]:
        """Return the variable that carries them."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Settings:
        """Read them."""
        return cls(**json.loads(os.environ[VARIABLE]))

    @property
    def ledger(self) -> Path:
        """The folder in which jobs note that they are done."""
        return Path(self.folder) / "ledger"

    def switch(self, name: str) -> Path:
        """Return the file that is there while something is on, such as a broken version of the code."""
        return Path(self.folder) / f"{name}.on"

    def bridge(self) -> Bridge:
        """Make the bridge of a process: two retries within seconds, and a breaker for the bank."""
        policy = {
            "max_attempts": 3,
            "initial_interval": "PT1S",
            "max_interval": "PT3S",
            "on_exhaustion": "dead_letter",
        }
        breaker = Breaker(least=20, cool_down="PT10S", probes=2, ramp="20/s")
        bank = Dependency("bank", ["external.*"], ["billing.charge"], breaker=breaker)
        return Bridge(self.store, retry=policy, errors=standard_errors(), dependencies=[bank])


def work(settings: Settings, type_: str, job: str, order: dict[str, str]) -> None:
    """Do what a job of a type does; raises what its faults make it raise."""
    if type_ == "billing.charge":
        with urllib.request.urlopen(f"http://127.0.0.1:{settings.bank}/{job}", timeout=5) as answer:
            answer.read()
    elif type_ == "mail.send" and settings.switch("deploy").exists():
        raise KeyError("postcode")  # the new version reads a field that no order has
    elif type_ == "images.scale" and order["image"] == "poison.png":
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does where a job takes all memory
    elif type_ == "reports.build":
        time.sleep(SLOW_REPORT if settings.switch("slow").exists() else REPORT)
    Ledger(str(settings.ledger)).note("done", job, 1)
