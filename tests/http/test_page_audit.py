"""The audit, in a real browser: who did what, and why."""

from __future__ import annotations

import csv
import re

from playwright.sync_api import Browser, expect

from ojs_bridge.http import app_for
from tests.http.desks import Desk, browser, desk
from tests.http.doors import OPERATOR, listening
from tests.http.test_page import EVIL

__all__ = ["browser", "desk"]


def test_who_did_what(browser: Browser, desk: Desk) -> None:
    """A question asks for the reason; the record has it, beside the name of the token. Filters choose."""
    for n in range(2):
        desk.bury(f"why-{n}", ago=60 + n)
    bridge = desk.bridge
    with listening(app_for(bridge, tokens=f"alice:operator:{OPERATOR}")) as address:
        page = browser.new_page()
        page.goto(f"{address}#letters")
        page.locator("#token").fill(OPERATOR)
        page.keyboard.press("Enter")
        for n, reason in enumerate(("ticket 12", EVIL)):
            page.locator(f'[data-row][data-id="why-{n}"] a').first.focus()
            page.keyboard.press("d")
            expect(page.get_by_role("textbox", name="Why")).to_have_value("")
            page.get_by_role("textbox", name="Why").fill(reason)
            page.locator("#question [type=submit]").click()
            expect(page.locator(f'[data-row][data-id="why-{n}"]')).to_have_count(0)
        page.get_by_role("link", name="Audit").first.click()
        records = page.locator("#audit [data-row]")
        for n, reason in ((0, EVIL), (1, "ticket 12")):
            for told in (reason, "alice", "dead_letter.delete", f"why-{1 - n}", "done"):
                expect(records.nth(n)).to_contain_text(told)
        page.get_by_label("Action, or prefix.*").fill("nothing.*")
        expect(page.locator("main")).to_contain_text("No record matches these filters.")
        page.reload()
        expect(page.get_by_label("Action, or prefix.*")).to_have_value("nothing.*")
        page.get_by_role("button", name="Clear").click()
        expect(records).to_have_count(2)
        with bridge.audit.acting("bob"):
            bridge.marks.add("v42")
        expect(records.first).to_contain_text("bob")
        expect(page).to_have_title(re.compile("^Audit"))
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save as CSV").click()
        lines = [*csv.DictReader(saved.value.path().open(newline=""))]
        assert [line["who"] for line in lines] == ["bob", "alice", "alice"]
        assert [line["reason"] for line in lines[1:]] == [EVIL, "ticket 12"]
        page.close()


def test_a_deletion_is_undone_from_its_record(desk: Desk) -> None:
    """The letters come back, and that is on record."""
    desk.bury("gone")
    desk.bridge.dead_letters.delete("gone")
    page = desk.open("#audit")
    page.get_by_role("button", name="Undo…").click()
    desk.asked("Bring the letters back", "Leave them deleted")
    desk.yes()
    expect(page.locator("#audit [data-row]").first).to_contain_text("dead_letter.undo")
    assert desk.ids() == ["gone"]
