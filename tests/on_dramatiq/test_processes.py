"""The real `dramatiq` command."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.on_dramatiq.application import COMMANDS, Application
from tests.on_dramatiq.conftest import url_of
from tests.servers import eventually

APP = "tests.on_dramatiq.app"


@pytest.fixture
def application(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> Application:
    """The application on the kind of broker that the test names."""
    return Application(url_of(request, request.param), unique, tmp_path, APP)


SENDING = """
    flaky.send("flaky")
    hopeless.send("hopeless")
    hopeless.send_with_options(args=("more",), ojs_retry={"max_attempts": 5, "on_exhaustion": "discard"})
    for word in ("discard", "dead", "snooze"):
        outspoken.send(word)
    endless.send("endless")
"""
EXPECTED = {"flaky": 3, "hopeless": 3, "more": 5, "discard": 1, "dead": 1, "snooze": 2, "endless": 1}
DEAD = {"hopeless": "builtins.OSError", "outspoken": "a.b", "endless": "timeout"}


@pytest.mark.parametrize("application", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("two", "two middlewares would retry every job: OJSRetries and tests.on_dramatiq.app.OtherRetries"),
        ("policy", "actor flaky: max_attempts: -1"),
    ],
)
def test_a_worker_that_is_set_up_wrongly_does_not_start(
    application: Application, fault: str, said: str
) -> None:
    """The command drops what a worker has written if it ends before the thread that reads it begins."""

    def says_so() -> bool:
        with application.working(fault=fault) as process:
            assert process.wait(90) != 0
        return said in application.log.read_text()

    eventually(says_so)


@pytest.mark.skipif(shutil.which("dramatiq-gevent", path=str(COMMANDS)) is None, reason="gevent is missing")
@pytest.mark.parametrize("application", ["redis"], indirect=True)
def test_gevent_workers(application: Application) -> None:
    with application.working(command="dramatiq-gevent", fresh=True) as process:
        application.produce(SENDING)
        eventually(lambda: application.counts() == EXPECTED and application.dead() == DEAD, seconds=30)
    assert process.returncode == 0
