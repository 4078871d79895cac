"""The desk in a real browser: a page on a store of its own, whose server runs in this process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from ojs_bridge import Bridge, Letter
from ojs_bridge.http import app_for
from tests.http.doors import listening
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.store.test_parked import parked
from tests.store.test_store import entry, letter

#: A loaded machine's patience, in milliseconds.
expect.set_options(timeout=90_000)


@dataclass
class Desk:
    """A page, and the bridge whose letters it shows."""

    page: Page
    bridge: Bridge
    outbox: Outbox
    address: str

    @property
    def now(self) -> datetime:
        """The time of the bridge."""
        return self.bridge.engine.now()

    def open(self, place: str) -> Page:
        """Show a place, such as `#letters`."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}{place}")
        return self.page

    def bury(self, letter_id: str, ago: float = 60, error: Any = None, **fields: Any) -> Letter:
        """Bury a letter of the outbox, so many seconds old; its last error may have other parts."""
        known: dict[str, Any] = {"discarded_at": self.now - timedelta(seconds=ago), "framework": FRAMEWORK}
        if error:
            known["errors"] = ({**entry(1), **error},)
        found = letter(letter_id, **{**known, **fields})
        self.bridge.engine.context.store_for("a test").letters.bury(found)
        return found

    def park(self, job_id: str, **fields: Any) -> None:
        """Park a retry of the outbox, or another job that waits; it is due in an hour."""
        known = {"next_retry_at": self.now + timedelta(hours=1), "framework": FRAMEWORK}
        self.bridge.engine.context.store_for("a test").parked.park(parked(job_id, **{**known, **fields}))

    def ids(self) -> list[str]:
        """Return the ids of the dead letters, in their order."""
        return sorted(found.id for found in self.bridge.dead_letters.list(limit=1000).letters)

    def rows(self, view: str = "letters") -> Locator:
        """Return the rows of a list."""
        return self.page.locator(f"#{view} [data-row]")

    def row(self, row_id: str) -> Locator:
        """Return the row of a letter or job."""
        return self.page.locator(f'main [data-row][data-id="{row_id}"]')

    def filter(self, label: str, text: str) -> None:
        """Type a filter, and wait until the address has it."""
        self.page.get_by_label(label, exact=False).first.fill(text)
        expect(self.page).to_have_url(re.compile(re.escape(f"={text}".replace(" ", "+"))))

    def act(self, row: Locator, words: str) -> None:
        """Choose an action of a row's menu."""
        row.locator("summary").first.click()
        row.get_by_role("button", name=words).click()

    def asked(self, deed: str, way_out: str) -> Locator:
        """Check that a question says what it does, and that the way out has the focus; return it."""
        question = self.page.locator("#question")
        expect(self.page.locator("#question-title")).to_have_text(f"{deed}?")
        expect(question.locator("footer button").first).to_have_text(way_out)
        expect(question.locator("footer button").first).to_be_focused()
        return question

    def yes(self) -> None:
        """Do what is asked, and wait for the end of the question."""
        self.page.locator("#question [type=submit]").click()
        expect(self.page.locator("#question")).to_have_count(0)

    def no(self) -> None:
        """Leave a question."""
        self.page.locator("#question [data-no]").click()
        expect(self.page.locator("#question")).to_have_count(0)

    def told(self, text: str) -> None:
        """Wait for news."""
        expect(self.page.locator("#told")).to_contain_text(text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, without a screen; the build that never has one takes a third less of the machine."""
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or "/usr/bin/chromium",
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=90_000,
        )
        yield found
        found.close()


@pytest.fixture
def desk(browser: Browser, tmp_path: Path) -> Iterator[Desk]:
    """A desk without a token; an error in the console of its page fails the test."""
    bridge, outbox = bridge_with_outbox(f"sqlite:///{tmp_path}/ojs.db")
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda told: wrong.append(told.text) if "Content Security" in told.text else None)
    with listening(app_for(bridge, open_to_all=True)) as address:
        yield Desk(page, bridge, outbox, f"{address}/")
        page.close()
    assert not wrong, wrong
