"""The page in a real browser, with real dead letters of both frameworks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from examples.demo.workers import WORKERS, environment
from ojs_bridge import Bridge, Parked, Retention, open_store
from ojs_bridge.engine import holds as engine_holds
from ojs_bridge.http import app_for
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.store import BOUNDS, Rate
from tests.forking import ended, started
from tests.http.doors import OPERATOR, READER, listening
from tests.lives import FRAMEWORK, bridge_with_outbox
from tests.operations.test_bulk import Running, bury_many
from tests.operations.test_health import worker
from tests.operations.test_retention import deploy
from tests.servers import Valkey, eventually
from tests.servers.ports import free_port
from tests.store.test_parked import parked
from tests.store.test_rates import record
from tests.store.test_store import entry, letter

#: A loaded machine's patience, in milliseconds.
expect.set_options(timeout=90_000)

ROOT = Path(__file__).parents[2]
REPLAYED = "exhausts, is dead-lettered"
DYING = {"hits auth.*": None, "says DeadLetter": None, REPLAYED: {"on_exhaustion": "dead_letter"}}
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"

SEND = """
import json, sys
import celery_app, dramatiq_app
for name, retry in json.loads(sys.argv[1]).items():
    retry = retry or {"on_exhaustion": "dead_letter"}
    celery_app.demo.apply_async((name,), ojs_retry=retry)
    dramatiq_app.demo.send_with_options(args=(name,), ojs_retry=retry)
"""
SERVE = """
import sys
import celery_app, dramatiq_app
from project import bridge
from ojs_bridge.http import serve
serve(bridge, port=int(sys.argv[1]), operator_token=sys.argv[2] or None)
"""


SCROLL = """async () => {
    while (document.querySelectorAll("#letters li").length < 3_000) {
        scrollTo(0, document.body.scrollHeight);
        await new Promise(requestAnimationFrame);
    }
}"""


COUNT = """() => {
    const send = fetch;
    window.asked = window.answered = 0;
    window.fetch = (...words) => {
        asked += 1;
        return send(...words).finally(() => { answered += 1; });
    };
}"""


class Door:
    """A server of the page over one store, and the fleet of its letters."""

    def __init__(self, store: str, valkey_url: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.store = open_store(store)
        self.valkey = redis.Redis.from_url(valkey_url, decode_responses=True)
        self.environment = {**environment(valkey_url, store), "C_FORCE_ROOT": "1"}

    def python(self, code: str, *words: str) -> list[str]:
        """Return the command that runs some code with words."""
        return ["python", "-c", code, *words]

    def ids(self) -> list[str]:
        """Return the ids of the dead letters."""
        return [found.id for found in Bridge(self.store).dead_letters.list(limit=1000).letters]


def await_door(door: Door) -> None:
    """Wait until a server answers."""

    def answers() -> bool:
        try:
            return httpx.get(door.url).status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers, seconds=90)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """Workers of both frameworks, with jobs that have died, and the page's server."""
    folder = tmp_path_factory.mktemp("page")
    with Valkey() as valkey, ExitStack() as stack:
        found = Door(f"sqlite:///{folder}/ojs.db", valkey.url)

        def start(command: list[str], log: str) -> None:
            process = started(command, env=found.environment, log=folder / log, cwd=ROOT)
            stack.callback(lambda: (process.terminate(), process.wait(90)))

        for name, command in WORKERS.items():
            start(["python", "-m", *command], name)
        sent = ended(found.python(SEND, json.dumps(DYING)), env=found.environment, cwd=ROOT)
        assert sent.status == 0, sent.err
        start(found.python(SERVE, str(found.port), ""), "server")
        eventually(lambda: len(found.ids()) == 2 * len(DYING), seconds=60)
        await_door(found)
        yield found


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
def page(browser: Browser, door: Door) -> Iterator[Page]:
    """The page, freshly opened; an error in its console fails the test."""
    opened = browser.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda told: wrong.append(told.text) if "Content Security" in told.text else None)
    opened.goto(door.url)
    expect(opened.locator("#letters li").first).to_be_visible()
    yield opened
    opened.close()
    assert wrong == []


def rows(page: Page) -> Any:
    """Return the rows of the list."""
    return page.locator("#letters li")


def asked(page: Page, deed: str, way_out: str) -> None:
    """Check that a question's buttons say what they do, and that the way out has the focus."""
    expect(page.locator("#question-title")).to_have_text(f"{deed}?")
    expect(page.locator("#question menu button")).to_have_text([way_out, deed])
    expect(page.locator("#question-no")).to_be_focused()


def test_what_died_is_grouped_and_filtered(page: Page) -> None:
    """A click on a group filters by it, another undoes that; groups and chart follow; a text is found."""
    expect(rows(page)).to_have_count(6)
    expect(page.locator("#letters-total")).to_have_text("6")
    expect(page.locator("#by-error-type li")).to_have_count(3)
    expect(page.locator("#bars i")).to_have_count(48)
    group = page.locator("#by-error-type button", has_text="auth.token_expired")
    group.click()
    expect(rows(page)).to_have_count(2)
    expect(page.locator("#letters-filters [name=error_type]")).to_have_value("auth.token_expired")
    expect(page.locator("#by-error-type li")).to_have_count(1)
    expect(page.locator("#by-queue b")).to_have_text(["1", "1"])
    expect(page.locator("#deaths-span")).to_contain_text("2 in all")
    expect(page.locator("#letters-total")).to_have_text("6")
    page.locator("#by-error-type button[aria-pressed=true]").click()
    expect(rows(page)).to_have_count(6)
    page.locator("#letters-filters [name=text]").fill("LOOK AT THIS")
    expect(rows(page)).to_have_count(2)
    page.get_by_role("button", name="Clear").click()
    expect(rows(page)).to_have_count(6)


