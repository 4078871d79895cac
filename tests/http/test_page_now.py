"""Now, in a real browser: the verdict, the hill, groups, queues, holds, workers and the pulse."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from ojs_bridge.engine import holds
from ojs_bridge.errors import StoreError
from ojs_bridge.rules.holds import Hold
from ojs_bridge.store import BOUNDS, Rate
from tests.http.desks import Desk, browser, desk
from tests.lives import FRAMEWORK
from tests.operations.test_health import worker
from tests.store.test_rates import record

__all__ = ["browser", "desk"]

EMPTY = [0] * len(BOUNDS)


def have_an_incident(desk: Desk) -> None:
    """Let jobs die for some minutes, after a quiet hour, behind a mark; jobs wait, and others are held."""
    store, minute = desk.bridge.store, desk.now.replace(second=0, microsecond=0)
    assert store is not None
    dying = [
        Rate(minute - timedelta(minutes=n), "crm.sync", "crm", "dead_lettered", (30, *EMPTY))
        for n in range(6)
    ]
    calm = [
        Rate(minute - timedelta(minutes=n), "mail.send", "mail", "completed", (9, *EMPTY)) for n in range(59)
    ]
    retried = [
        Rate(minute - timedelta(minutes=n), "crm.sync", "crm", "retried", (40, *EMPTY)) for n in range(6)
    ]
    record(store, [*dying, *calm, *retried])
    error = {"type": "KeyError", "message": "no field vat_id of 17", "backtrace": ["/srv/crm.py:7 in sync"]}
    for n in range(12):
        desk.bury(f"crm-{n}", ago=20 + 20 * n, error=error, type="crm.sync", queue="crm")
    desk.bridge.marks.add("v42", at=minute - timedelta(minutes=7))
    desk.bridge.pause("mail.*", reason="the relay is down")
    held = {"kind": "held", "attempt": 1, "fence": 0, "state": {"v": 1, "attempt": 1}, "type": "mail.send"}
    desk.park("held", reason="held", **held)
    desk.outbox.waiting, desk.outbox.oldest_at = {"slow": 1200}, minute - timedelta(minutes=5)
    worker(desk.bridge, "a:1", FRAMEWORK, "fast")
    worker(desk.bridge, "a:2", "celery", "fast")


def local(page: Page, text: str) -> str:
    """Return a sentence of the server as the page says it."""
    clock = "(time) => new Date(time).toLocaleTimeString('sv').slice(0, 5)"
    return str(page.evaluate(f"(text) => text.replace(/\\d{{4}}-\\d\\d-\\d\\dT[0-9:.]+Z/g, {clock})", text))


def test_an_incident(desk: Desk) -> None:
    """The sentence is the server's; beneath it stand what dies, what waits, what is held, and by whom."""
    have_an_incident(desk)
    page = desk.open("")
    now = page.request.get(f"{desk.address}ojs/v1/admin/now").json()
    assert now["verdict"]["level"] == "bad"
    verdict = page.locator(".verdict.bad")
    expect(verdict.locator("h1")).to_have_text(local(page, now["verdict"]["sentence"]))
    expect(
        page.get_by_role("img", name=re.compile("^Deaths a minute: 180 in all, at most 30 a bar; v42 at"))
    ).to_be_visible()
    group = page.locator(".groups [data-row]")
    expect(group).to_have_count(1)
    for told in ("no field vat_id of #", "New", "crm.sync", "no field vat_id of 17", "12"):
        expect(group).to_contain_text(told)
    queue = page.locator("#queues tr", has_text="slow")
    for told in ("1,200", "[5-9] min"):
        expect(queue).to_contain_text(re.compile(told))
    expect(page.get_by_role("img", name="Retries a minute: 240 in all, at most 40 a bar")).to_be_visible()
    expect(page.locator(".also span b", has_text="slow")).to_be_visible()
    hold = page.locator('.cards [data-id^="pause:"]')
    for told in ("mail.*", "paused", "1 held", "the relay is down"):
        expect(hold).to_contain_text(told)
    expect(page.locator(".ws li")).to_have_text(re.compile(r"^a\s*idle$"))
    expect(page.locator(".ws header")).to_contain_text("2 on 1 host")
    pulse = page.locator(".pulse")
    for told in ("/min", "In queues 1,200", "Held 1", "Store ok", "Broker ok", "Workers 2"):
        expect(pulse).to_contain_text(re.compile(told.replace(" ", r"\s*")))
    expect(page.locator("nav a", has_text="Groups")).to_contain_text("1 bad")
    expect(page.locator("nav a", has_text="Letters")).to_contain_text("12")
    group.locator("a").first.click()
    expect(page).to_have_url(re.compile("#groups/[0-9a-f]{16}$"))
    page.keyboard.press("n")
    hold.get_by_role("button", name="Resume…").click()
    expect(page.locator("#question-title")).to_have_text("Resume the jobs?")
    desk.yes()
    expect(hold).to_have_count(0)
    expect(page.locator("section[aria-label=Holds]")).to_contain_text("Nothing is held.")


def test_a_quiet_hour_says_why_it_is_well(desk: Desk) -> None:
    page = desk.open("")
    expect(page.locator(".verdict h1")).to_be_visible()
    expect(page.locator(".verdict")).not_to_have_class(re.compile("bad"))
    expect(page.locator("main")).to_contain_text("Nothing is new, nothing came back, nothing grows.")
    expect(page.locator("section[aria-label=Operations]")).to_contain_text("None runs.")
    desk.bury("one")
    expect(page.locator("nav a", has_text="Letters")).to_contain_text("1")


