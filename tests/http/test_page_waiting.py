"""What waits, and the holds, in a real browser: found, run now, moved, cancelled, paused and resumed."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

from playwright.sync_api import expect

from ojs_bridge.engine import holds as engine_holds
from tests.http.desks import Desk
from tests.servers import eventually

FIRST = {"attempt": 1, "fence": 0, "state": {"v": 1, "attempt": 1}}
SCHEDULED = {**FIRST, "kind": "scheduled", "max_attempts": 3}
HELD = {**FIRST, "kind": "held", "type": "mail.send"}


def park_six(desk: Desk) -> None:
    """Park six retries, five of them in a queue of their own."""
    for n in range(6):
        error = {"attempt": 1, "type": "external.timeout", "timestamp": "t", "message": f"no answer {n}"}
        due = desk.now + timedelta(hours=1 + n)
        state = {"v": 1, "attempt": 2, "errors": [error]}
        desk.park(f"r-{n}", queue="wait" if n else "other", next_retry_at=due, state=state)


def test_retries_count_down(desk: Desk) -> None:
    """One is run now, another is cancelled; Enter at once does not do it."""
    due = desk.now + timedelta(hours=2, seconds=59)
    for name in ("run", "cancel"):
        desk.park(name, attempt=2, max_attempts=2, next_retry_at=due, reason="later")
    page = desk.open("#waiting")
    expect(desk.rows("waiting")).to_have_count(2)
    first = desk.row("run")
    expect(first.locator(".w-due time")).to_have_text(re.compile("^in [12] h$"))
    expect(first).to_contain_text("dies if it fails: ")
    expect(first).to_contain_text("2 of 2")
    desk.act(first, "Run now")
    desk.asked("Run the job now", "Let it wait")
    desk.yes()
    desk.told("Made the job due at")
    expect(first.locator(".w-due time")).to_have_text("due")
    desk.act(desk.row("cancel"), "Cancel")
    expect(desk.asked("Cancel the job", "Keep it")).to_contain_text("never runs again")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_have_count(0)
    expect(desk.rows("waiting")).to_have_count(2)
    desk.act(desk.row("cancel"), "Cancel")
    desk.yes()
    expect(desk.rows("waiting")).to_have_count(1)


def test_one_is_found_and_opened(desk: Desk) -> None:
    """Its page tells its errors, and has what can be done; it says so when the job has gone."""
    park_six(desk)
    page = desk.open("#waiting")
    expect(desk.rows("waiting")).to_have_count(6)
    expect(page.locator("#waiting-short")).to_have_text("None waits there now.")
    desk.filter("Text", "NO ANSWER 3")
    expect(desk.rows("waiting")).to_have_count(1)
    page.reload()
    expect(page.get_by_label("Text")).to_have_value("NO ANSWER 3")
    desk.rows("waiting").first.locator("a").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Error")).to_contain_text("external.timeout: no answer 3")
    expect(page.locator(".title .do button")).to_have_text(["Run now", "Move…", "Cancel…"])
    expect(page).to_have_url(re.compile("#waiting/r-3$"))
    page.get_by_role("button", name="Run now").click()
    desk.asked("Run the job now", "Let it wait")
    desk.yes()
    eventually(lambda: desk.bridge.retries.get("r-3").next_retry_at <= desk.now)
    desk.bridge.retries.cancel("r-3")
    expect(page.get_by_role("alert")).to_contain_text("there is no job 'r-3'")


def test_many_are_run_or_cancelled(desk: Desk) -> None:
    """The chosen ones, or all that match, after their number was told."""
    park_six(desk)
    page = desk.open("#waiting?queue=wait")
    expect(desk.rows("waiting")).to_have_count(5)
    for n in (1, 2):
        desk.row(f"r-{n}").locator(".pick").check()
    page.get_by_role("toolbar").get_by_role("button", name="Run now").click()
    desk.asked("Run 2 jobs now", "Let them wait")
    desk.yes()
    desk.told("Made 2 jobs due at")
    assert all(desk.bridge.retries.get(f"r-{n}").next_retry_at <= desk.now for n in (1, 2))
    desk.act(page.locator(".top"), "Cancel all that match")
    question = desk.asked("Cancel 5 jobs", "Keep them")
    for told in ("queue: wait", "never runs again"):
        expect(question).to_contain_text(told)
    desk.yes()
    desk.told("Cancelled 5 jobs at")
    expect(desk.rows("waiting")).to_have_count(0)
    page.get_by_role("button", name="Clear").click()
    expect(desk.rows("waiting")).to_have_count(1)
    desk.rows("waiting").first.locator("a").focus()
    page.keyboard.press("d")
    desk.asked("Cancel the job", "Keep it")
    desk.yes()
    expect(page.locator(".end")).to_have_text("Nothing waits.")


def test_a_scheduled_job_is_moved(desk: Desk) -> None:
    """Beside the retries, in the same list; a time in the reader's own zone is asked for."""
    park_six(desk)
    for name, hours in (("s-1", 30), ("s-2", 40)):
        desk.park(name, next_retry_at=desk.now + timedelta(hours=hours), **SCHEDULED)
    page = desk.open("#waiting")
    expect(desk.rows("waiting")).to_have_count(8)
    page.get_by_role("button", name="Scheduled", exact=True).click()
    expect(desk.rows("waiting")).to_have_count(2)
    expect(page).to_have_url(re.compile("kind=scheduled"))
    expect(desk.row("s-1")).to_contain_text("1 of 3")
    desk.act(desk.row("s-1"), "Move")
    question = desk.asked("Move the job", "Leave it")
    question.get_by_label("At", exact=True).fill("2030-01-02T03:04")
    desk.yes()
    desk.told("Moved the job at")
    there = page.evaluate("new Date('2030-01-02T03:04').toISOString()")
    eventually(lambda: desk.bridge.scheduled.get("s-1").to_ojs()["scheduled_at"] == there)
    expect(desk.rows("waiting").first).to_have_attribute("data-id", "s-2")
    desk.act(page.locator(".top"), "Move all that match")
    question = desk.asked("Move 2 jobs", "Leave them")
    expect(question).to_contain_text("kind: scheduled")
    question.get_by_label("At", exact=True).fill("")
    question.locator("[type=submit]").click()
    expect(question).to_be_visible()
    question.get_by_label("At", exact=True).fill("2031-01-01T00:00")
    desk.yes()
    desk.told("Moved 2 jobs at")
    assert {found.next_retry_at.year for found in desk.bridge.scheduled.list().jobs} <= {2030, 2031}


