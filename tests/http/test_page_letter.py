"""One dead letter in a real browser: what is told of it, and what is changed before it is replayed."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.http.desks import Desk
from tests.servers import eventually
from tests.store.test_store import entry

POLICY = {"max_attempts": 3, "initial_interval": "PT10S", "on_exhaustion": "dead_letter"}


def message(*args: object, **kwargs: object) -> dict[str, object]:
    """Return a message with arguments."""
    return {"args": [*args], "kwargs": kwargs}


def opened(desk: Desk, letter_id: str) -> None:
    """Open a letter."""
    desk.open(f"#letters/{letter_id}")
    expect(desk.page.locator("#job-id")).to_have_attribute("title", letter_id)


def test_all_of_it_is_told(desk: Desk) -> None:
    """Its error's words lead; frames of libraries stand behind a line; attempts and policy are there."""
    frames = ["/usr/lib/python3/dist-packages/kombu/x.py:1 in call", "/srv/shop/seats.py:7 in seat"]
    errors = tuple(
        {**entry(n), "type": "ValueError", "message": f"no seat {n}", "backtrace": frames} for n in (1, 2, 3)
    )
    desk.bury("first", ago=30)
    desk.bury("j-1", errors=errors, attempt=3, max_attempts=3, message=message("acct", n=1), policy=POLICY)
    page = desk.open("#letters")
    desk.row("j-1").locator("a").focus()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("no seat 3")
    expect(page).to_have_url(re.compile("#letters/j-1$"))
    error = page.get_by_role("region", name="Error")
    expect(error).to_contain_text("/srv/shop/seats.py:7 in seat")
    expect(error.get_by_text("kombu")).to_be_hidden()
    error.get_by_text("1 frame of libraries").click()
    expect(error.get_by_text("kombu")).to_be_visible()
    life = page.get_by_role("region", name="Its life")
    expect(life.locator("li b")).to_contain_text(["Attempt 1 failed", "Attempt 2 failed", "Attempt 3 failed"])
    expect(life.locator("details")).to_contain_text(["no seat 1", "no seat 2"])
    expect(page.get_by_role("region", name="Policy")).to_contain_text("2 retries: after 10 s, 20 s")
    expect(page.get_by_text("2 of 2")).to_be_visible()
    page.keyboard.press("k")
    expect(page).to_have_url(re.compile("#letters/first$"))
    page.go_back()
    expect(desk.rows()).to_have_count(2)


def test_one_that_is_not_there(desk: Desk) -> None:
    """The page says so; one that goes meanwhile stays to be read, without what can be done with it."""
    page = desk.open("#letters/gone")
    expect(page.get_by_role("alert")).to_contain_text("there is no dead letter job 'gone'")
    desk.bury("short")
    opened(desk, "short")
    replay = page.get_by_role("button", name="Replay as it is").first
    expect(replay).to_be_visible()
    desk.bridge.dead_letters.delete("short")
    expect(page.get_by_role("alert")).to_contain_text("there is no dead letter job 'short'")
    expect(replay).to_have_count(0)
    expect(page.locator("#job-id")).to_be_visible()


def test_simple_arguments_have_a_field_each(desk: Desk) -> None:
    """Only what differs is sent, as it was typed; what is wrong stands at its field, and nothing is sent."""
    desk.bury("j-1", queue="celery", message=message("acct_1", 2.5, country="CH"))
    opened(desk, "j-1")
    page, edit = desk.page, desk.page.locator("#edit")
    labels = ("args[0]", "args[1]", "country")
    account, amount, country = (edit.get_by_label(name, exact=True) for name in labels)
    expect(account).to_have_value("acct_1")
    expect(amount).to_have_value("2.5")
    amount.fill("2,5")
    edit.get_by_role("button", name="Replay with 1 change").click()
    expect(edit.get_by_role("alert")).to_contain_text("This is not JSON")
    expect(amount).to_be_focused()
    expect(page.locator("#question")).to_have_count(0)
    edit.get_by_role("button", name="put back").click()
    expect(edit.get_by_role("alert")).to_have_count(0)
    amount.fill("12345678901234567890.10")
    country.fill("DE")
    edit.get_by_role("button", name="Replay with 2 changes").click()
    expect(desk.asked("Replay with 2 changes", "Do not replay")).to_contain_text("country: DE")
    with page.expect_request("**/retry") as sent:
        desk.yes()
    assert '"args": ["acct_1", 12345678901234567890.10]' in (sent.value.post_data or "")
    assert (sent.value.post_data_json or {})["override"]["kwargs"] == {"country": "DE"}
    desk.told("Replayed 1 dead letter at")
    assert desk.ids() == []