def test_the_worst_is_first_and_what_is_steady_is_last(desk: Desk) -> None:
    """Groups stand by their deaths; one that dies as ever is seen, quietly. A host is one row."""
    for name, number, first in (("few", 2, 60), ("many", 5, 60), ("old", 9, 3 * 86_400)):
        error = {"type": f"x.{name}", "message": f"no {name} left", "backtrace": [f"/srv/{name}.py:7 in f"]}
        for n in range(number):
            desk.bury(f"{name}-{n}", ago=first if not n else 30 + n, error=error, type=name)
    for n in range(3):
        worker(desk.bridge, f"b:{n}", FRAMEWORK, "mail")
    page = desk.open("")
    groups = page.locator(".groups [data-row]")
    expect(groups.locator(".msg")).to_have_text(["no many left", "no few left", "no old left"])
    expect(groups.locator(".badge")).to_have_text(["New", "New", "Steady"])
    expect(groups.first).to_contain_text(re.compile(r"since \d\d:\d\d"))
    expect(groups.last.locator(".died")).to_have_count(0)
    expect(page.locator("nav a", has_text="Groups")).to_contain_text("2 bad")
    expect(page.locator(".ws li")).to_have_text(re.compile(r"^b\s*idle$"))
    expect(page.locator(".ws header")).to_contain_text("3 on 1 host")


def test_a_breaker_says_its_next_probe_once(desk: Desk) -> None:
    """It counts down, on Now and in what waits; times of the server are the reader's own."""
    now, store = desk.now, desk.bridge.store
    assert store is not None
    reason = (
        f"the breaker of bank since {now:%H:%M:%S} UTC, 48 of 50 calls failed; next probe at {now:%H:%M:%S}"
    )
    probe = now + timedelta(hours=2, minutes=30)
    holds.write(
        store.documents, Hold("breaker:bank", reason, now, dependency="bank", probe_at=probe, probes=1)
    )
    for place in ("", "#waiting"):
        page = desk.open(place)
        hold = page.locator('[data-id="breaker:bank"]')
        words = re.compile(
            r"^\s*bank\s*breaker open\s*0 held\s*Since [\d:]{8}, 48 of 50 calls failed"
            r"; the next probe in 2 h\."
        )
        expect(hold).to_have_text(words)
        assert (hold.text_content() or "").count("probe") == 1


def test_a_store_that_is_away_from_the_begin_on(desk: Desk) -> None:
    """Only the queues are told; what nobody knows is not said to be none."""
    store = desk.bridge.store
    assert store is not None
    desk.outbox.waiting = {"mail": 7}

    def away(*_: object, **__: object) -> None:
        raise StoreError("no route to 10.0.0.9")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("list", "rates", "get"):
            patch.setattr(type(store.documents), name, away)
        page = desk.open("")
        verdict = page.locator(".verdict.bad")
        expect(verdict).to_contain_text("Nothing else is known yet.")
        expect(verdict.locator("code")).to_be_hidden()
        verdict.locator("summary").click()
        expect(verdict.locator("code")).to_have_text(re.compile("no route to 10.0.0.9"))
        expect(page.locator("#queues tbody tr")).to_have_text(re.compile("^mail\\s*7\\s*\N{EN DASH}$"))
        for told in ("Nothing is held", "None runs", "Deaths", "No worker"):
            expect(page.locator("#app")).not_to_contain_text(told)
    expect(page.locator("main")).to_contain_text("Nothing is held.")
    expect(page.locator(".pulse")).to_contain_text("Deaths")


def at(chart: Locator, share: float) -> tuple[float, float]:
    """Return a point on the bars of a chart, at a share of its width."""
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


def test_a_bar_leads_to_its_letters_and_a_drag_to_its_rates(desk: Desk) -> None:
    """The time of the bar, or of the drag, stands in the address."""
    have_an_incident(desk)
    page = desk.open("")
    chart = page.get_by_role("img", name=re.compile("^Deaths"))
    expect(chart.locator("canvas")).to_be_visible()
    page.mouse.click(*at(chart, 0.99))
    expect(page).to_have_url(re.compile(r"#letters\?since=[^&]*&until="))
    expect(page.locator("[data-range]")).to_be_visible()
    page.go_back()
    page.mouse.move(*at(chart, 0.5))
    page.mouse.down()
    page.mouse.move(*at(chart, 0.9), steps=5)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"#rates\?since=[^&]*&until="))
    page.get_by_role("button", name="Last hour").click()
    expect(page).to_have_url(re.compile("#rates$"))


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "light"), (1920, "dark")]
)
def test_nothing_is_wider_than_the_screen(desk: Desk, width: int, scheme: str) -> None:
    """Neither in a quiet hour nor in an incident with long words; a phone says the pulse in one line."""
    page = desk.page
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    for is_bad in (False, True):
        if is_bad:
            have_an_incident(desk)
            long = "w" * 250
            desk.bury(long[:180], type=long, queue=long, error={"type": long, "message": long})
            desk.bridge.pause(long, reason=long)
        desk.open("")
        expect(page.locator(".verdict h1")).to_be_visible()
        expect(page.locator(".groups [data-row]")).to_have_count(2 if is_bad else 0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.locator(".line" if width < 900 else ".pulse")).to_be_visible()
    expect(page.locator(".pulse" if width < 900 else ".line")).to_be_hidden()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) < 200) is (scheme == "dark")
