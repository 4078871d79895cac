"""The frame of the page in a real browser: addresses, keys, tokens, updates, and a store that is away."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from ojs_bridge.http import app_for
from tests.http.desks import Desk, browser, desk
from tests.http.doors import OPERATOR, READER, REPLAYER, listening
from tests.lives import FRAMEWORK, bridge_with_outbox
from tests.servers import Valkey, eventually
from tests.store.test_store import letter

__all__ = ["browser", "desk"]

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
#: Counts what the page asks, and what was answered.
COUNT = """() => {
    const send = fetch;
    window.asked = window.answered = 0;
    window.fetch = (...words) => {
        asked += 1;
        return send(...words).finally(() => { answered += 1; });
    };
}"""
VIEWS = ("now", "groups", "letters", "waiting", "rates", "audit")


@pytest.mark.parametrize(
    "address",
    [
        "#letters?que=celery", "#letters?within=7", "#letters?within=3600&since=2026-11-21T10:00:00Z",
        "#letters?queue=a&queue=celery", "#letters?order=count", "#lettres?queue=celery",
        "?queue=celery#letters", "#letters?since=yesterday", "#groups?text=a", "#groups?muted=1",
        "#waiting?group=0123456789abcdef", "#waiting?within=3600", "#audit?queue=celery",
        "#rates?until=2026-11-21T10:00:00Z", "#rates?within=7", "#rates?open=a", "#now?queue=a", "#now/a",
    ],
)  # fmt: skip
def test_an_address_that_is_not_understood_shows_nothing(desk: Desk, address: str) -> None:
    """What a link carries is never left out: it would show, replay and delete more than was meant."""
    desk.bury("one", queue="celery")
    page = desk.open(address)
    expect(page.locator("#trouble")).to_contain_text("This address is not understood, and nothing is shown")
    expect(page.locator("main [data-row], main figure, main button")).to_have_count(0)
    assert page.url.endswith(address)
    page.get_by_role("link", name="Clear").click()
    if "?queue" not in address.partition("#")[0]:
        expect(page.locator("#trouble")).to_have_count(0)


def test_the_address_says_where_one_is(desk: Desk, browser: Browser) -> None:
    """It has the view, the filters and the time, to be shared and gone back from; a title says the view."""
    desk.bury("one", queue="seats")
    page = desk.open("")
    expect(page).to_have_title(re.compile("Now .+ ojs-bridge$"))
    page.get_by_role("link", name="Letters").click()
    expect(page).to_have_title(re.compile("^Letters .+ ojs-bridge$"))
    page.get_by_label("Time").select_option("86400")
    desk.filter("Queue", "seats")
    expect(page).to_have_url(re.compile("#letters.*(within=86400.*queue=seats|queue=seats.*within=86400)"))
    expect(desk.rows()).to_have_count(1)
    shared = browser.new_page()
    shared.goto(page.url)
    expect(shared.locator("#letters [data-row]")).to_have_count(1)
    expect(shared.get_by_label("Time")).to_have_value("86400")
    shared.close()
    for view in ("groups", "audit"):
        page.get_by_role("link", name=view.title()).first.click()
        expect(page).to_have_url(re.compile(f"#{view}.within=86400$"))
    page.go_back()
    expect(page).to_have_url(re.compile("#groups"))


def test_the_whole_page_is_reached_by_the_keyboard(desk: Desk) -> None:
    """The views, the rows, a box, a menu, the search and its end; and the keys can be switched off."""
    for n in range(3):
        desk.bury(f"j-{n}", ago=60 + n)
    page = desk.open("")
    for key, view in (("g", "groups"), ("w", "waiting"), ("n", "now"), ("l", "letters")):
        page.keyboard.press(key)
        expect(page.locator("nav a[aria-current]")).to_have_attribute("href", re.compile(f"^#{view}"))
    expect(desk.rows()).to_have_count(3)
    for _ in range(2):
        page.keyboard.press("j")
    expect(page.locator('[data-row]:has(:focus)[data-id="j-1"]')).to_have_count(1)
    page.keyboard.press("x")
    expect(page.locator("#selected")).to_have_text("1 selected")
    page.keyboard.press(".")
    expect(page.locator("details.menu[open] :focus")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("details.menu[open]")).to_have_count(0)
    page.keyboard.press("k")
    page.keyboard.press("x")
    page.keyboard.press("/")
    expect(page.locator("input[type=search]")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.get_by_label("Keys of one letter are on").uncheck()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_have_count(0)
    page.keyboard.press("g")
    expect(desk.rows()).to_have_count(3)
    page.keyboard.press("?")
    page.get_by_label("Keys of one letter are on").check()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    expect(page).to_have_url(re.compile("#groups"))


def test_a_refused_token_and_a_reader(browser: Browser, desk: Desk) -> None:
    """A refused token is told as one; a reader's page has no button that writes, and says why."""
    desk.bury("read")
    desk.park("later")
    desk.bridge.pause("mail.*")
    with listening(app_for(desk.bridge, operator_token=OPERATOR, reader_token=READER)) as address:
        page = browser.new_page()
        page.goto(f"{address}#letters")
        expect(page.locator("#token")).to_be_focused()
        expect(page.locator("#token-refused")).to_be_hidden()
        page.keyboard.type("not a token of this server")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server refused this token.")).to_be_visible()
        page.keyboard.type(READER)
        page.keyboard.press("Enter")
        expect(page.locator("#reader")).to_have_text("This token can only read.")
        writes = re.compile("Replay|Probe|Delete|Mute…|Resolve|Run now|Move|Cancel|Pause|Resume|Undo")
        for view, row in (
            ("letters", "read"),
            ("groups", ""),
            ("waiting", "later"),
            ("now", ""),
            ("audit", ""),
        ):
            page.goto(f"{address}#{view}")
            expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
            if row:
                page.locator(f'[data-row][data-id="{row}"] a').first.focus()
                for key in ("r", "d", "p", "m"):
                    page.keyboard.press(key)
            expect(page.locator("#question")).to_have_count(0)
            expect(page.locator("main").get_by_role("button", name=writes)).to_have_count(0)
        page.goto(f"{address}#letters")
        expect(page.locator("[data-row]")).to_have_count(1)
        page.evaluate(f"sessionStorage.setItem('ojs-bridge-token', '{OPERATOR}')")
        expect(page.locator("#reader")).to_have_count(0)
        page.locator('[data-row][data-id="read"] a').first.focus()
        page.keyboard.press("d")
        expect(page.locator("#question-title")).to_have_text("Delete 1 dead letter?")
        page.close()