def test_other_arguments_are_json(desk: Desk) -> None:
    """A list and an object as they are shown; the refusal of the server stands in the question."""
    desk.bury("j-1", queue="celery", message=message(["a", {"b": 1}]))
    opened(desk, "j-1")
    page, edit = desk.page, desk.page.locator("#edit")
    args, queue = edit.get_by_label("Arguments, a list in JSON"), edit.get_by_label("queue", exact=True)
    expect(args).to_have_value(json.dumps([["a", {"b": 1}]], indent=2))
    expect(edit.get_by_label("Named arguments")).to_have_value("{}")
    for wrong, why in (('["a"', "This is not JSON"), ('"a"', "This is no list")):
        args.fill(wrong)
        edit.get_by_role("button", name="Replay with 1 change").click()
        expect(edit.get_by_role("alert")).to_contain_text(why)
    args.fill('["b"]')
    queue.fill("q" * 1001)
    edit.get_by_role("button", name="Replay with 2 changes").click()
    page.locator("#question [type=submit]").click()
    expect(page.locator("#question").get_by_role("alert")).to_contain_text("at most 1000 characters")
    expect(page.locator("#question [type=submit]")).to_be_disabled()
    desk.no()
    queue.fill("celery")
    edit.get_by_role("button", name="Replay with 1 change").click()
    with page.expect_request("**/retry") as sent:
        desk.yes()
    assert sent.value.post_data_json == {"override": {"args": ["b"]}}


HIDDEN = {"args": ["[redacted]"], "kwargs": {"n": 2**60}, "redacted": True, "hidden": ["args"]}
PICKLED = {
    "headers": {},
    "content_type": "application/x-python-serialize",
    "body": "",
    "body_encoding": "utf-8",
}


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (HIDDEN, "are hidden|too long"), (PICKLED, "pickled"),
    ],
)  # fmt: skip
def test_what_is_hidden_is_never_sent_back(desk: Desk, kept: dict[str, object], why: str) -> None:
    """A field begins empty if its values are hidden, too long or unreadable; empty, it changes nothing."""
    desk.bury("j-1", message=kept)
    opened(desk, "j-1")
    edit = desk.page.locator("#edit")
    for label in ("Arguments, a list", "Named arguments"):
        expect(edit.get_by_label(label)).to_have_value("")
        expect(edit.get_by_label(label)).to_have_attribute("placeholder", re.compile(why))
    edit.get_by_role("button", name="Replay as it is").click()
    with desk.page.expect_request("**/retry") as sent:
        desk.yes()
    assert sent.value.post_data_json == {"override": {}}


def test_long_values_stay_in_their_boxes(desk: Desk) -> None:
    """A megabyte of arguments does not make the page long; it is shown whole on request, and replaced."""
    long = "x" * 1_000_000
    desk.bury("big", message=message([long]), error={"type": "big", "message": "m" * 100_000})
    opened(desk, "big")
    page, height = desk.page, "document.querySelector('main').scrollHeight"
    assert page.evaluate(height) < 2_500
    page.get_by_role("button", name="Show all 100,000 characters").click()
    expect(page.locator("pre.err")).to_have_text("m" * 100_000)
    assert page.evaluate(height) < 2_500
    page.get_by_label("Arguments, a list").fill(json.dumps([long, 2]))
    page.get_by_role("button", name="Replay with 1 change").click()
    assert page.evaluate("document.getElementById('question').scrollHeight") < 1_000
    desk.yes()
    eventually(lambda: len(desk.outbox.published) == 1)


EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def test_job_data_stays_text(desk: Desk) -> None:
    """HTML stays text in any place, and what turns the text around it is spelt out."""
    error = {"type": EVIL, "message": f"{EVIL} \u202egnp.exe", "backtrace": [EVIL], "details": {EVIL: EVIL}}
    desk.bury(f"evil {EVIL}", type=EVIL, queue=EVIL, reason=EVIL, error=error, message=message(EVIL))
    page = desk.open("#groups")
    expect(desk.rows("groups")).to_contain_text(["<img src=x"])
    page.goto(f"{desk.address}#letters")
    expect(desk.rows()).to_have_count(1)
    expect(desk.rows().first).to_contain_text("\\u202egnp.exe")
    desk.rows().first.locator("a").click()
    expect(page.locator("h1")).to_contain_text("\\u202egnp.exe")
    page.get_by_role("button", name="Replay as it is").first.click()
    expect(page.locator("#question")).to_contain_text("<img src=x")
    assert page.locator("main img, #question img, body script").count() == 0
    assert page.title() != "owned"
    assert "\u202e" not in page.locator("body").inner_text()
