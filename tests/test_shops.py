"""The web shops run as their READMEs say; all shops have tests of their own, as their users write them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.forking import ended
from tests.servers import eventually
from tests.shops import EXAMPLES, Shop
from tests.testing.test_plugin import pytest_in

pytest.importorskip("flask")
pytest.importorskip("fastapi")
pytest.importorskip("django_dramatiq")


@pytest.mark.parametrize(
    ("name", "order", "task", "app"),
    [
        ("django_shop", "/orders", "shop.tasks.charge", "shop"),
        ("django_dramatiq_shop", "/orders", "charge", "django_dramatiq.setup"),
        ("flask_shop", "/orders/{number}", "shop.charge", "shop"),
        ("fastapi_shop", "/orders/{number}?card={card}", "charge", "shop"),
    ],
)
def test_a_web_shop(name: str, order: str, task: str, app: str, valkey_url: str) -> None:
    """With real servers: each reads its settings in its own way, and so does the command line."""
    with Shop(name, valkey_url) as shop:
        shop.sells(order=order, task=task)
        if order == "/orders":
            eventually(lambda: shop.ask("/orders/1") == {"charged": True}, what="the charge")
            assert shop.ask("/orders/2") == {"charged": False}
        said = shop.run(f"ojs-bridge dead-letters list --json --app {app}")
        [letter] = map(json.loads, said.splitlines())
        assert letter["type"] == task


#: A bank that answers when the worker has been killed.
SLOW_BANK = """
import pathlib, time

class CardStolen(Exception): ...

def charge(order, card):
    print(f"asks the bank for order {order}", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
    print(f"charged order {order}", flush=True)
"""


@pytest.mark.parametrize(("name", "order"), [("django_shop", "/orders"), ("flask_shop", "/orders/1")])
def test_a_job_of_a_web_shop_outlives_its_worker(name: str, order: str, valkey_url: str) -> None:
    """Celery forgets a job before it runs, but for a setting of the shop."""
    shop = Shop(name, valkey_url)
    (shop.folder / "bank.py").write_text(SLOW_BANK)
    with shop:
        shop.ask(order, "card=good")
        eventually(lambda: "asks the bank" in shop.log(), seconds=40, what="the first run")
        shop.replace_worker()
        (shop.folder / "go").touch()
        counted = "attempt 1 of 5 failed with visibility_timeout"
        eventually(lambda: counted in shop.log(), seconds=60, what=counted)
        eventually(lambda: "charged order 1" in shop.log(), seconds=30, what="the second run")


@pytest.mark.parametrize(
    ("name", "variables", "tests"),
    [
        ("celery_shop", {}, 6),
        ("dramatiq_shop", {}, 6),
        # With its settings in a pyproject.toml, and with settings in variables and a file of policies.
        ("flask_shop", {}, 2),
        ("fastapi_shop", {"OJS_BRIDGE_POLICIES": "policies.toml"}, 4),
    ],
)
def test_the_tests_of_a_shop_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variables: dict[str, str], tests: int
) -> None:
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__", "*.db", "order-*"))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    said = pytest_in(folder)
    assert f"{tests} passed" in said, said


@pytest.mark.parametrize("name", ["django_shop", "django_dramatiq_shop"])
def test_the_tests_of_a_shop_on_django_pass(tmp_path: Path, name: str) -> None:
    """Django's own test runner runs them, within the transaction of its TestCase."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__", "*.db", "order-*"))
    environment = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    done = ended(["python", "manage.py", "test"], env=environment, cwd=folder)
    assert done.status == 0, done.err
    assert "Ran 2 tests" in done.err


def test_all_shops_have_the_same_bank() -> None:
    """The files that are not about a framework are the same."""
    names = ("django_shop", "django_dramatiq_shop", "flask_shop", "fastapi_shop")
    assert len({(EXAMPLES / name / "bank.py").read_text() for name in names}) == 1