def test_a_replayer(browser: Browser, desk: Desk) -> None:
    """Its page has the buttons of replays as they are, and no other that writes; it says why."""
    desk.bury("read")
    desk.park("later")
    desk.bridge.pause("mail.*")
    desk.bridge.operations.begin("purge", queue=letter("read").queue)
    desk.bridge.operations.begin("replay", override={"args": [2]})
    tokens = {"operator_token": OPERATOR, "replayer_token": REPLAYER}
    with listening(app_for(desk.bridge, **tokens)) as address:
        page = browser.new_page()
        page.goto(f"{address}#letters")
        page.locator("#token").fill(REPLAYER)
        page.keyboard.press("Enter")
        expect(page.locator("#replayer")).to_contain_text("read, and replay dead letters as they are")
        writes = re.compile("Delete|Mute…|Resolve|Run now|Move|Cancel|Pause|Resume|Stop|Undo|Replay with")
        for view, row in (("groups", ""), ("waiting", "later"), ("now", ""), ("letters", "read")):
            page.goto(f"{address}#{view}")
            expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
            expect(page.locator("#operations li")).to_have_count(2)
            if row:
                page.locator(f'[data-row][data-id="{row}"] a').first.focus()
                page.keyboard.press("d")
            expect(page.locator("#question")).to_have_count(0)
            expect(page.locator("main").get_by_role("button", name=writes)).to_have_count(0)
        page.locator('[data-row][data-id="read"] a').first.click()
        expect(page.get_by_role("button", name="Replay as it is")).to_have_count(1)
        expect(page.locator("#edit input:not([readonly]), #edit textarea:not([readonly])")).to_have_count(0)
        page.get_by_role("button", name="Replay as it is").click()
        page.locator("#question").get_by_role("button", name="Replay 1 dead letter").click()
        eventually(lambda: not desk.bridge.dead_letters.list().letters)
        page.close()


def asks(page: Page, seconds: int) -> bool:
    """Return whether the page asks anything in a time."""
    before = page.evaluate("asked")
    page.clock.fast_forward(1000 * seconds)
    eventually(lambda: page.evaluate("asked === answered"))
    return bool(page.evaluate("asked") > before)