def test_a_pause_is_begun_seen_and_ended(desk: Desk) -> None:
    """A line tells who holds what, why, until when, and how many; a held job is of a kind of its own."""
    desk.park("h-1", next_retry_at=desk.now + timedelta(minutes=9), reason="held by ann", **HELD)
    page = desk.open("#waiting?kind=held")
    expect(desk.rows("waiting")).to_contain_text(["Held"])
    page.locator("#pause").click()
    question = page.locator("#question")
    expect(question.get_by_label("Job type")).to_be_focused()
    page.keyboard.press("Enter")
    question.locator("[type=submit]").click()
    expect(question.get_by_role("alert")).to_contain_text("type: a pause needs one of type, queue")
    desk.no()
    page.locator("#pause").click()
    question.get_by_label("Job type").fill(" mail.* ")
    question.get_by_label("Until").fill("2099-01-02T03:04")
    question.get_by_label("Why").fill("the bank is down <img src=x>")
    desk.yes()
    desk.told("Paused jobs at")
    holds = page.locator("#holds li")
    who = desk.bridge.audit.list(limit=1).records[0].who
    for told in ("mail.*", "1 held", f"By {who}, since", "until 2 Jan 2099 03:04: “the bank is down <img"):
        expect(holds).to_contain_text(told)
    [shown] = desk.bridge.holds.list()
    assert (shown.hold.type, shown.hold.queue, shown.hold.error_type) == ("mail.*", None, None)
    documents = desk.bridge.engine.context.store_for("a test").documents
    engine_holds.write(documents, replace(shown.hold, since=desk.now - timedelta(days=3, hours=1)))
    expect(holds).to_contain_text("still on after 3 d")
    holds.get_by_role("button", name="Resume…").focus()
    desk.bridge.pause(queue="wait")
    expect(holds).to_have_count(2)
    expect(holds.first.get_by_role("button", name="Resume…")).to_be_focused()
    page.keyboard.press("Enter")
    question.get_by_label("Jobs a second").fill("50")
    desk.yes()
    desk.told("Resumed jobs at")
    expect(holds).to_have_count(1)
    assert desk.bridge.audit.list(limit=1).records[0].subject["rate"] == 50
    desk.bridge.resume(queue="wait")
    expect(holds).to_have_count(0)


def test_what_falls_due_is_drawn(desk: Desk) -> None:
    """In the next hour, or a day, by kind; not of held jobs, nor of what only the jobs themselves tell."""
    for n, kind in enumerate(("retry", "retry", "scheduled", "held")):
        due = desk.now + timedelta(minutes=20 + n)
        desk.park(f"j-{n}", **{**SCHEDULED, "kind": kind, "next_retry_at": due})
    desk.park("later", **{**SCHEDULED, "next_retry_at": desk.now + timedelta(hours=9)})
    desk.park("late", next_retry_at=desk.now - timedelta(hours=1))
    page = desk.open("#waiting")
    chart = page.get_by_role("region", name="Due").get_by_role("img")
    expect(chart).to_have_attribute("aria-label", re.compile("in the next hour, 1 min a bar: 3 in all"))
    expect(page.locator("#due-told")).to_have_text("1 job should have begun before.")
    page.get_by_role("combobox", name="Due in").select_option("The next day")
    expect(page).to_have_url(re.compile("ahead=P1D"))
    expect(chart).to_have_attribute("aria-label", re.compile("in the next day, 15 min a bar: 4 in all"))
    expect(desk.rows("waiting")).to_have_count(6)
    page.get_by_role("button", name="Retries", exact=True).click()
    expect(chart).to_have_attribute("aria-label", re.compile(": 2 in all"))
    desk.filter("Queue", "empty")
    expect(page.get_by_role("region", name="Due")).to_have_text("Nothing falls due in the next day.")
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="Held", exact=True).click()
    expect(desk.rows("waiting")).to_have_count(1)
    expect(page.get_by_role("region", name="Due")).to_have_count(0)
