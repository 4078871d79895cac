"""Takes the pictures of the page that the documentation shows: a shop with a bad deploy, in its own store.

`python -m tests.http.pictures` does so. `make night NIGHT=--write` takes those of the night, of real workers.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from ojs_bridge import Bridge, Dependency
from ojs_bridge.engine.faults import Failures
from ojs_bridge.http import app_for
from ojs_bridge.operations import health
from ojs_bridge.rules.decision import DeadLettered, RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job, format_time
from ojs_bridge.store import BOUNDS, Document, Rate, Store
from tests.http.doors import listening
from tests.lives import Outbox
from tests.store.test_parked import parked
from tests.store.test_rates import record
from tests.store.test_store import letter

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
#: The jobs that end in a minute, by type; the first part of a type is its queue.
ENDED = {"billing.charge": 41, "billing.invoice": 12, "mail.send": 96, "search.index": 230, "crm.sync": 18}
HOSTS = ("alder", "birch", "cedar")
FRAMEWORKS = {"celery": ("billing", "crm"), "dramatiq": ("mail", "search")}
COUNTRIES = ("DE", "FR", "IT", "PL")
#: The minutes since a deploy, and since its jobs die.
DEPLOYED, DIES = 24, 22


@dataclass
class Shop:
    """A fleet that has written to a store for a week; a deploy broke its `crm.sync` 24 minutes ago."""

    bridge: Bridge
    store: Store
    now: datetime
    chance: random.Random

    def live(self) -> None:
        """Write all that the page shows."""
        self._rates()
        self._workers()
        self._bad_deploy()
        self._others()
        self._waiting()

    def _rates(self) -> None:
        """Write the jobs that ended in each minute of the last hours, and in these hours of the last week."""
        minute = self.now.replace(second=0, microsecond=0)
        rates = list[Rate]()

        def ended(ago: timedelta, type_: str, number: float, outcome: str = "completed") -> None:
            # A few take much longer than the others.
            counts = [round(number * share) for share in (0, 0, 0.1, 0.55, 0.28, 0.05, 0.02)]
            counts += [0] * (len(BOUNDS) + 1 - len(counts))
            rates.append(Rate(minute - ago, type_, type_.partition(".")[0], outcome, tuple(counts)))

        for type_, number in ENDED.items():
            for day in range(1, 8):
                for hour in (-1, 0, 1):
                    ended(day * DAY + hour * 60 * MINUTE, type_, 60 * number)
            for ago in range(180):
                is_broken = type_ == "crm.sync" and ago <= DIES
                whole = self.now.second / 60 if ago == 0 else 1.0
                some = number * self.chance.uniform(0.85, 1.15) * whole
                ended(ago * MINUTE, type_, some * (0.2 if is_broken else 1))
                if is_broken:
                    ended(ago * MINUTE, type_, some * 0.8, "dead_lettered")
                    ended(ago * MINUTE, type_, some * 1.6, "retried")
                elif type_ == "mail.send":
                    ended(ago * MINUTE, type_, some * (0.12 if ago < 9 else 0.01), "retried")
        record(self.store, rates)

    def _workers(self) -> None:
        for host in HOSTS:
            for number, (framework, queues) in enumerate(FRAMEWORKS.items(), 1):
                name = f"{host}:{number}"
                self._write(
                    health.KIND, name, host=host, framework=framework, queues=[*queues],
                    seen_at=format_time(self.now), ended=False,
                )  # fmt: skip
                jobs = [
                    [f"{host}-{number}-{one}", self.chance.choice([*ENDED]), format_time(self.now - seconds)]
                    for one, seconds in enumerate((timedelta(seconds=41), timedelta(seconds=2)))
                    if self.chance.random() < 0.6
                ]
                self._write(
                    "running", name, parent=name, told_at=format_time(self.now), count=len(jobs), jobs=jobs
                )

    def _write(self, kind: str, name: str, **body: Any) -> None:
        self.store.documents.write(Document(kind, f"{kind}-{name}", self.now, {"name": name, **body}))

    def _bad_deploy(self) -> None:
        """Let jobs die behind a mark."""
        self.bridge.marks.add("v42", at=self.now - DEPLOYED * MINUTE)
        error = {
            "type": "builtins.KeyError", "message": "'vat_id'",
            "backtrace": ["/srv/shop/crm.py:88 in sync", "/srv/shop/crm.py:41 in fields_of"],
        }  # fmt: skip
        failures = Failures(self.store.documents, (), redacts=False)
        failure = Failure("builtins.KeyError", "'vat_id'", backtrace=tuple(error["backtrace"]))
        for number in reversed(range(320)):
            ago = timedelta(minutes=DIES * number / 320, seconds=2)
            self._bury(f"{number:08x}-crm", "crm.sync", ago, error, country="CH", account=4100 + number % 61)
            failures.add(
                Job("crm", "crm.sync", "crm"), DeadLettered("exhausted", failure, ""), self.now - ago
            )
        failures.write(self.now)

    def _others(self) -> None:
        """Let an old error come back, another one go on for days, and one be retried."""
        slow = {"type": "external.timeout", "message": "search did not answer within 5 s",
                "backtrace": ["/srv/shop/search.py:19 in index"]}  # fmt: skip
        for number in range(26):
            self._bury(
                f"search-{number}", "search.index", timedelta(minutes=40 * number + 9), slow, document=number
            )
        gone = {"type": "shop.NoSuchCustomer", "message": "customer 8812 is gone",
                "backtrace": ["/srv/shop/mail.py:52 in address_of"]}  # fmt: skip
        for number in range(4):
            self._bury(f"mail-{number}", "mail.send", timedelta(hours=30 + number), gone, customer=8812)
        [group] = self.bridge.groups.list(type="mail.send")
        self.bridge.groups.resolve(group.group.fingerprint, "v41")
        self.now = self.bridge.engine.now()
        self._bury("mail-9", "mail.send", timedelta(), gone, customer=9120)
        failures = Failures(self.store.documents, (), redacts=False)
        relay = Failure(
            "external.unavailable", "relay.example: 421 too busy", backtrace=("/srv/shop/mail.py:71 in send",)
        )
        for number in range(57):
            again = RetryAt(self.now + timedelta(minutes=9), 600, relay, "")
            failures.add(
                Job(f"relay-{number}", "mail.send", "mail"), again, self.now - number * timedelta(seconds=9)
            )
        failures.write(self.now)

    def _bury(self, name: str, type_: str, ago: timedelta, error: dict[str, Any], **arguments: Any) -> None:
        queue = type_.partition(".")[0]
        errors = [
            {
                "attempt": n,
                "details": {},
                "occurred_at": format_time(self.now - ago - (3 - n) * 7 * MINUTE),
                **error,
            }
            for n in (1, 2, 3)
        ]
        found = letter(
            name, type=type_, queue=queue, framework="celery", discarded_at=self.now - ago, errors=(*errors,),
            message={"args": [], "kwargs": {**arguments}, "task": type_},
        )  # fmt: skip
        self.store.letters.bury(found)

    def _waiting(self) -> None:
        """Let retries and scheduled jobs wait, and a pause hold some."""
        self.bridge.pause("billing.invoice", reason="the ledger moves", until=self.now + timedelta(hours=2))
        for number in range(140):
            due = self.now + timedelta(seconds=self.chance.triangular(30, 3600, 300))
            kind: dict[str, Any] = {"type": "mail.send", "queue": "mail", "reason": "external.unavailable"}
            if number % 5 == 0:
                kind = {"kind": "scheduled", "type": "mail.send", "queue": "mail", "attempt": 1, "fence": 0,
                        "state": {"v": 1, "attempt": 1}, "reason": "delayed"}  # fmt: skip
            elif number % 5 == 1:
                kind = {"kind": "held", "type": "billing.invoice", "queue": "billing", "reason": "held",
                        "attempt": 1, "fence": 0, "state": {"v": 1, "attempt": 1}}  # fmt: skip
            self.store.parked.park(
                parked(
                    f"{number:08x}-wait",
                    next_retry_at=due,
                    parked_at=self.now - MINUTE,
                    framework="celery",
                    **kind,
                )
            )


def shoot(
    browser: Browser, address: str, name: str, place: str, keys: Sequence[str] = (), **how: Any
) -> None:
    """Take a picture of a place of the page, after some keys."""
    page: Page = browser.new_page(viewport={"width": 1440, "height": 900}, **how)
    page.goto(f"{address}{place}")
    page.locator("main h1").first.wait_for()
    # The flow of a queue is known when its depth was asked twice.
    page.wait_for_timeout(12_000 if not place else 3_000)
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_timeout(1_500)
    page.screenshot(path=PICTURES / f"{name}.png")
    page.close()


def take() -> None:
    """Take all pictures of the page."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        bridge = Bridge(f"sqlite:///{folder}/ojs.db", dependencies=[Dependency("relay", jobs=["mail.*"])])
        store = bridge.engine.context.store_for("the pictures")
        for framework, queues in FRAMEWORKS.items():
            outbox = Outbox(waiting={queue: 40 if queue == "mail" else 0 for queue in queues})
            bridge.engine.context.publishers[framework] = outbox
        Shop(bridge, store, bridge.engine.now(), random.Random(42)).live()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or "/usr/bin/chromium",
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        group = bridge.groups.list(type="crm.sync")[0].group.fingerprint
        with listening(app_for(bridge, open_to_all=True)) as address:
            shoot(browser, f"{address}/", "page", "")
            shoot(browser, f"{address}/", "page-groups", "#groups")
            shoot(browser, f"{address}/", "page-group", f"#groups/{group}")
            shoot(browser, f"{address}/", "page-waiting", "#waiting")
            shoot(browser, f"{address}/", "page-replay", f"#groups/{group}", keys="p")
            shoot(browser, f"{address}/", "page-waiting", "#waiting")
            shoot(browser, f"{address}/", "page-rates", "#rates")
            shoot(browser, f"{address}/", "page-detail", "#letters/00000007-crm", color_scheme="dark")
        browser.close()


if __name__ == "__main__":
    take()