def test_one_is_opened_by_the_keyboard(page: Page) -> None:
    """The letter shows arguments, reason, every error with its backtrace, the policy and its schedule."""
    page.locator("#letters-filters [name=error_type]").fill("external.*")
    expect(rows(page)).to_have_count(2)
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    detail = page.locator("#detail")
    expect(detail).to_be_visible()
    expect(detail).to_contain_text("attempt 3 of 3 failed with external.unreachable")
    expect(detail).to_contain_text("args: name")
    expect(detail).to_contain_text(f'"{REPLAYED}"')
    expect(detail.locator("details:not(#changes)")).to_have_count(3)
    expect(detail.locator("details[open] pre").last).to_contain_text("perform")
    expect(detail.locator("tr")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(detail).to_be_hidden()


def test_a_message_outlasts_what_the_page_does_by_itself(page: Page, door: Door) -> None:
    """Such as a look for more rows, which a slow browser takes after the message was shown."""
    page.add_init_script("requestAnimationFrame = (work) => setTimeout(work, 300)")
    page.goto(f"{door.url}#letters?open=gone")
    page.reload()
    expect(page.locator("#trouble")).to_contain_text("there is no dead letter job 'gone'")
    page.evaluate(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
    )
    expect(page.locator("#trouble")).to_contain_text("there is no dead letter job 'gone'")


def test_the_address_says_where_one_is(page: Page, browser: Browser, door: Door) -> None:
    """The address has the filters and the open letter, to be shared and gone back from."""
    page.locator("#letters-filters [name=queue]").fill("celery")
    page.locator("#letters-filters [name=within]").select_option("86400")
    expect(page).to_have_url(re.compile("queue=celery&within=86400$"))
    expect(rows(page)).to_have_count(3)
    rows(page).first.click()
    expect(page.locator("#detail")).to_be_visible()
    expect(page).to_have_url(re.compile(r"#letters\?queue=celery&within=86400&open="))
    shared = browser.new_page()
    shared.goto(page.url)
    expect(shared.locator("#detail-title")).to_have_text(page.locator("#detail-title").inner_text())
    expect(rows(shared)).to_have_count(3)
    expect(shared.locator("#letters-filters [name=within]")).to_have_value("86400")
    shared.close()
    page.go_back()
    expect(page.locator("#detail")).to_be_hidden()
    expect(page.locator("#letters-filters [name=queue]")).to_have_value("celery")
    expect(page).to_have_url(re.compile("within=86400$"))
    page.goto(f"{door.url}#letters?queue=celery&open=gone")
    expect(page.locator("#trouble")).to_contain_text("there is no dead letter job 'gone'")
    expect(page).to_have_url(re.compile("queue=celery$"))


def test_one_is_replayed_with_other_arguments(page: Page, door: Door) -> None:
    """The form takes arguments as they are shown; what is wrong stands at its field, and nothing is sent."""
    page.locator("#letters-filters [name=queue]").fill("celery")
    page.locator("#letters-filters [name=error_type]").fill("payment.fraud")
    expect(rows(page)).to_have_count(1)
    rows(page).first.click()
    detail, changes = page.locator("#detail"), page.locator("#changes")
    changes.locator("summary").click()
    queue, arguments = changes.get_by_label("Queue"), changes.get_by_label("Arguments, a list")
    expect(queue).to_have_value("celery")
    expect(arguments).to_have_value(detail.locator("h3:has-text('Arguments') ~ pre").first.inner_text())
    expect(changes.get_by_label("Named arguments")).to_have_value("{}")
    for wrong, why in (
        ('["succeeds at once"', "This is not JSON"),
        ('"succeeds at once"', "This is no list"),
    ):
        arguments.fill(wrong)
        detail.get_by_role("button", name="Replay as changed").click()
        expect(changes.get_by_role("alert").filter(visible=True)).to_contain_text(why)
        expect(arguments).to_be_focused()
        expect(page.locator("#question")).to_be_hidden()
    arguments.fill('["succeeds at once"]')
    queue.fill("q" * 1001)
    detail.get_by_role("button", name="Replay as changed").click()
    expect(page.locator("#question-text")).to_contain_text("payment.fraud: look at this")
    page.locator("#question-yes").click()
    expect(page.locator("#question-text")).to_contain_text("at most 1000 characters")
    expect(page.locator("#question-yes")).to_be_disabled()
    page.locator("#question-no").click()
    queue.fill("celery")
    detail.get_by_role("button", name="Replay as changed").click()
    expect(page.locator("#question-text")).to_contain_text('args: ["succeeds at once"]')
    with page.expect_request("**/retry") as sent:
        page.locator("#question-yes").click()
    assert sent.value.post_data_json == {"override": {"args": ["succeeds at once"]}}
    expect(rows(page)).to_have_count(0)
    eventually(lambda: door.valkey.get("demo:runs:celery:succeeds at once") == "1")


def test_what_is_hidden_is_never_sent_back(page: Page, door: Door) -> None:
    """A field begins empty if its values are hidden, too long or unreadable; empty, it changes nothing."""
    told = {"args": ["[redacted]"], "kwargs": {"n": 2**60}, "redacted": True, "hidden": ["args"]}
    pickled = {
        "headers": {},
        "content_type": "application/x-python-serialize",
        "body": "",
        "body_encoding": "utf-8",
    }
    for name, message in (("hidden", told), ("pickled", pickled)):
        door.store.letters.bury(letter(name, queue="secret", framework="nobody", message=message))
    page.locator("#letters-filters [name=queue]").fill("secret")
    expect(rows(page)).to_have_count(2)
    for name, args, kwargs in (("hidden", "are hidden", "too long"), ("pickled", "pickled", "pickled")):
        page.locator(f'li[data-id="{name}"]').click()
        page.locator("#changes summary").click()
        for label, why in (("Arguments, a list", args), ("Named arguments", kwargs)):
            field = page.locator("#changes").get_by_label(label)
            expect(field).to_have_value("")
            expect(field).to_have_attribute("placeholder", re.compile(why))
        page.locator("#detail").get_by_role("button", name="Replay", exact=True).click()
        with page.expect_request("**/retry") as sent:
            page.locator("#question-yes").click()
        assert sent.value.post_data_json == {"override": {}}
        expect(page.locator("#question-text")).to_contain_text("belongs to nobody")
        page.locator("#question-no").click()
        page.locator("#detail").get_by_role("button", name="Delete").click()
        page.locator("#question-yes").click()
        expect(page.locator(f'li[data-id="{name}"]')).to_have_count(0)


def test_long_values_stay_in_their_boxes(page: Page, door: Door) -> None:
    """A megabyte of arguments does not make the dialog long; it is shown whole on request, and replaced."""
    long = "x" * 1_000_000
    error = {"attempt": 1, "type": "big", "message": "m" * 100_000, "timestamp": "2026-11-21T10:00:02.345Z"}
    message = {"args": [long], "kwargs": {}}
    door.store.letters.bury(letter("big", queue="big", framework="nobody", errors=(error,), message=message))
    page.locator("#letters-filters [name=queue]").fill("big")
    expect(rows(page)).to_have_count(1)
    rows(page).first.click()
    height = "document.getElementById('detail').scrollHeight"
    expect(page.locator("#detail")).to_be_visible()
    assert page.evaluate(height) < 2_500
    page.get_by_role("button", name="Show all 1,0").click()
    assert page.locator("#detail pre").first.inner_text() == json.dumps([long], indent=2)
    assert page.evaluate(height) < 2_500
    page.locator("#changes summary").click()
    page.get_by_label("Arguments, a list").fill(json.dumps([long, 2]))
    page.get_by_role("button", name="Replay as changed").click()
    assert page.evaluate("document.getElementById('question').scrollHeight") < 1_000
    page.locator("#question-yes").click()
    expect(page.locator("#question-text")).to_contain_text("belongs to nobody")
    Bridge(door.store).dead_letters.delete("big")


def test_letters_that_cannot_be_replayed_here_are_told_of_at_once(page: Page, door: Door) -> None:
    """What turns the text around it is spelt out, so that nobody takes one text for another."""
    error = {"attempt": 1, "type": "odd", "message": "\u202egnp.exe", "timestamp": "2026-11-21T10:00:02.345Z"}
    expect(page.locator("#unreplayable")).to_be_empty()
    door.store.letters.bury(letter("odd", queue="odd", framework="nobody", errors=(error,)))
    page.locator("#letters-filters [name=queue]").fill("odd")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#unreplayable")).to_contain_text("cannot replay the letters of nobody")
    expect(rows(page).first).to_contain_text("\\u202egnp.exe")
    assert "\u202e" not in page.locator("body").inner_text()
    Bridge(door.store).dead_letters.delete("odd")


def test_one_is_replayed(page: Page, door: Door) -> None:
    """The page asks before; the job runs again, and succeeds now."""
    door.valkey.set("demo:mended", 1)
    page.locator("#letters-filters [name=error_type]").fill("external.*")
    expect(rows(page)).to_have_count(2)
    rows(page).first.click()
    page.locator("#detail").get_by_role("button", name="Replay").click()
    page.locator("#question-yes").click()
    expect(rows(page)).to_have_count(1)
    eventually(
        lambda: 4 in {int(door.valkey.get(f"demo:runs:{f}:{REPLAYED}") or 0) for f in WORKERS}, seconds=20
    )


def test_many_are_replayed_by_a_filter(page: Page, door: Door) -> None:
    """The page tells the count before; a no changes nothing."""
    page.locator("#letters-filters [name=error_type]").fill("auth.*")
    expect(rows(page)).to_have_count(2)
    page.locator("#replay-all").click()
    asked(page, "Replay 2 dead letters", "Do not replay")
    page.locator("#question-no").click()
    expect(page.locator("#question")).to_be_hidden()
    before = {name: door.valkey.get(f"demo:runs:{name}:hits auth.*") for name in WORKERS}
    assert before == dict.fromkeys(WORKERS, "1")
    page.locator("#replay-all").click()
    page.locator("#question-yes").click()
    eventually(
        lambda: all(int(door.valkey.get(f"demo:runs:{n}:hits auth.*") or 0) == 2 for n in WORKERS), seconds=20
    )


def test_selected_ones_are_deleted(page: Page, door: Door) -> None:
    """No other letter is deleted."""
    for name in ("keep", "one", "two"):
        door.store.letters.bury(letter(name, queue="doomed", framework="celery"))
    page.locator("#letters-filters [name=queue]").fill("doomed")
    expect(rows(page)).to_have_count(3)
    for name in ("one", "two"):
        page.locator(f'li[data-id="{name}"] input').check()
    expect(page.locator("#selected")).to_have_text("2 selected")
    page.locator("#delete-selected").click()
    asked(page, "Delete 2 dead letters", "Keep them")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_have_text(re.compile("^Deleted 2 dead letters at [0-9:]+.$"))
    expect(rows(page)).to_have_count(1)
    assert "keep" in door.ids()
    assert not {"one", "two"} & {*door.ids()}


def test_a_selection_is_a_single_request(page: Page, door: Door) -> None:
    """The rate limit of the page's own server is below the number of letters."""
    for n in range(150):
        door.store.letters.bury(letter(f"pick-{n}", queue="picked", framework="celery"))
    page.locator("#letters-filters [name=queue]").fill("picked")
    expect(rows(page)).to_have_count(100)
    page.evaluate(SCROLL.replace("3_000", "150"))
    writes: list[str] = []
    page.on("request", lambda request: request.method == "GET" or writes.append(request.url))
    page.locator("#select-all").check()
    page.locator("#delete-selected").click()
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Deleted 150 dead letters at")
    expect(rows(page)).to_have_count(0)
    assert writes == [f"{door.url}ojs/v1/operations"]


def test_a_bulk_replay_is_stopped_and_resumed(page: Page, door: Door) -> None:
    """The replay goes on when the tab is loaded again; Stop ends it, and Resume takes it up."""
    bridge = Bridge(door.store)
    expect(page.locator("#letters-total")).not_to_be_empty()
    total = page.locator("#letters-total").inner_text()
    for n in range(300):
        door.store.letters.bury(letter(f"slow-{n}", queue="slowly", framework="celery", type="demo"))
    begun = page.request.post(
        f"{door.url}ojs/v1/operations",
        headers={"X-OJS-Bridge": "1"},
        data={"action": "retry", "filter": {"queue": "slowly"}, "rate": 20, "confirm": True},
    )
    assert begun.ok
    page.reload()
    shown = page.locator("#operations li", has_text="slowly")
    expect(shown).to_contain_text("Replay queue slowly: running")
    shown.get_by_role("button", name="Stop").click()
    expect(shown).to_contain_text("stopped")
    expect(shown).to_contain_text("an operator stopped it")
    [operation] = [found for found in bridge.operations.list() if found.kind.get("queue") == "slowly"]
    assert (operation.state, operation.matched < 300) == ("stopped", True)
    shown.get_by_role("button", name="Resume").click()
    expect(shown).to_contain_text("running")
    shown.get_by_role("button", name="Stop").click()
    expect(shown).to_contain_text("stopped")
    bridge.dead_letters.purge(confirm=True, queue="slowly")
    expect(page.locator("#letters-total")).to_have_text(total)


def test_a_search_goes_on_by_itself(page: Page, door: Door) -> None:
    """A request searches 2,000 letters; the match is beyond them."""
    old = letter().discarded_at - timedelta(days=9)
    for n in range(2_100):
        door.store.letters.bury(letter(f"hay-{n}", queue="hay", discarded_at=old + timedelta(seconds=n)))
    door.store.letters.bury(letter("needle", queue="hay", discarded_at=old, message={"args": ["a needle"]}))
    page.locator("#letters-filters [name=queue]").fill("hay")
    page.locator("#letters-filters [name=text]").fill("a needle")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#letters-end")).to_have_text("1 in all")
    Bridge(door.store).dead_letters.purge(confirm=True, queue="hay")


def bury_in_a_window(door: Door) -> datetime:
    """Bury two jobs five minutes ago, and three more than three hours ago; return the time."""
    now = Bridge(door.store).engine.now()
    error = {**entry(1), "type": "window.error", "message": "no seat"}
    for n in range(5):
        died = now - timedelta(minutes=5 if n < 2 else 200, seconds=n)
        args = {"args": [f"seat {n}"], "kwargs": {}}
        known = {"queue": "window", "framework": "nobody", "errors": (error,), "message": args}
        door.store.letters.bury(letter(f"window-{n}", discarded_at=died, **known))
    return now


def test_a_window_goes_along_from_a_group_to_its_letters(page: Page, door: Door) -> None:
    """The list, the chart and each question have it; a question says its number, its types and its window."""
    bury_in_a_window(door)
    page.get_by_role("link", name="Groups").click()
    page.locator("#groups-filters [name=queue]").fill("window")
    row = page.locator("#groups li", has_text="window.error")
    expect(row.locator("b")).to_have_text("5")
    page.locator("#groups-filters [name=within]").select_option("3600")
    expect(row.locator("b")).to_have_text("2")
    row.get_by_role("button", name="Replay").click()
    asked(page, "Replay 2 dead letters", "Do not replay")
    page.locator("#question-no").click()
    row.locator(".what").click()
    expect(page).to_have_url(re.compile("#letters.*within=3600.*group="))
    expect(rows(page)).to_have_count(2)
    expect(page.locator("#letters-filters [name=within]")).to_have_value("3600")
    expect(page.locator("#deaths-span")).to_contain_text("2 in all")
    page.get_by_role("button", name="Replay all that match").click()
    asked(page, "Replay 2 dead letters", "Do not replay")
    for told in ("2 \N{MULTIPLICATION SIGN} billing.charge", "queue: window", "group: ", "since: "):
        expect(page.locator("#question-text")).to_contain_text(told)
    page.locator("#question-no").click()
    page.locator("#letters-filters [name=text]").fill("SEAT 1")
    expect(rows(page)).to_have_count(1)
    expect(page.locator("#summary")).to_be_hidden()
    page.get_by_role("button", name="Delete all that match").click()
    asked(page, "Delete 1 dead letter", "Keep it")
    keep = "To keep them first: ojs-bridge dead-letters export --queue 'window' "
    for told in ("1 \N{MULTIPLICATION SIGN} billing.charge", keep, "--text 'SEAT 1' "):
        expect(page.locator("#question-text")).to_contain_text(told)
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Deleted 1 dead letter at")
    assert [found for found in door.ids() if found.startswith("window")] == [
        "window-0", "window-2", "window-3", "window-4"
    ]  # fmt: skip
    Bridge(door.store).dead_letters.purge(confirm=True, queue="window")


def test_a_window_between_two_times(page: Page, door: Door) -> None:
    """An address brings it, to the letters and to the groups; a deletion keeps to it."""
    now = bury_in_a_window(door)
    since, until = (f"{now - timedelta(minutes=m):%Y-%m-%dT%H:%M:%SZ}" for m in (300, 60))
    for view in ("letters", "groups"):
        page.goto(f"{door.url}#{view}?queue=window&since={since}&until={until}")
        count = rows(page) if view == "letters" else page.locator("#groups li b")
        expect(count).to_have_count(3) if view == "letters" else expect(count).to_have_text("3")
        expect(page.locator(f"#{view}-filters [name=since]")).to_have_value(since)
    page.goto(f"{door.url}#letters?queue=window&since={since}&until={until}")
    page.get_by_role("button", name="Delete all that match").click()
    asked(page, "Delete 3 dead letters", "Keep them")
    expect(page.locator("#question-text")).to_contain_text("until: ")
    page.locator("#question-yes").click()
    expect(rows(page)).to_have_count(0)
    Bridge(door.store).dead_letters.purge(confirm=True, queue="window")


@pytest.mark.parametrize(
    "address",
    [
        "#letters?que=celery", "#letters?within=7", "#letters?within=3600&since=2026-11-21T10:00:00Z",
        "#letters?queue=a&queue=celery", "#letters?order=count", "#lettres?queue=celery",
        "?queue=celery#letters", "#letters?since=yesterday", "#groups?text=a", "#groups?muted=1",
        "#waiting?group=0123456789abcdef",
        "#audit?queue=celery", "#rates?until=2026-11-21T10:00:00Z", "#rates?within=7", "#rates?open=a",
    ],
)  # fmt: skip
def test_an_address_that_is_not_understood_shows_nothing(page: Page, door: Door, address: str) -> None:
    """What a link carries is never left out: it would show, replay and delete more than was meant."""
    page.goto("about:blank")
    page.goto(f"{door.url}{address}")
    expect(page.locator("#trouble")).to_be_visible()
    expect(page.locator("main:visible li, #rates figure")).to_have_count(0)
    view = page.locator("main:visible")
    for button in view.get_by_role("button", name="all that match").all():
        if "since=yesterday" not in address:
            expect(button).to_be_disabled()
    assert page.url.endswith(address)
    view.get_by_role("button", name="Clear").click()
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_group_is_muted_opened_and_deleted(page: Page, door: Door) -> None:
    """Errors that are alike are one row, with its count and its deaths."""
    for n in range(3):
        frames = ["/srv/shop/seats.py:7 in seat"]
        error = {**entry(1), "type": "crowd.error", "message": f"no seat {n} for <b>", "backtrace": frames}
        died = Bridge(door.store).engine.now() - timedelta(minutes=25)
        found = letter(f"crowd-{n}", queue="crowd", framework="nobody", errors=(error,), discarded_at=died)
        door.store.letters.bury(found)
    page.get_by_role("link", name="Groups").click()
    row = page.locator("#groups li", has_text="crowd.error")
    first = row.get_by_text("first 25 min ago")
    assert first.evaluate("cell => cell.scrollWidth <= cell.clientWidth"), "the cell is cut"
    expect(row).to_contain_text("no seat # for <b> at shop/seats.py in seat")
    expect(row.locator("b")).to_have_text("3")
    expect(row.locator(".bars i")).to_have_count(24)
    row.get_by_role("button", name="Mute").click()
    asked(page, "Mute the group", "Leave it in the list")
    page.locator("#question-yes").click()
    expect(row).to_have_count(0)
    page.get_by_label("Muted groups").select_option("true")
    expect(row).to_contain_text("muted by")
    expect(row).to_contain_text("until 20")
    row.get_by_role("button", name="Unmute").click()
    expect(row.get_by_role("button", name="Mute…")).to_be_visible()
    row.locator(".what").click()
    expect(rows(page)).to_have_count(3)
    expect(page.get_by_label("Group", exact=True)).to_have_value(
        fingerprint("billing.charge", "crowd.error", "no seat 1 for <b>", ["/srv/shop/seats.py:7 in seat"])
    )
    page.reload()
    expect(rows(page)).to_have_count(3)
    page.get_by_role("link", name="Groups").click()
    page.locator("#groups-filters [name=queue]").fill("crowd")
    expect(page.locator("#groups li")).to_have_count(1)
    row.focus()
    page.keyboard.press("d")
    asked(page, "Delete 3 dead letters", "Keep them")
    page.locator("#question-yes").click()
    expect(page.locator("#groups-end")).to_have_text("No group matches these filters.")
    assert not [letter_id for letter_id in door.ids() if letter_id.startswith("crowd")]


def test_a_letter_that_has_gone_meanwhile(page: Page, door: Door) -> None:
    """A page that was left open for an hour says so, and shows the letters of now."""
    door.store.letters.bury(letter("short-lived", queue="fleeting", framework="celery"))
    page.locator("#letters-filters [name=queue]").fill("fleeting")
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Pause").click()
    Bridge(door.store).dead_letters.delete("short-lived")
    rows(page).first.focus()
    page.keyboard.press("r")
    page.locator("#question-yes").click()
    expect(rows(page)).to_have_count(0)
    expect(page.locator("#letters-end")).to_have_text("No dead letter matches these filters.")


def test_what_a_replay_could_not_do_stays_on_the_page(page: Page, door: Door) -> None:
    """The message about a failure stays until the next bulk action; after a No the keyboard still works."""
    door.store.letters.bury(letter("nobodys", framework="nobody", queue="nobodys"))
    page.locator('#letters-filters [name="queue"]').fill("nobodys")
    expect(page.locator("#letters li")).to_have_count(1)
    page.locator("#replay-all").click()
    page.locator("#question-yes").click()
    expect(page.locator("#trouble")).to_contain_text("1 of 1 failed")
    expect(page.locator("#letters li")).to_have_count(1)
    with page.expect_response("**/dead-letter?**"):
        page.locator("#letters li").first.focus()
        page.keyboard.press("g")
    expect(page.locator("#trouble")).to_contain_text("1 of 1 failed")
    page.locator("#delete-all").click()
    page.locator("#question-no").click()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("#delete-all").click()
    expect(page.locator("#told")).to_be_empty()
    page.locator("#question-yes").click()
    expect(page.locator("#letters li")).to_have_count(0)
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#told")).to_contain_text("Deleted 1 dead letter at")
    expect(page.locator("#letters-end")).to_have_text("No dead letter matches these filters.")


def test_html_in_job_data_stays_text(page: Page, door: Door) -> None:
    """HTML stays text in any place."""
    error = {
        "attempt": 1,
        "type": EVIL,
        "message": EVIL,
        "backtrace": [EVIL],
        "timestamp": "t",
        "details": {EVIL: EVIL},
    }
    door.store.letters.bury(
        letter(f"evil {EVIL}", type=EVIL, queue=EVIL, reason=EVIL, errors=(error,), message={"args": [EVIL]})
    )
    page.locator("#letters-filters [name=text]").fill("onerror")
    expect(rows(page)).to_have_count(1)
    rows(page).first.click()
    expect(page.locator("#detail-title")).to_have_text(EVIL)
    assert page.locator("#letters img, #detail img, #summary img, body script").count() == 0
    assert page.title() == "Dead letters"
    page.locator("#detail").get_by_role("button", name="Delete").click()
    asked(page, "Delete 1 dead letter", "Keep it")
    page.locator("#question-yes").click()
    expect(rows(page)).to_have_count(0)


def test_parked_retries_count_down(page: Page, door: Door) -> None:
    """One retry is run now, another is cancelled."""
    now = Bridge(door.store).engine.now()
    for name in ("run", "cancel"):
        door.store.parked.park(
            Parked(
                id=name, key=name, fence=1, type="billing.charge", queue="q", framework="nobody", attempt=2,
                max_attempts=5, next_retry_at=now + timedelta(hours=2, seconds=59),
                parked_at=now, reason="later",
                state={"v": 1, "attempt": 2}, message={"args": [1]},
            )
        )  # fmt: skip
    page.get_by_role("link", name="Waiting").click()
    expect(page.locator("#waiting li")).to_have_count(2)
    first = page.locator('#waiting li[data-id="run"] time')
    expect(first).to_have_text(re.compile("^in (2:00|1:5[0-9]):"))
    expect(first).not_to_have_text(first.inner_text())
    page.locator('#waiting li[data-id="run"]').get_by_role("button", name="Run now").click()
    asked(page, "Run the job now", "Let it wait")
    page.locator("#question-yes").click()
    expect(page.locator('#waiting li[data-id="run"] time')).to_have_text("due")
    page.locator('#waiting li[data-id="cancel"]').get_by_role("button", name="Cancel").click()
    asked(page, "Cancel the job", "Keep it")
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_hidden()
    expect(page.locator("#waiting li")).to_have_count(2)
    page.locator('#waiting li[data-id="cancel"]').get_by_role("button", name="Cancel").click()
    page.locator("#question-yes").click()
    expect(page.locator("#waiting li")).to_have_count(1)
    Bridge(door.store).retries.cancel("run")


def park_six(door: Door, queue: str, word: str) -> Bridge:
    """Park six retries that nobody publishes, five of them in this queue; return a bridge that sees them.

    Their ids begin with the word: a retry that was cancelled never comes back, so each test has its own.
    """
    bridge = Bridge(door.store)
    now, error = bridge.engine.now(), {"attempt": 1, "type": "external.timeout", "timestamp": "t"}
    for n in range(6):
        state = {"v": 1, "attempt": 2, "errors": [{**error, "message": f"no answer {n}"}]}
        door.store.parked.park(
            parked(
                f"{word}-{n}",
                queue=queue if n else "other",
                framework="nobody",
                next_retry_at=now + timedelta(hours=1 + n),
                state=state,
            )
        )
    return bridge


def test_a_parked_retry_is_found_opened_and_run(page: Page, door: Door) -> None:
    bridge = park_six(door, "wait", "r")
    page.get_by_role("link", name="Waiting").click()
    retries, form = page.locator("#waiting li"), page.locator("#waiting-filters")
    expect(retries).to_have_count(6)
    expect(page.locator("#waiting-short")).to_have_text("None waits there now.")
    form.locator("[name=text]").fill("NO ANSWER 3")
    expect(retries).to_have_count(1)
    expect(page.locator("#waiting-end")).to_have_text("1 in all")
    page.reload()
    expect(form.locator("[name=text]")).to_have_value("NO ANSWER 3")
    retries.first.focus()
    page.keyboard.press("Enter")
    detail = page.locator("#detail")
    expect(detail).to_contain_text("external.timeout: no answer 3")
    expect(detail.locator("dt")).to_contain_text(["parked", "due"])
    expect(detail.get_by_role("button")).to_have_text(["Close", "Run now", "Move…", "Cancel"])
    assert "open=r-3" in page.url
    detail.get_by_role("button", name="Run now").click()
    asked(page, "Run the job now", "Let it wait")
    page.locator("#question-yes").click()
    expect(detail).to_be_hidden()
    assert bridge.retries.get("r-3").next_retry_at <= bridge.engine.now()
    for n in range(6):
        bridge.retries.cancel(f"r-{n}")


def test_parked_retries_are_run_or_cancelled_by_the_many(page: Page, door: Door) -> None:
    bridge = park_six(door, "wait", "many")
    page.get_by_role("link", name="Waiting").click()
    retries, form = page.locator("#waiting li"), page.locator("#waiting-filters")
    form.locator("[name=queue]").fill("wait")
    expect(retries).to_have_count(5)
    for n in (1, 2):
        page.locator(f'#waiting li[data-id="many-{n}"] input').check()
    page.locator("#waiting-actions").get_by_role("button", name="Run now").click()
    asked(page, "Run 2 jobs now", "Let them wait")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Made 2 jobs due at")
    assert all(bridge.retries.get(f"many-{n}").next_retry_at <= bridge.engine.now() for n in (1, 2))
    page.get_by_role("button", name="Cancel all that match").click()
    expect(page.locator("#question-text")).to_contain_text("queue: wait")
    expect(page.locator("#question-text")).to_contain_text("never runs again")
    asked(page, "Cancel 5 jobs", "Keep them")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Cancelled 5 jobs at")
    expect(retries).to_have_count(0)
    form.get_by_role("button", name="Clear").click()
    expect(retries).to_have_count(1)
    retries.first.focus()
    page.keyboard.press("d")
    asked(page, "Cancel the job", "Keep it")
    page.locator("#question-yes").click()
    expect(page.locator("#waiting-end")).to_have_text("Nothing waits.")
    assert bridge.operations.list(limit=1)[0].action == "cancel"


def test_a_scheduled_job_is_seen_moved_and_cancelled(page: Page, door: Door) -> None:
    """Beside the retries, in the same list; a time in the reader's own zone is asked for."""
    bridge = park_six(door, "wait", "both")
    now = bridge.engine.now()
    job = {"kind": "scheduled", "attempt": 1, "fence": 0, "max_attempts": 3, "state": {"v": 1, "attempt": 1}}
    for name, hours in (("s-1", 30), ("s-2", 40)):
        due = now + timedelta(hours=hours)
        door.store.parked.park(parked(name, framework="nobody", next_retry_at=due, **job))
    page.get_by_role("link", name="Waiting").click()
    waiting, form = page.locator("#waiting li"), page.locator("#waiting-filters")
    expect(waiting).to_have_count(8)
    form.locator("[name=kind]").select_option("scheduled")
    expect(waiting).to_have_count(2)
    assert "kind=scheduled" in page.url
    expect(waiting.first).to_contain_text("Scheduled")
    expect(waiting.first).to_contain_text("1 of 3")
    waiting.first.get_by_role("button", name="Move…").click()
    expect(page.locator("#question-yes")).to_have_text("Move the job")
    page.locator("#question-at").fill("2030-01-02T03:04")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Moved the job at")
    there = page.evaluate("new Date('2030-01-02T03:04').toISOString()")
    eventually(lambda: bridge.scheduled.get("s-1").to_ojs()["scheduled_at"] == there)
    expect(waiting.first).to_have_attribute("data-id", "s-2")
    page.get_by_role("button", name="Move all that match…").click()
    expect(page.locator("#question-text")).to_contain_text("kind: scheduled")
    page.locator("#question-at").fill("")
    page.locator("#question-yes").click()
    expect(page.locator("#question")).to_be_visible()
    page.locator("#question-at").fill("2031-01-01T00:00")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Moved 2 jobs at")
    assert {found.next_retry_at.year for found in bridge.scheduled.list().jobs} <= {2030, 2031}
    waiting.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_contain_text("scheduled")
    page.locator("#detail").get_by_role("button", name="Cancel").click()
    page.locator("#question-yes").click()
    expect(waiting).to_have_count(1)
    bridge.operations.run(bridge.operations.begin("cancel"))


def test_a_pause_is_begun_seen_and_ended(page: Page, door: Door) -> None:
    """The strip tells who holds what, why, until when, and how many; a held job is of a kind of its own."""
    bridge = park_six(door, "wait", "beside")
    job = {"kind": "held", "attempt": 1, "fence": 0, "state": {"v": 1, "attempt": 1}, "type": "mail.send"}
    due = bridge.engine.now() + timedelta(minutes=9)
    door.store.parked.park(parked("h-1", framework="nobody", next_retry_at=due, reason="held by ann", **job))
    page.get_by_role("link", name="Waiting").click()
    waiting, holds = page.locator("#waiting li"), page.locator("#holds li")
    expect(waiting).to_have_count(7)
    page.locator("#waiting-filters [name=kind]").select_option("held")
    expect(waiting).to_have_count(1)
    expect(waiting.first).to_contain_text("Held")
    page.locator("#pause").click()
    asks, own = page.locator("#question"), page.locator("#question-fields")
    expect(own.get_by_label("Job type")).to_be_focused()
    page.keyboard.press("Enter")
    page.locator("#question-yes").click()
    expect(page.locator("#question-text")).to_contain_text(
        "type: a pause needs one of type, queue, error_type"
    )
    page.locator("#question-no").click()
    page.locator("#pause").click()
    own.get_by_label("Job type").fill(" mail.* ")
    own.get_by_label("Until").fill("2099-01-02T03:04")
    asks.get_by_label("Reason").fill(f"the bank is down {EVIL}")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Paused jobs at")
    expect(holds).to_have_count(1)
    who = bridge.audit.list(limit=1).records[0].who
    for told in ("type mail.*", "1 held", f"by {who}: the bank is down <img", "until 2099-01-02 03:04"):
        expect(holds.first).to_contain_text(told)
    [shown] = bridge.holds.list()
    assert (shown.hold.type, shown.hold.queue, shown.hold.error_type) == ("mail.*", None, None)
    engine_holds.write(door.store.documents, replace(shown.hold, since=due - timedelta(days=3, hours=1)))
    expect(holds.first).to_contain_text("still on after 3 d")
    expect(page.locator("#health")).to_contain_text("holds jobs of mail.*: still on after 3 d")
    holds.first.get_by_role("button", name="Resume…").focus()
    bridge.pause(queue="wait")
    expect(holds).to_have_count(2)
    expect(holds.first.get_by_role("button", name="Resume…")).to_be_focused()
    page.keyboard.press("Enter")
    own.get_by_label("Jobs a second").fill("50")
    page.locator("#question-yes").click()
    expect(page.locator("#told")).to_contain_text("Resumed jobs at")
    expect(holds).to_have_count(1)
    assert bridge.audit.list(limit=1).records[0].subject["rate"] == 50
    assert "owned" not in page.title()
    bridge.resume(queue="wait")
    expect(holds).to_have_count(0)
    bridge.operations.run(bridge.operations.begin("cancel"))


def figure(page: Page, title: str) -> Any:
    """Return a chart of the rates."""
    return page.locator("#rates figure").filter(has_text=re.compile(f"^{title}: "))


def test_rates(browser: Browser, tmp_path: Path) -> None:
    """Charts tell runs by outcome and type; a bar is read and opened; marks stand beside."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    store, now = bridge.store, bridge.engine.now()
    assert store is not None
    hour = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    empty = [0] * len(BOUNDS)
    told = {
        ("a.b", "completed"): 30,
        ("a.b", "retried"): 10,
        ("c", "dead_lettered"): 4,
        ("c", "recovered"): 1,
    }
    for (type_, outcome), count in told.items():
        record(store, [Rate(hour + timedelta(minutes=7), type_, "q", outcome, (count, *empty))])
    bridge.marks.add("v42", at=hour + timedelta(minutes=30))
    with listening(app_for(bridge, open_to_all=True)) as address:
        page = browser.new_page()
        page.goto(f"{address}#rates")
        expect(figure(page, "Succeeded").locator("b")).to_have_text("30")
        expect(figure(page, "Deaths").locator("b")).to_have_text("4")
        expect(figure(page, "Share of retries").locator("b")).to_have_text("at most 23 %")
        expect(figure(page, "Time to success.*").locator("b")).to_have_text("at most 5 ms")
        expect(figure(page, "Deaths").locator("u")).to_have_attribute("title", re.compile("v42"))
        assert page.locator("#rates-types tr").all_inner_texts() == [
            "a.b\t30\t10\t0\t0\t25 %", "c\t0\t0\t4\t0\t0 %",
        ]  # fmt: skip
        bar = figure(page, "Retries").locator("i").nth(-4)
        bar.hover()
        expect(figure(page, "Retries").locator("b")).to_have_text(re.compile("^10 from .*:00; v42, by .+$"))
        bar.click()
        expect(figure(page, "Retries").locator("i")).to_have_count(60)
        expect(figure(page, "Retries").locator("i").nth(7).locator("s.c0")).to_have_css(
            "height", re.compile("^1")
        )
        page.mouse.move(0, 0)
        page.reload()
        expect(figure(page, "Retries").locator("i")).to_have_count(60)
        page.locator("#rates-out").click()
        expect(figure(page, "Retries").locator("i")).to_have_count(25)
        page.get_by_role("button", name="c", exact=True).click()
        expect(figure(page, "Succeeded").locator("b")).to_have_text("0")
        assert "type=c" in page.url
        page.locator("#rates-filters [type=reset]").click()
        expect(figure(page, "Succeeded").locator("b")).to_have_text("30")
        page.mouse.move(0, 0)
        record(store, [Rate(now, "a.b", "q", "completed", (5, *empty))])
        expect(figure(page, "Succeeded").locator("b")).to_have_text("35")
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_the_dark(browser: Browser, door: Door, scheme: Any) -> None:
    """No text of a job makes the page wider than the screen; the page is dark in dark mode."""
    long = "w" * 250
    error = {"attempt": 1, "type": long, "message": long, "timestamp": "t"}
    message = {"args": [long]}
    door.store.letters.bury(
        letter(long[:180], type=long, queue=long, errors=(error,), reason=long, message=message)
    )
    phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    phone.goto(door.url)
    expect(phone.locator("#letters li").first).to_be_visible()
    expect(phone.locator("#bars i")).to_have_count(48)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    expect(phone.locator("#letters-filters [name=queue]")).to_be_hidden()
    phone.locator("#letters-filters .more-filters").click()
    expect(phone.locator("#letters-filters [name=queue]")).to_be_visible()
    phone.locator("#letters li").first.click()
    expect(phone.locator("#detail")).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    ground = phone.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in ground[4:-1].split(","))
    assert (brightness < 200) is (scheme == "dark")
    phone.close()
    Bridge(door.store).dead_letters.delete(long[:180])


def test_thousands(browser: Browser, door: Door, tmp_path: Path) -> None:
    """The list scrolls through all letters, and the keyboard still answers."""
    broker = door.environment["OJS_DEMO_VALKEY"]
    big = Door(f"{broker.removesuffix('/0')}/1", broker)
    for n in range(3_000):
        big.store.letters.bury(letter(f"j-{n}", discarded_at=letter().discarded_at - timedelta(seconds=n)))
    command = big.python(SERVE, str(big.port), "a-token-of-16-characters")
    server = started(command, env=big.environment, log=tmp_path / "log", cwd=ROOT)
    try:
        await_door(big)
        page = browser.new_page()
        page.goto(big.url)
        expect(page.locator("#token-dialog")).to_be_visible()
        page.locator("#token").fill("a-token-of-16-characters")
        page.keyboard.press("Enter")
        expect(page.locator("#letters-total")).to_have_text("3,000")
        page.evaluate(SCROLL)
        expect(page.locator("#letters-end")).to_have_text("3000 in all")
        rows(page).nth(2_998).focus()
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.dataset.id") == "j-2999"
        page.close()
    finally:
        server.terminate()
        server.wait(90)


def test_a_reader_and_a_wrong_token(browser: Browser, door: Door) -> None:
    """A refused token is told as one; a reader's page has no active button that writes, and says why."""
    now = Bridge(door.store).engine.now()
    door.store.letters.bury(letter("read", queue="read", framework="nobody"))
    door.store.parked.park(parked("later", next_retry_at=now + timedelta(hours=2)))
    bridge = Bridge(door.store)
    with listening(app_for(bridge, operator_token=OPERATOR, reader_token=READER)) as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.locator("#token")).to_be_focused()
        expect(page.locator("#token-refused")).to_be_hidden()
        page.keyboard.type("not a token of this server")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server refused this token.")).to_be_visible()
        page.keyboard.type(READER)
        page.keyboard.press("Enter")
        expect(page.locator("#reader")).to_be_visible()
        page.locator('li[data-id="read"]').focus()
        for key in ("r", "d", "x", "r", "d"):
            page.keyboard.press(key)
        expect(page.locator("#selected")).to_have_text("1 selected")
        expect(page.locator("#question")).to_be_hidden()
        expect(page.locator("#letters-actions button:enabled")).to_have_count(0)
        page.keyboard.press("Enter")
        expect(page.locator("#detail menu button:enabled")).to_have_text(["Close"])
        expect(page.locator("#detail")).to_contain_text("This token can only read.")
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Waiting").click()
        expect(page.locator("#waiting button:disabled")).to_have_count(3)
        page.evaluate(f"sessionStorage.setItem('ojs-bridge-token', '{OPERATOR}')")
        page.keyboard.press("g")
        expect(page.locator("#waiting button:enabled")).to_have_count(3)
        expect(page.locator("#reader")).to_be_hidden()
        page.close()
    bridge.retries.cancel("later")
    bridge.dead_letters.delete("read")


