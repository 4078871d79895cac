"""Both example shops, with real workers, from the first order to the replay."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ojs_bridge import open_store
from ojs_bridge.store import Filter
from tests.forking import ended, started
from tests.servers import eventually

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKERS = {
    "celery_shop": ["celery", "-A", "shop", "worker", "--concurrency", "2"],
    "dramatiq_shop": ["dramatiq", "shop", "--processes", "1", "--threads", "4"],
}
DONE = ["charged order 1", "charged order 4", "sent the receipt of order 1 to ada@example.org"]
LOGGED = [
    "discarded: attempt 1 of 5 failed with payment.declined, and the handler said DISCARD",
    "discarded: attempt 1 of 8 failed with validation.address, and the handler said FAIL",
    "dead-lettered: attempt 1 of 5 failed with payment.card_stolen, and the handler said DEAD_LETTER",
    "retrying: attempt 1 of 5 failed with payment.busy; retry 1 in 1.000 s, as the handler asked",
    "snoozed: the handler asked for a pause of 1.000 s",
    "retrying: attempt 1 of 2 failed with external.unreachable; retry 1 in 0.",
    "dead-lettered: attempt 2 of 2 failed with external.unreachable, and no attempt is left",
]


@pytest.fixture(params=WORKERS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of an example, which may write into its folder."""
    folder = tmp_path / str(request.param)
    shutil.copytree(
        EXAMPLES / str(request.param), folder, ignore=shutil.ignore_patterns("__pycache__", "*.db")
    )
    return folder


@pytest.mark.requirement("DLQ-001", "DLQ-003")
def test_the_shop(shop: Path, valkey_url: str) -> None:
    """Every order ends as its policy says, and the CRM knows of an order after the replay."""
    environment = {**os.environ, "BROKER_URL": valkey_url, "PYTHONUNBUFFERED": "1"}
    crm_is_down = shop / "crm-is-down"
    crm_is_down.touch()
    store = open_store(f"sqlite:///{shop}/dead-letters.db")

    def letters() -> Counter[tuple[str, str]]:
        page = store.letters.list(Filter(), limit=100, cursor=None)
        return Counter((letter.type.removeprefix("shop."), letter.error_type) for letter in page.letters)

    stolen, unreachable = ("charge", "payment.card_stolen"), ("sync_crm", "external.unreachable")
    with working(shop, environment) as log:
        python(shop, environment, "place_orders.py")
        eventually(lambda: all(line in log() for line in (*DONE, *told(shop))), seconds=40, what="the orders")
        eventually(lambda: letters() == {stolen: 1, unreachable: 1}, seconds=20, what="the dead letters")
        eventually(lambda: log().count("PAGER: ") == 2, what="the pages")
        crm_is_down.unlink()
        said = python(shop, environment, "replay.py")
        assert said.count("failed with external.unreachable, and no attempt is left") == 1
        eventually(lambda: "the CRM knows order 1" in log(), seconds=20, what="the replay")
        assert letters() == {stolen: 1}
        assert [log().count(line) for line in DONE] == [1, 1, 1]


def told(shop: Path) -> list[str]:
    """Return the lines of the log for the orders; a Celery worker shows no line below WARNING by itself."""
    return [line for line in LOGGED if not line.startswith("snoozed") or shop.name == "dramatiq_shop"]


@contextmanager
def working(folder: Path, environment: dict[str, str]) -> Iterator[Callable[[], str]]:
    """Run the example's worker; yield a function that reads its log."""
    log = folder / "worker.log"
    worker = started(WORKERS[folder.name], env=environment, log=log, cwd=folder)
    try:
        yield log.read_text
    except BaseException:
        print(log.read_text())
        raise
    finally:
        worker.terminate()
        worker.wait(90)


def python(folder: Path, environment: dict[str, str], script: str) -> str:
    """Run one of the example's scripts; return its output."""
    done = ended(["python", script], env=environment, cwd=folder)
    assert done.status == 0, done.err
    return done.out


def test_both_shops_live_in_the_same_world() -> None:
    """The files that are not about a framework are the same."""
    for name in ("outside.py", "replay.py"):
        one, other = ((EXAMPLES / shop / name).read_text() for shop in WORKERS)
        assert one == other
