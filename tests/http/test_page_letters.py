"""The list of the dead letters in a real browser: filters, search, choice, bulk actions, what comes."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from ojs_bridge import Bridge, Retention
from ojs_bridge.http import app_for
from tests.http.desks import Desk
from tests.http.doors import listening
from tests.lives import FRAMEWORK
from tests.operations.test_bulk import Running, bury_many
from tests.operations.test_retention import deploy
from tests.servers import eventually

COUNTED = "2 \N{MULTIPLICATION SIGN} billing.charge"


def test_filters_stand_in_the_address(desk: Desk) -> None:
    """They choose letters, counts and chart; the address shares them, and a button clears them."""
    for n in range(4):
        desk.bury(f"j-{n}", queue="a" if n < 3 else "b", error={"type": "auth.expired" if n else "other"})
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(4)
    expect(page.locator("#letters-here")).to_have_text("4 in all")
    desk.filter("Queue", "a")
    desk.filter("Error type", "auth.*")
    expect(desk.rows()).to_have_count(2)
    expect(page.locator("#letters-here")).to_have_text("2 of 4")
    expect(page.get_by_role("img", name=re.compile("^Died .*2 in all"))).to_be_visible()
    page.reload()
    expect(desk.rows()).to_have_count(2)
    expect(page.get_by_label("Queue")).to_have_value("a")
    page.get_by_role("button", name="Clear").click()
    expect(desk.rows()).to_have_count(4)


def test_the_last_hour_is_shown_and_all_is_a_click_away(desk: Desk) -> None:
    """What died before the last hour is offered where nothing else is there."""
    desk.bury("old", ago=7200)
    page = desk.open("#letters")
    expect(page.get_by_text("No job has died in this time.")).to_be_visible()
    page.get_by_text("Show all of time").click()
    expect(desk.rows()).to_have_count(1)
    expect(page).to_have_url(re.compile("within=all"))
    page.go_back()
    expect(desk.rows()).to_have_count(0)


def test_a_search_goes_on_by_itself(desk: Desk) -> None:
    """A request searches 2,000 letters; the match is beyond them."""
    for n in range(2_100):
        desk.bury(f"hay-{n}", ago=60 + n / 10, message={"args": ["hay"], "kwargs": {}})
    desk.bury("needle", ago=900, message={"args": ["a needle"], "kwargs": {}})
    page = desk.open("#letters?text=A+NEEDLE")
    expect(desk.rows()).to_have_count(1)
    expect(page.locator(".end")).to_have_text("1 in all")


def test_thousands_are_scrolled_through(desk: Desk) -> None:
    """Each page comes as it is needed, and the keyboard still answers."""
    for n in range(1_000):
        desk.bury(f"j-{n:03}", ago=60 + n)
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(100)
    page.evaluate(SCROLL)
    expect(page.locator(".end")).to_have_text("1,000 in all")
    desk.row("j-998").locator("a").focus()
    page.keyboard.press("j")
    expect(desk.row("j-999").locator(":focus")).to_have_count(1)


SCROLL = """async () => {
    while (document.querySelectorAll("#letters [data-row]").length < 1_000) {
        scrollTo(0, document.body.scrollHeight);
        await new Promise(requestAnimationFrame);
    }
}"""


def test_chosen_ones_are_deleted_in_one_request(desk: Desk) -> None:
    """The toolbar is there once a row is chosen; no other letter is deleted, and the row can be left."""
    for n in range(120):
        desk.bury(f"pick-{n:03}", ago=60 + n)
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(100)
    expect(page.get_by_role("toolbar")).to_have_count(0)
    desk.row("pick-000").locator(".pick").check()
    expect(page.locator("#selected")).to_have_text("1 selected")
    page.get_by_role("button", name="Choose none").click()
    page.get_by_label("Choose all").check()
    desk.row("pick-001").locator(".pick").uncheck()
    writes: list[str] = []
    page.on("request", lambda request: writes.extend([request.url] if request.method != "GET" else []))
    page.get_by_role("toolbar").get_by_role("button", name="Delete").click()
    desk.asked("Delete 99 dead letters", "Keep them")
    desk.yes()
    desk.told("Deleted 99 dead letters at")
    expect(desk.rows()).to_have_count(21)
    assert "pick-001" in desk.ids()
    assert writes == [f"{desk.address}ojs/v1/operations"]


def test_a_deletion_is_taken_back(desk: Desk) -> None:
    """For an hour: the page says so before, and has the button after it."""
    for n in range(3):
        desk.bury(f"j-{n}")
    page = desk.open("#letters")
    desk.act(page.locator(".top"), "Delete all that match")
    expect(desk.asked("Delete 3 dead letters", "Keep them")).to_contain_text("For an hour it can be undone.")
    desk.yes()
    expect(desk.rows()).to_have_count(0)
    page.locator("#operations").get_by_role("button", name="Undo").click()
    desk.told("Brought 3 dead letters back at")
    expect(desk.rows()).to_have_count(3)
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)


def test_all_that_match_are_told_before(desk: Desk) -> None:
    """The question has their number, their types, the filters, and how to keep them; a no ends it."""
    for n in range(5):
        ago = 300 if n < 2 else 12_000
        desk.bury(f"window-{n}", ago=ago + n, queue="window", message={"args": [f"seat {n}"], "kwargs": {}})
    page = desk.open("#letters?queue=window")
    expect(desk.rows()).to_have_count(2)
    desk.act(page.locator(".top"), "Replay all that match")
    question = desk.asked("Replay 2 dead letters", "Do not replay")
    for told in (COUNTED, "queue: window", "since: 20"):
        expect(question).to_contain_text(told)
    desk.no()
    assert desk.outbox.published == []
    desk.filter("Text", "SEAT 1")
    expect(desk.rows()).to_have_count(1)
    desk.act(page.locator(".top"), "Delete all that match")
    question = desk.asked("Delete 1 dead letter", "Keep it")
    for told in ("ojs-bridge dead-letters export --queue 'window' ", "--text 'SEAT 1' "):
        expect(question).to_contain_text(told)
    desk.yes()
    desk.told("Deleted 1 dead letter at")
    assert desk.ids() == ["window-0", "window-2", "window-3", "window-4"]
    desk.bridge.dead_letters.purge(confirm=True)
    desk.act(page.locator(".top"), "Replay all that match")
    desk.told("Nothing matches any more")


def test_a_window_between_two_times(desk: Desk) -> None:
    """An address brings it, and a deletion keeps to it."""
    for n in range(5):
        desk.bury(f"j-{n}", ago=300 if n < 2 else 12_000)
    since, until = (f"{desk.now - timedelta(minutes=m):%Y-%m-%dT%H:%M:%SZ}" for m in (300, 60))
    page = desk.open(f"#letters?since={since}&until={until}")
    expect(desk.rows()).to_have_count(3)
    desk.act(page.locator(".top"), "Delete all that match")
    expect(desk.asked("Delete 3 dead letters", "Keep them")).to_contain_text("until: ")
    desk.yes()
    expect(desk.rows()).to_have_count(0)
    assert desk.ids() == ["j-0", "j-1"]


def test_what_could_not_be_done_stays_on_the_page(desk: Desk) -> None:
    """Until the next deed; letters that cannot be replayed here are told of at once."""
    desk.bury("nobodys", framework="nobody")
    page = desk.open("#letters")
    expect(page.get_by_text("This page cannot replay the letters of nobody")).to_be_visible()
    desk.row("nobodys").locator("a").focus()
    page.keyboard.press("r")
    desk.asked("Replay 1 dead letter", "Do not replay")
    desk.yes()
    expect(page.locator("#trouble")).to_contain_text("1 of 1 failed")
    expect(desk.rows()).to_have_count(1)
    desk.row("nobodys").locator("a").focus()
    page.keyboard.press("d")
    desk.asked("Delete 1 dead letter", "Keep it")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_have_count(0)
    desk.row("nobodys").locator("a").focus()
    page.keyboard.press("d")
    desk.yes()
    desk.told("Deleted 1 dead letter at")
    expect(page.locator("#trouble")).to_have_count(0)
    assert desk.ids() == []


def test_what_comes_and_goes_is_seen(desk: Desk) -> None:
    """New letters come and gone ones go, counts change, and the row that has the focus keeps it."""
    desk.bury("stays", ago=30)
    desk.bury("goes", ago=20)
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(2)
    desk.row("stays").locator("a").focus()
    desk.row("stays").evaluate("row => { row.mark = 'the same'; }")
    desk.bury("comes", ago=0)
    desk.bury("too", ago=0)
    desk.bridge.dead_letters.delete("goes")
    expect(desk.row("goes")).to_have_count(0)
    expect(desk.rows()).to_have_count(3)
    expect(desk.rows().last).to_have_attribute("data-id", "stays")
    assert page.evaluate("document.activeElement.closest('[data-row]').mark") == "the same"
    expect(page.locator("#letters-here")).to_have_text("3 in all")


def test_the_readers_place_stays(desk: Desk) -> None:
    """A few new letters do not move the row that is read; for many the page offers to load again."""
    for n in range(40):
        desk.bury(f"many-{n}", ago=600 - n)
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(40)
    desk.rows().nth(35).locator("a").focus()
    top = "document.activeElement.getBoundingClientRect().top"
    before = page.evaluate(top)
    for n in range(40, 45):
        desk.bury(f"many-{n}", ago=600 - n)
    expect(desk.rows()).to_have_count(45)
    assert abs(page.evaluate(top) - before) < 1
    page.get_by_role("button", name="Freeze").click()
    for n in range(45, 75):
        desk.bury(f"many-{n}", ago=600 - n)
    page.get_by_role("button", name="Go on").click()
    again = page.get_by_role("button", name="Many new ones")
    expect(again).to_be_visible()
    expect(desk.rows()).to_have_count(45)
    again.click()
    expect(desk.rows()).to_have_count(75)
    expect(again).to_have_count(0)


def test_a_bulk_replay_is_stopped_and_resumed(desk: Desk) -> None:
    """The replay goes on when the tab is loaded again; Stop ends it, and Resume takes it up."""
    for n in range(300):
        desk.bury(f"slow-{n}", queue="slowly")
    page = desk.open("#letters")
    begun = page.request.post(
        f"{desk.address}ojs/v1/operations",
        headers={"X-OJS-Bridge": "1"},
        data={"action": "retry", "filter": {"queue": "slowly"}, "rate": 5, "confirm": True},
    )
    assert begun.ok
    page.reload()
    shown = page.locator("#operations li")
    expect(shown).to_contain_text("Replay queue slowly: running")
    shown.get_by_role("button", name="Stop").click()
    expect(shown).to_contain_text("an operator stopped it")
    [operation] = desk.bridge.operations.list()
    assert (operation.state, operation.matched < 300) == ("stopped", True)
    shown.get_by_role("button", name="Resume").click()
    expect(shown).to_contain_text("running")
    shown.get_by_role("button", name="Stop").click()
    expect(shown).to_contain_text("stopped")


def test_what_became_of_a_replay(desk: Desk) -> None:
    """Its jobs are sent, succeed or die again, and the letters of these are a click away."""
    ids = bury_many(desk.bridge, 5)
    outbox = Running(desk.bridge, takes=9)
    desk.bridge.engine.context.publishers[FRAMEWORK] = outbox
    desk.bridge.operations.run(desk.bridge.operations.begin("replay", ids=ids))
    for header in outbox.waits[:3]:
        outbox.work(header)
    page = desk.open("#letters")
    shown = page.locator("#operations li")
    expect(shown).to_contain_text("Replay 5 selected: done 5 of 5 sent")
    expect(shown).to_contain_text("1 succeeded, 2 not begun")
    shown.get_by_role("button", name="2 died again").click()
    expect(shown.get_by_role("link")).to_have_count(2)
    shown.get_by_role("link").last.click()
    expect(page.locator("#job-id")).to_have_text("j-001")


def test_a_single_letter_is_replayed_from_its_row(desk: Desk) -> None:
    """The menu has what can be done with it; what destroys is the last."""
    desk.bury("one", error={"message": "no seat"})
    page = desk.open("#letters")
    row = desk.row("one")
    row.locator("summary").click()
    assert row.locator(".menu > div > :not(hr)").all_inner_texts()[-1] == "Delete…"
    row.get_by_role("button", name="Replay").click()
    expect(desk.asked("Replay 1 dead letter", "Do not replay")).to_contain_text("no seat")
    desk.yes()
    expect(desk.rows()).to_have_count(0)
    eventually(lambda: [found.id for found, _ in desk.outbox.published] == ["one"])
    expect(page.locator("#told")).to_have_text(re.compile("^Replayed 1 dead letter at [0-9:]+.$"))


def test_a_letter_that_has_gone_meanwhile(desk: Desk) -> None:
    """A page that was left open says so, and shows the letters of now."""
    desk.bury("short-lived")
    page = desk.open("#letters")
    expect(desk.rows()).to_have_count(1)
    page.get_by_role("button", name="Freeze").click()
    desk.bridge.dead_letters.delete("short-lived")
    desk.row("short-lived").locator("a").focus()
    page.keyboard.press("r")
    desk.yes()
    expect(desk.rows()).to_have_count(0)
    expect(page.get_by_text("No job has died in this time.")).to_be_visible()


@pytest.mark.parametrize("count", [2, 30])
def test_what_a_limit_has_deleted(browser: Browser, tmp_path: Path, count: int) -> None:
    """Before it deletes anything, the page says how full it is."""
    told = {
        2: "Dead letters are nearly as many as max_count (100 %): beyond it the largest groups",
        30: "max_count has deleted 28 dead letters in the last day: 28 of bad.deploy: external.timeout.",
    }
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", retention=Retention(max_count=10))
    deploy(bridge, count)
    bridge.dead_letters.prune()
    page = browser.new_page()
    with listening(app_for(Bridge(bridge.store), open_to_all=True)) as address:
        page.goto(f"{address}#letters?within=all")
        expect(page.get_by_text(told[count])).to_contain_text("so does Retention(archive=…)")
        page.close()