def test_who_did_what(browser: Browser, door: Door) -> None:
    """A question asks for the reason; the record has it, beside the name of the token. Filters choose."""
    for n in range(2):
        door.store.letters.bury(letter(f"why-{n}", queue="why", framework="celery"))
    bridge = Bridge(door.store)
    with listening(app_for(bridge, tokens=f"alice:operator:{OPERATOR}")) as address:
        page = browser.new_page()
        page.goto(address)
        page.locator("#token").fill(OPERATOR)
        page.keyboard.press("Enter")
        page.locator('li[data-id="why-0"]').click()
        page.locator("#detail").get_by_role("button", name="Delete").click()
        page.locator("#question").get_by_label("Reason").fill("ticket 12")
        page.locator("#question-yes").click()
        expect(page.locator("#question")).to_be_hidden()
        page.locator('li[data-id="why-1"] input').check()
        page.locator("#delete-selected").click()
        expect(page.get_by_label("Reason")).to_have_value("")
        page.get_by_label("Reason").fill(EVIL)
        page.keyboard.press("Enter")
        expect(page.locator("#question-yes")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator('li[data-id="why-1"]')).to_have_count(0)
        page.get_by_role("link", name="Who did what").click()
        records = page.locator("#audit li")
        expect(records.nth(0)).to_contain_text(EVIL)
        expect(records.nth(1)).to_contain_text("ticket 12")
        for n in (0, 1):
            expect(records.nth(n)).to_contain_text("alice")
            expect(records.nth(n)).to_contain_text("dead_letter.delete")
            expect(records.nth(n)).to_contain_text(f"why-{1 - n}")
        expect(records.nth(0)).to_contain_text("1 done")
        page.get_by_label("Action", exact=True).fill("nothing.*")
        expect(page.locator("#audit-end")).to_have_text("No record matches these filters.")
        page.reload()
        expect(page.get_by_label("Action", exact=True)).to_have_value("nothing.*")
        page.get_by_role("button", name="Clear").click()
        expect(records.nth(1)).to_contain_text("ticket 12")
        with bridge.audit.acting("bob"):
            bridge.dead_letters.purge(queue="why", confirm=True)
        expect(records.nth(0)).to_contain_text("bob")
        assert page.title() == "Dead letters"
        page.close()


