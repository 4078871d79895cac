"""The desk in a real browser: from an alert's link to the cause and to the mend, with each click counted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Error, Page, sync_playwright

#: The seconds that a text or a button may take to appear, in milliseconds.
PATIENCE = 20_000


@dataclass
class Desk:
    """A browser at the desk; the click on an alert's link is the first."""

    page: Page
    clicks: int = 0

    def open(self, link: str) -> None:
        """Follow an alert's link."""
        self.page.goto("about:blank")
        self.page.goto(link)
        self.clicks = 1

    def shows(self, pattern: str) -> bool:
        """Return whether the page comes to show a text outside the rail."""
        try:
            self.page.locator("#main").get_by_text(re.compile(pattern)).first.wait_for(timeout=PATIENCE)
        except Error:
            return False
        return True

    def walk(self, steps: Sequence[str]) -> bool:
        """Click on what selectors name, one after the other; return whether all of it was there."""
        for step in steps:
            try:
                self.page.locator(step).first.click(timeout=PATIENCE)
            except Error:
                return False
            self.clicks += 1
        return True

    def picture(self, path: Path) -> None:
        """Take a picture of what the window shows."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)


@contextmanager
def at_the_desk() -> Iterator[Desk]:
    """Yield a browser with a window of 1440 by 900."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium-headless-shell") or "/usr/bin/chromium",
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=90_000,
        )
        try:
            yield Desk(browser.new_page(viewport={"width": 1440, "height": 900}))
        finally:
            browser.close()
