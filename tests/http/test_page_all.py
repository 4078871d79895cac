"""Every view of letters and of what waits: anybody can use it, and nothing is wider than its screen."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from ojs_bridge.http import app_for
from tests.http.desks import Desk
from tests.http.doors import OPERATOR, READER, listening

LONG = "w" * 250
ARGS = {"args": [LONG, 1], "kwargs": {"country": "CH"}}


def fill(desk: Desk) -> None:
    """Have a group, letters with long texts, a retry, a hold and an operation."""
    for n in range(12):
        error = {"type": "crowd.error", "message": f"no seat {n}", "backtrace": ["/srv/shop/a.py:7 in f"]}
        desk.bury(f"j-{n}", ago=900 - n, error=error, message={"args": [n], "kwargs": {"plan": "team"}})
    error = {"type": LONG, "message": LONG, "backtrace": [LONG]}
    desk.bury(LONG[:180], ago=5, type=LONG, queue=LONG, error=error, reason=LONG, message=ARGS)
    desk.park("r-1", next_retry_at=desk.now + timedelta(hours=2), type=LONG, queue=LONG, reason=LONG)
    desk.bridge.pause("mail.*", reason=LONG)
    desk.bridge.marks.add(LONG)
    ids = ["j-10", "j-11"]
    desk.bridge.operations.run(desk.bridge.operations.begin("purge", ids=ids))
    stopped = desk.bridge.operations.begin("replay", ids=["j-0"])
    desk.bridge.operations.stop(stopped.id)


def places(desk: Desk) -> dict[str, str]:
    """Return the places of the views, and what is seen there."""
    [group] = [each for each in desk.bridge.groups.list() if each.group.count == 10]
    return {
        "#groups": "#groups [data-row]",
        f"#groups/{group.group.fingerprint}": ".stats",
        "#letters": "#letters [data-row]",
        "#letters/j-1": "#job-id",
        f"#letters/{LONG[:180]}": "#job-id",
        "#waiting": "#waiting [data-row]",
        "#waiting/r-1": "#job-id",
        "#letters?queue=none": "text=No dead letter matches",
        "#groups/0123456789abcdef": "text=Nothing of it has died",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(browser: Browser, desk: Desk, scheme: Any) -> None:
    """No view and no dialog has anything that axe finds wrong; a reader has nothing that writes."""
    fill(desk)
    axe, bridge = Axe(), desk.bridge

    def check(page: Page) -> None:
        found = axe.run(page)
        assert found.violations_count == 0, found.generate_report()

    with listening(app_for(bridge, operator_token=OPERATOR, reader_token=READER)) as address:
        for token in (OPERATOR, READER):
            page = browser.new_page(color_scheme=scheme, viewport={"width": 1440, "height": 900})
            page.goto(address)
            page.locator("#token").fill(token)
            page.keyboard.press("Enter")
            for place, seen in places(desk).items():
                page.goto(f"{address}/{place}")
                expect(page.locator(seen).first).to_be_visible()
                check(page)
                if token == READER:
                    assert page.locator("main .pick, main .danger, main .first, #pause").count() == 0
                    expect(page.get_by_role("button", name="Replay")).to_have_count(0)
                    continue
                for words in ("Probe replay…", "Resolve in a mark…", "Pause ", "Replay as it is", "Move…"):
                    opener = page.locator("main .title .do").get_by_role("button", name=words)
                    if not opener.count():
                        continue
                    opener.first.click()
                    expect(page.locator("#question")).to_be_visible()
                    check(page)
                    page.locator("#question [data-no]").click()
            page.close()


@pytest.mark.parametrize("width", [390, 1440, 1920])
def test_nothing_is_wider_than_its_screen(desk: Desk, width: int) -> None:
    """No text of a job makes the page wider; a phone shows the first letter on its first screen."""
    fill(desk)
    desk.page.set_viewport_size({"width": width, "height": 844})
    for place, seen in places(desk).items():
        page = desk.open(place)
        expect(page.locator(seen).first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, place
        if place == "#letters":
            box = desk.rows().first.bounding_box()
            assert box and box["y"] + box["height"] <= 844