def test_the_page_waits(desk: Desk) -> None:
    """It asks nothing while rows are chosen, a dialog is open or it is frozen; less after errors."""
    desk.bury("one")
    page = desk.page
    page.clock.install()
    desk.open("#letters")
    expect(desk.rows()).to_have_count(1)
    page.evaluate(COUNT)
    live, state = page.locator("#live"), page.locator(".foot .live-state")
    eventually(lambda: asks(page, 6))
    for key in ("x", "?"):
        page.keyboard.press("j")
        page.keyboard.press(key)
        expect(page.locator("#selected" if key == "x" else "#keys")).to_be_visible()
        assert not asks(page, 60)
        expect(state).to_contain_text("waits, as of")
        page.keyboard.press("x" if key == "x" else "Escape")
        expect(page.locator("#selected, #keys")).to_have_count(0)
    live.click()
    expect(state).to_contain_text("frozen")
    assert not asks(page, 60)
    live.click()
    expect(live).to_have_text("Freeze")
    eventually(lambda: page.evaluate("asked === answered"))
    page.route("**/ojs/**", lambda route: route.abort())
    # What was asked before may be answered still.
    eventually(lambda: asks(page, 6) and page.locator("#trouble").is_visible())
    expect(page.locator("#trouble")).to_contain_text("cannot be reached")
    expect(state).to_contain_text(re.compile(r"away since \d\d:\d\d:\d\d"))
    assert not asks(page, 6)
    eventually(lambda: asks(page, 6))
    page.unroute("**/ojs/**")
    eventually(lambda: asks(page, 60))
    expect(page.locator("#trouble")).to_have_count(0)
    expect(state).to_contain_text(re.compile(r"^\d\d:\d\d:\d\d$"))


def test_a_store_that_is_away_is_told_once_and_takes_no_orders(browser: Browser) -> None:
    """One box, one time, on each view; no button writes, what was seen stays grey; all is well afterwards."""
    page = browser.new_page()
    page.clock.install()
    with Valkey() as valkey:
        bridge, _ = bridge_with_outbox(valkey.url)
        assert bridge.store is not None
        bridge.store.letters.bury(letter("j-1", framework=FRAMEWORK, discarded_at=bridge.engine.now()))
        with listening(app_for(bridge, open_to_all=True)) as address:
            page.goto(f"{address}#letters")
            row = page.locator("#letters [data-row]")
            expect(row).to_have_count(1)
            valkey.kill()
            page.clock.fast_forward(20_000)
            told = page.get_by_role("alert")
            expect(told).to_have_text(re.compile(r"^The store is away since \d\d:\d\d:\d\d\."))
            expect(told).to_have_count(1)
            row.locator("a").first.focus()
            for key in ("r", "d", "p"):
                page.keyboard.press(key)
            expect(page.locator("#question")).to_have_count(0)
            page.keyboard.press("n")
            expect(page.locator(".verdict h1")).to_contain_text("The store is away")
            expect(page.locator(".pulse li.bad", has_text="Store")).to_contain_text("away")
            expect(told).to_have_count(0)
            page.keyboard.press("l")
            valkey.start()
            eventually(lambda: (page.clock.fast_forward(60_000), told.count() == 0)[1], seconds=90)
            expect(row).to_have_count(1)
    page.close()


def test_html_in_job_data_stays_text(desk: Desk) -> None:
    """HTML stays text in any place of any view, and what turns the text around it is spelt out."""
    error = {"type": EVIL, "message": f"\u202e{EVIL}", "backtrace": [EVIL], "details": {EVIL: EVIL}}
    known: dict[str, Any] = {"type": EVIL, "queue": EVIL, "reason": EVIL, "message": {"args": [EVIL]}}
    for n in range(30):
        desk.bury(f"evil {n} {EVIL}", error=error, **known)
    desk.bridge.marks.add(EVIL)
    desk.bridge.pause(EVIL[:100].replace('"', ""), reason=EVIL)
    for view in VIEWS:
        page = desk.open(f"#{view}")
        expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
        expect(page.locator(".pulse")).to_be_visible()
        expect(
            page.locator("main").get_by_text("<img src=x").first if view != "rates" else page.locator("main")
        ).to_be_visible()
        assert page.locator("#app img, #app script").count() == 0
        assert page.title() != "owned"
        assert "\u202e" not in page.locator("body").inner_text()


def test_the_page_of_an_empty_store_says_so(desk: Desk) -> None:
    """Each view has one sentence, and no empty box."""
    told = {
        "now": "Nothing is new, nothing came back, nothing grows.",
        "groups": "No job has died in this time.",
        "rates": "No run was counted in this time.",
        "audit": "Nothing was done in this time.",
    }
    for view, words in told.items():
        expect(desk.open(f"#{view}").locator("main")).to_contain_text(words)
    desk.page.get_by_role("button", name="Show all of time").click()
    expect(desk.page.locator("main")).to_contain_text("Nothing is on record.")
    expect(desk.page).to_have_url(re.compile("#audit.within=all"))
