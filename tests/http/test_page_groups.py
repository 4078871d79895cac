"""The groups in a real browser: what is wrong, whom it hurts, and a probe before the rest is replayed."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from playwright.sync_api import Locator, expect

from ojs_bridge.engine.faults import Failures
from ojs_bridge.rules.decision import RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.rules.job import Job
from tests.http.desks import Desk
from tests.lives import FRAMEWORK
from tests.operations.test_bulk import Running
from tests.servers import eventually

FRAMES = ["/srv/shop/seats.py:7 in seat"]


def crowd(desk: Desk, count: int, ago: float = 1500, **fields: Any) -> str:
    """Bury letters of one fault; return its fingerprint."""
    for n in range(count):
        error = {"type": "crowd.error", "message": f"no seat {n} for <b>", "backtrace": FRAMES}
        message = {"args": [f"acct_{n % 2}"], "kwargs": {"country": "CH"}}
        desk.bury(f"j-{n}", ago=ago - n, error=error, message=message, **fields)
    return fingerprint("billing.charge", "crowd.error", "no seat 1 for <b>", FRAMES)


def only(desk: Desk) -> Locator:
    """Return the row of the only group."""
    expect(desk.rows("groups")).to_have_count(1)
    return desk.rows("groups").first


def test_the_words_of_the_error_lead(desk: Desk) -> None:
    """A row has pattern, example, state and numbers; it leads to the group, and that to its letters."""
    group = crowd(desk, 3)
    desk.bury("old", ago=7200, error={"type": "KeyError", "message": "'vat_id'"})
    page = desk.open("#groups")
    row = only(desk)
    expect(row.locator(".msg")).to_have_text("no seat # for <b>")
    expect(row.locator("code.ex")).to_have_text("no seat 2 for <b>")
    expect(row.locator(".badge")).to_have_text("New")
    expect(row.locator(".main-n")).to_have_text("3")
    expect(row.get_by_role("img")).to_have_attribute("aria-label", re.compile("^3 deaths from 20"))
    assert group not in page.locator("body").inner_text()
    page.get_by_label("Time").select_option("all")
    expect(desk.rows("groups")).to_have_count(2)
    expect(page.get_by_role("link", name="KeyError: 'vat_id'")).to_be_visible()
    page.get_by_label("Time").select_option("10800")
    expect(page).to_have_url(re.compile("within=10800"))
    page.get_by_text("no seat # for <b>").click()
    expect(page.locator("h1")).to_have_text("no seat # for <b>")
    expect(page).to_have_url(re.compile(f"#groups/{group}.*within=10800"))
    expect(page.get_by_role("region", name="One of them, as it is")).to_contain_text("no seat 2 for <b>")
    page.get_by_role("region", name="Letters").get_by_role("link", name="All 3").click()
    expect(page).to_have_url(re.compile("#letters.*within=10800.*group="))
    expect(desk.rows()).to_have_count(3)
    page.go_back()
    expect(page.locator("h1")).to_have_text("no seat # for <b>")
    page.keyboard.press("j")
    expect(page.locator("h1")).to_have_text("KeyError: 'vat_id'")


def test_errors_of_jobs_that_still_retry_are_there(desk: Desk) -> None:
    """A group without a letter says how many retry; nothing of it can be replayed or deleted."""
    failures = Failures(desk.bridge.engine.context.store_for("a test").documents, (FRAMEWORK,), redacts=False)
    failure = Failure("smtp.busy", "smtp answered 421", backtrace=("/srv/shop/mail.py:7 in send",))
    job = Job("j", "mail.send", "mail")
    for _ in range(3):
        failures.add(job, RetryAt(desk.now + timedelta(minutes=10), 600, failure, ""), desk.now)
    failures.write(desk.now)
    page = desk.open("#groups")
    row = only(desk)
    expect(row.locator(".msg")).to_have_text("smtp answered 421")
    expect(row.locator(".main-n .big")).to_have_text("0")
    expect(row.locator(".retried")).to_have_text("3")
    row.locator("summary").click()
    expect(row.locator(".menu button")).to_have_text(["Resolve in a mark…", "Mute…", "Copy link"])
    row.locator(".msg").click()
    expect(page.locator(".stats")).to_contain_text("retry now3")
    expect(page.locator(".desk")).to_contain_text("No job has died of it in this time")
    expect(page.get_by_role("button", name="Probe replay")).to_have_count(0)


def test_one_is_muted_and_unmuted(desk: Desk) -> None:
    crowd(desk, 3)
    page = desk.open("#groups")
    desk.act(only(desk), "Mute")
    expect(desk.asked("Mute the group", "Leave it in the list")).to_contain_text("no seat 2 for <b>")
    desk.yes()
    expect(desk.rows("groups")).to_have_count(0)
    page.get_by_role("button", name="Muted", exact=True).click()
    expect(only(desk).locator(".badge")).to_contain_text("Muted until")
    desk.act(only(desk), "Unmute")
    expect(desk.rows("groups")).to_have_count(0)
    page.get_by_role("button", name="All", exact=True).click()
    expect(only(desk).locator(".badge")).to_have_text("New")


def test_one_is_resolved_in_a_mark(desk: Desk) -> None:
    """The chosen ones, too; a resolved one can be taken back."""
    crowd(desk, 3)
    desk.bridge.marks.add("v43")
    page = desk.open("#groups")
    only(desk).locator(".pick").check()
    page.get_by_role("toolbar").get_by_role("button", name="Resolve").click()
    question = desk.asked("Resolve the group", "It is not mended")
    question.get_by_label("Mended in").fill("v43")
    question.get_by_label("Why").fill("ticket 12")
    desk.yes()
    expect(only(desk).locator(".badge")).to_have_text("Mended in v43")
    assert desk.bridge.audit.list(limit=1).records[0].reason == "ticket 12"
    only(desk).locator(".msg").click()
    expect(page.get_by_role("region", name="What happened")).to_contain_text("Resolved in v43")
    page.locator(".title summary").click()
    page.get_by_role("button", name="Not mended after all").click()
    expect(page.locator(".title .badge")).to_have_text("New")


def test_a_probe_then_the_rest(desk: Desk) -> None:
    """A probe is the default, and quotes the error; when it has ended, the page asks for the rest."""
    desk.bridge.marks.add("v42", at=desk.now - timedelta(hours=1))
    group = crowd(desk, 30)
    desk.bridge.engine.context.publishers[FRAMEWORK] = Running(desk.bridge, each=1)
    page = desk.open(f"#groups/{group}")
    expect(page.locator("h1")).to_have_text("no seat # for <b>")
    page.keyboard.press("p")
    question = desk.asked("Replay 30 dead letters", "Do not replay")
    for told in ("no seat 29 for <b>", "Nothing was mended yet.", "v42", "10 are sent in 2 s; 20 stay"):
        expect(question).to_contain_text(told)
    assert group not in question.inner_text()
    question.get_by_label("How many").fill("4")
    question.get_by_label("At most").fill("100")
    question.get_by_role("button", name="Send 4, then ask").click()
    question = desk.asked("The probe went well. Send the other 26", "Not now")
    [probe] = desk.bridge.operations.list()
    assert (probe.limit, probe.newest, probe.rate, probe.stop_if_failing) == (4, True, 100.0, 0.5)
    desk.no()
    expect(page.locator("#operations")).to_contain_text("Probe of the newest 4 of no seat # for <b>")
    page.get_by_role("button", name="Send the other 26").click()
    desk.yes()
    eventually(lambda: not desk.ids())
    expect(page.get_by_role("button", name="Send the other 26")).to_have_count(0)


def test_arguments_of_all_are_changed_after_a_look_at_ten(desk: Desk) -> None:
    group = crowd(desk, 12)
    page = desk.open(f"#groups/{group}")
    expect(page.locator("h1")).to_have_text("no seat # for <b>")
    page.keyboard.press("p")
    question = desk.asked("Replay 12 dead letters", "Do not replay")
    question.locator("label", has_text="All 12").locator("input").check()
    question.get_by_role("button", name="Change…").click()
    question.get_by_label("What is done").select_option("rename")
    question.get_by_label("Argument", exact=True).fill("country")
    question.get_by_label("To", exact=True).fill("land")
    question.get_by_role("button", name="Look at ten letters").click()
    expect(question.locator(".ten tbody tr")).to_have_count(10)
    expect(question.locator(".ten tbody tr").first).to_contain_text('"land":"CH"')
    question.get_by_label("At most").fill("100")
    desk.yes()
    eventually(lambda: not desk.ids())
    assert [override.kwargs for override in desk.outbox.overrides] == [{"land": "CH"}] * 12


def test_all_are_replayed_or_deleted_at_once(desk: Desk) -> None:
    """Without a probe where somebody wants that; by the keyboard from the list."""
    crowd(desk, 12)
    page = desk.open("#groups")
    only(desk).locator("a").focus()
    page.keyboard.press("r")
    question = desk.asked("Replay 12 dead letters", "Do not replay")
    question.get_by_label("All 12").check()
    expect(question).to_contain_text("2.4 s at 5 a second")
    expect(question.locator("[type=submit]")).to_have_text("Replay 12 dead letters")
    desk.no()
    only(desk).locator("a").focus()
    page.keyboard.press("d")
    desk.asked("Delete 12 dead letters", "Keep them")
    desk.yes()
    desk.told("Deleted 12 dead letters at")
    assert desk.ids() == []


def test_a_bar_leads_to_its_letters(desk: Desk) -> None:
    """And a drag makes it another time."""
    group = crowd(desk, 5)
    page = desk.open(f"#groups/{group}?within=all")
    chart = page.locator(".chart .u-over")
    box = chart.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.02, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 50, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(f"#groups/{group}.*since=.*until="))
    page.get_by_role("button", name="Last hour").click()
    expect(page).to_have_url(re.compile(f"#groups/{group}$"))


def test_whom_it_hurts(desk: Desk) -> None:
    """What is the same in all stands in the title; of another argument the commonest values are counted."""
    group = crowd(desk, 5)
    page = desk.open(f"#groups/{group}")
    expect(page.locator(".title .fact")).to_have_text("All 5 have country = CH.")
    hurt = page.get_by_role("region", name="Whom it hurts")
    expect(hurt.locator("li.share")).to_have_text(["acct_03", "acct_12"])
    frames = {"type": "KeyError", "message": "no field vat_id", "backtrace": FRAMES}
    for n in range(50):
        desk.bury(f"one-{n}", error=frames, message={"args": [], "kwargs": {"account": n // 2}})
    [alone] = desk.bridge.groups.list(error_type="KeyError")
    desk.open(f"#groups/{alone.group.fingerprint}")
    expect(hurt).to_contain_text("No value stands out: none has more than 2.")


def test_what_nearly_all_have_is_a_fact(desk: Desk) -> None:
    """And what no argument explains is said, too."""

    def bury(error: str, *countries: str) -> str:
        for n, country in enumerate(countries):
            desk.bury(
                f"{error}-{n}",
                error={"type": error, "message": "is bad", "backtrace": FRAMES},
                message={"args": [], "kwargs": {"country": country}},
            )
        return fingerprint("billing.charge", error, "is bad", FRAMES)

    page = desk.open(f"#groups/{bury('one', *['CH'] * 11, 'DE')}")
    expect(page.locator(".title .fact")).to_have_text("11 of 12 have country = CH.")
    page = desk.open(f"#groups/{bury('two', 'CH', 'DE')}")
    expect(page.locator(".title .fact")).to_have_text("No argument is the same in all.")


def test_the_worst_group_comes_first(desk: Desk) -> None:
    """What dies now counts at once, before a worker has counted it; of a long error the first line leads."""
    message = "(psycopg.Error) duplicate key\nDETAIL: a lot"
    desk.bury("old", ago=600, type="mail.send", error={"type": "mail.error", "message": message})
    crowd(desk, 3, ago=3)
    desk.bridge.marks.add("v42", at=desk.now - timedelta(seconds=660))
    page = desk.open("#groups")
    expect(page.get_by_label("Order")).to_have_value("")
    expect(desk.rows("groups").locator(".msg")).to_contain_text(["no seat # for <b>", "(psycopg.Error)"])
    expect(desk.rows("groups").first.locator(".num").nth(1)).to_have_text("3")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(desk.rows("groups").first.locator(".main-n")).to_contain_text("3 a minute")
    page.set_viewport_size({"width": 1440, "height": 900})
    desk.bury("new", ago=1, type="mail.send", error={"type": "mail.error", "message": message})
    page.get_by_label("Order").select_option("last")
    expect(desk.rows("groups").first.locator(".msg")).to_contain_text("(psycopg.Error) duplicate key")
    desk.filter("Queue", "default")
    expect(page.get_by_role("button", name="Clear")).to_be_visible()
    row = page.locator(".filters").bounding_box()
    assert row and row["height"] < 50, "the filters take one row"
    expect(page).to_have_url(re.compile("order=last"))
    expect(desk.rows("groups")).to_have_count(2)
    desk.rows("groups").first.locator(".msg").click()
    expect(page.locator(".stats")).to_contain_text(re.compile("first death.* after v42"))