def test_the_page_is_live(page: Page, door: Door) -> None:
    """New letters come and gone ones go, counts change, and the row that has the focus keeps it."""
    expect(page.locator("#letters-total")).not_to_be_empty()
    total = int(page.locator("#letters-total").inner_text())
    now = letter().discarded_at
    for n, name in enumerate(("stays", "goes")):
        door.store.letters.bury(letter(name, queue="live", discarded_at=now + timedelta(seconds=n)))
    page.locator("#letters-filters [name=queue]").fill("live")
    expect(rows(page)).to_have_count(2)
    page.locator('li[data-id="stays"]').focus()
    page.locator('li[data-id="stays"]').evaluate("row => { row.mark = 'the same'; }")
    door.store.letters.bury(letter("comes", queue="live", discarded_at=now + timedelta(seconds=2)))
    Bridge(door.store).dead_letters.delete("goes")
    expect(page.locator('li[data-id="goes"]')).to_have_count(0)
    expect(rows(page)).to_have_count(2)
    assert rows(page).first.get_attribute("data-id") == "comes"
    assert page.evaluate("document.activeElement.mark") == "the same"
    expect(page.locator("#letters-total")).to_have_text(str(total + 2))
    expect(page.locator("#letters-end")).to_have_text("2 in all")
    page.get_by_role("link", name="Waiting").click()
    expect(page.locator("#waiting-end")).to_have_text("Nothing waits.")
    bridge = Bridge(door.store)
    door.store.parked.park(parked("soon", next_retry_at=bridge.engine.now() + timedelta(hours=2)))
    expect(page.locator("#waiting li")).to_have_count(1)
    bridge.retries.cancel("soon")
    expect(page.locator("#waiting-end")).to_have_text("Nothing waits.")
    for name in ("stays", "comes"):
        bridge.dead_letters.delete(name)


