"""The fixture `ojs` of pytest, in a project of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent.parent

CELERY = """
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install, ojs_task

app = Celery("shop", broker="redis://127.0.0.1:1/0")
install(app, Bridge(), policies={})

@ojs_task(app, retry={"max_attempts": 3, "initial_interval": "PT1M"})
def sync_crm(account):
    raise ConnectionError

send = sync_crm.delay
"""

DRAMATIQ = """
import dramatiq
from dramatiq.brokers.redis import RedisBroker
from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install

broker = app = RedisBroker(url="redis://127.0.0.1:1/0")
install(broker, Bridge())
dramatiq.set_broker(broker)

@dramatiq.actor(ojs_retry={"max_attempts": 3, "initial_interval": "PT1M"})
def sync_crm(account):
    raise ConnectionError

send = sync_crm.send
"""

TEST = """
import pytest
import shop

def test_a_dead_crm(ojs):
    shop.send("acme")
    assert ojs.run().waits == [60, 120]

@pytest.mark.ojs(jitter=7)
def test_with_a_seed(ojs):
    shop.send("acme")
    assert ojs.run().waits != [60, 120]
"""

GIVEN = """
import pytest
import shop

@pytest.fixture
def ojs_app():
    return shop.app

def test_given(ojs):
    shop.send("acme")
    assert ojs.run().waits == [60, 120]
"""

UNUSED = """
import sys

def test_nothing_is_imported():
    assert not {"ojs_bridge", "celery", "dramatiq", "sqlalchemy", "pydantic"} & {*sys.modules}
"""

NOTHING = """
def test_there_is_no_app(ojs):
    pass
"""


def environment() -> dict[str, str]:
    """The variables of a process that finds the package here."""
    alone = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **alone, "PYTHONPATH": str(HERE)}


def pytest_in(folder: Path, **files: str) -> str:
    """Run pytest with the plugin in a folder of these files; return what it has printed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "ojs_bridge_pytest", "--strict-markers"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("shop", [CELERY, DRAMATIQ], ids=["celery", "dramatiq"])
def test_the_fixture_finds_the_app(tmp_path: Path, shop: str) -> None:
    said = pytest_in(tmp_path, shop=shop, test_found=TEST, test_given=GIVEN)
    assert "3 passed" in said, said


def test_it_costs_nothing_unless_it_is_asked_for_and_says_what_to_do(tmp_path: Path) -> None:
    said = pytest_in(tmp_path, test_first=UNUSED, test_second=NOTHING)
    assert "1 passed, 1 error" in said, said
    assert "import the module of your app or broker, or give it to virtual_time(...), or return it" in said