def test_the_readers_place_stays(page: Page, door: Door) -> None:
    """A few new letters do not move the row that is read; for many the page offers to load again."""
    now = letter().discarded_at

    def bury(start: int, end: int) -> None:
        for n in range(start, end):
            door.store.letters.bury(
                letter(f"many-{n}", queue="many", discarded_at=now + timedelta(seconds=n))
            )

    bury(0, 40)
    page.locator("#letters-filters [name=queue]").fill("many")
    expect(rows(page)).to_have_count(40)
    rows(page).nth(35).focus()
    top = "document.activeElement.getBoundingClientRect().top"
    before = page.evaluate(top)
    bury(40, 45)
    expect(rows(page)).to_have_count(45)
    assert abs(page.evaluate(top) - before) < 1
    bury(45, 75)
    again = page.get_by_role("button", name="Many new dead letters")
    expect(again).to_be_visible()
    expect(rows(page)).to_have_count(45)
    assert abs(page.evaluate(top) - before) < 1
    again.click()
    expect(rows(page)).to_have_count(75)
    expect(again).to_be_hidden()
    Bridge(door.store).dead_letters.purge(queue="many", confirm=True)


def test_the_page_waits(browser: Browser, door: Door) -> None:
    """The page asks nothing while rows are selected, a dialog is open or it is paused; less after errors."""
    page = browser.new_page()
    page.clock.install()
    page.goto(door.url)
    expect(rows(page).first).to_be_visible()
    expect(page.locator("#bars i")).to_have_count(48)
    page.evaluate(COUNT)

    def asks(seconds: int) -> bool:
        before = page.evaluate("asked")
        page.clock.fast_forward(1000 * seconds)
        eventually(lambda: page.evaluate("asked === answered"))
        return bool(page.evaluate("asked") > before)

    live = page.locator("#live")
    eventually(lambda: asks(6))
    for key in ("x", "?"):
        rows(page).first.focus()
        page.keyboard.press(key)
        assert not asks(60)
        page.keyboard.press("x" if key == "x" else "Escape")
    live.click()
    expect(page.locator("#live-state")).to_have_text("Paused")
    assert not asks(60)
    with page.expect_response("**/stats"):
        live.click()
    expect(page.locator("#live-state")).to_have_text("Live")
    eventually(lambda: page.evaluate("asked === answered"))
    page.route("**/ojs/**", lambda route: route.abort())
    # What was asked before may be answered still.
    eventually(lambda: asks(6) and page.locator("#trouble").is_visible())
    expect(page.locator("#trouble")).to_contain_text("cannot be reached")
    away = re.compile(r"^Away since \d\d:\d\d:\d\d, last update \d\d:\d\d:\d\d$")
    expect(page.locator("#live-state")).to_have_text(away)
    assert not asks(6)
    eventually(lambda: asks(6))
    page.unroute("**/ojs/**")
    eventually(lambda: asks(60))
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#live-state")).to_have_text("Live")
    page.close()


def test_what_a_limit_has_deleted_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    """Before it deletes anything, the page says how full it is."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", retention=Retention(max_count=10))
    page = browser.new_page()
    with listening(app_for(Bridge(bridge.store), open_to_all=True)) as address:
        for count, told in (
            (2, "Dead letters are nearly as many as max_count (100 %): beyond it the largest groups"),
            (
                30,
                "max_count has deleted 28 dead letters in the last day: 28 of bad.deploy: external.timeout.",
            ),
        ):
            deploy(bridge, count)
            bridge.dead_letters.prune()
            page.goto(address)
            page.reload()
            expect(page.locator("#retention")).to_contain_text(told)
            expect(page.locator("#retention")).to_contain_text("so does Retention(archive=…)")
    page.close()


def test_what_became_of_a_replay_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    """Its jobs are sent, succeed or die again, and the letters of these are a click away."""
    bridge, _ = bridge_with_outbox(f"sqlite:///{tmp_path}/ojs.db")
    ids = bury_many(bridge, 5)
    outbox = bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, takes=9)
    bridge.operations.run(bridge.operations.begin("replay", ids=ids))
    for header in outbox.waits[:3]:
        outbox.work(header)
    page = browser.new_page()
    with listening(app_for(bridge, open_to_all=True)) as address:
        page.goto(address)
        row = page.locator("#operations li")
        expect(row).to_contain_text("Replay 5 selected: done 5 of 5 sent")
        expect(row).to_contain_text("1 succeeded, 2 not begun")
        row.get_by_role("button", name="2 died again").click()
        expect(row.get_by_role("link")).to_have_text(["j-002", "j-001"])
        row.get_by_role("link", name="j-001").click()
        expect(page.locator("#detail")).to_contain_text("j-001")
    page.close()


def test_what_is_away_or_dead_is_on_the_page(browser: Browser, tmp_path: Path) -> None:
    """The broker and since when, queues whose workers are dead, and what waits in the broker."""
    bridge, outbox = bridge_with_outbox(f"sqlite:///{tmp_path}/ojs.db")
    outbox.waiting, outbox.oldest_at = {"slow": 1200}, bridge.engine.now() - timedelta(minutes=5)
    worker(bridge, "a:1", FRAMEWORK, "fast")
    worker(bridge, "a:2", FRAMEWORK, "slow", ago=300)
    page = browser.new_page()
    page.clock.install()
    with listening(app_for(bridge, open_to_all=True)) as address:
        page.goto(address)
        wrong = page.locator("#health li")
        expect(wrong).to_have_count(2)
        expect(wrong.nth(0)).to_contain_text("workers degraded: 1 in the last 90 s")
        expect(wrong.nth(0)).to_contain_text("queue slow: none since 20")
        expect(wrong.nth(1)).to_contain_text("queue slow: 1200 wait, and no worker takes them")
        expect(page.locator("#backlog")).to_have_text("1,200 in the queues, the oldest due 5 min ago")
        outbox.raises = ConnectionError("down")
        page.clock.fast_forward(20_000)
        broker = page.locator("#health li", has_text="broker")
        expect(broker).to_have_text(re.compile(r"^broker away since \d\d:\d\d:\d\d: down$"))
        outbox.raises = None
        page.clock.fast_forward(20_000)
        expect(broker).to_have_count(0)
    page.close()


def test_a_store_that_is_away_is_told_once_and_takes_no_orders(browser: Browser) -> None:
    """One red box, one time, and no button that writes; all is well when the store is back."""
    page = browser.new_page()
    page.clock.install()
    with Valkey() as valkey:
        bridge, _ = bridge_with_outbox(valkey.url)
        assert bridge.store is not None
        bridge.store.letters.bury(letter("j-1", framework=FRAMEWORK))
        with listening(app_for(bridge, open_to_all=True)) as address:
            page.goto(address)
            expect(page.locator("#letters li")).to_have_count(1)
            orders = page.locator("#letters-actions button:enabled")
            expect(orders).not_to_have_count(0)
            valkey.kill()
            page.clock.fast_forward(20_000)
            expect(page.locator("#trouble")).to_contain_text("the store cannot be reached")
            expect(page.locator("#live-state")).to_have_text(re.compile(r"^Away since \d\d:\d\d:\d\d$"))
            expect(page.locator("#health li[data-name=store]")).to_have_count(0)
            expect(orders).to_have_count(0)
            valkey.start()
            page.clock.fast_forward(60_000)
            expect(page.locator("#trouble")).to_be_hidden()
            expect(orders).not_to_have_count(0)
    page.close()


def check_the_other_views(page: Page, check: Callable[[Page], None]) -> None:
    """Look at each view but the dead letters."""
    views = {"Groups": "#groups li", "Waiting": "#waiting li", "Rates": "#rates figure"}
    for view, shown in views.items():
        page.get_by_role("link", name=view).click()
        expect(page.locator(shown).last).to_be_visible()
        check(page)
        if view == "Waiting":
            page.locator("#waiting li time").click()
            expect(page.locator("#detail")).to_be_visible()
            check(page)
            page.keyboard.press("Escape")
            expect(page.locator("#holds li")).to_have_count(1)
            for button in page.locator("#pauses button:enabled").all():
                button.click()
                check(page)
                page.keyboard.press("Escape")
    page.get_by_role("link", name="Who did what").click()
    expect(page.locator("#audit li").first).to_contain_text("dead_letter.replay")
    check(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_the_page(browser: Browser, door: Door, scheme: Any) -> None:
    """No view and no dialog has anything that axe finds wrong, for operators and readers."""
    axe = Axe()
    # A retry that was cancelled never comes back, so each test has a job of its own.
    bridge, job = Bridge(door.store), f"seen-{scheme}"
    door.store.letters.bury(
        letter(job, queue="seen", framework="nobody", message={"args": [1], "kwargs": {}})
    )
    door.store.parked.park(parked(job, next_retry_at=bridge.engine.now() + timedelta(hours=2)))
    pause = bridge.pause("seen.*", reason="axe looks at it")

    def check(page: Page) -> None:
        found = axe.run(page)
        assert found.violations_count == 0, found.generate_report()

    with listening(app_for(bridge, operator_token=OPERATOR, reader_token=READER)) as address:
        for token in (OPERATOR, READER):
            page = browser.new_page(color_scheme=scheme)
            page.goto(address)
            expect(page.locator("#token")).to_be_focused()
            check(page)
            page.keyboard.type(token)
            page.keyboard.press("Enter")
            row = page.locator(f'li[data-id="{job}"]')
            row.locator("input").check()
            expect(page.locator("#bars i")).to_have_count(48)
            check(page)
            if token == OPERATOR:
                page.keyboard.press("d")
                check(page)
                page.locator("#question-no").click()
                page.locator("#replay-selected").click()
                page.locator("#question-yes").click()
                expect(page.locator("#trouble")).to_be_visible()
            row.click()
            if token == OPERATOR:
                page.locator("#changes summary").click()
                page.get_by_label("Arguments, a list").fill("[")
            check(page)
            page.keyboard.press("Escape")
            page.keyboard.press("?")
            check(page)
            page.keyboard.press("Escape")
            page.locator("#letters-filters [name=queue]").fill("none")
            expect(page.locator("#letters-end")).to_have_text("No dead letter matches these filters.")
            check(page)
            check_the_other_views(page, check)
            page.close()
    bridge.resume(id=pause.id)
    bridge.retries.cancel(job)
    bridge.dead_letters.delete(job)
