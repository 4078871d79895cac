"""Servers for the tests that ask for one, started once per session."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import execnet
import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.workermanage import NodeManager

from ojs_bridge.store.sql.tables import metadata, versions
from tests.servers import Postgres, RabbitMQ, Valkey
from tests.servers.sharing import Kind, Lender, borrowed

#: Fixtures that start other processes.
PROCESSES = {"browser", "postgres", "rabbitmq", "valkey"}
#: Where the tests wait most. They come first, so that no single file of them is left at the end.
WAITING = (
    "tests/chaos/",
    "tests/contract/",
    "tests/on_celery/",
    "tests/on_dramatiq/",
    "tests/migration/test_migrating.py",
    "tests/engine/test_reservations.py",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_workers: list[int] = []
_lenders: list[Lender] = []
_running = threading.Event()

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("patient"), max_examples=20)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Have a termination tear the servers down as an interrupt does."""
    if config.getoption("--quick"):
        sys.addaudithook(skip_slow_test)
        settings.load_profile("quick")
    if hasattr(config, "workerinput"):
        for sent in SIGNALS:
            signal.signal(sent, interrupt_once)
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        NodeManager.EXIT_TIMEOUT = 20  # execnet itself gives up on a worker after 15 s


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make quick`, and of the second run of `make test`."""
    parser.addoption("--quick", action="store_true", help="run only the tests that start no other process")
    parser.addoption("--second-chance", action="store_true", help="name the tests that pass now")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that have failed among the others, and that pass one after the other."""
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    if passed and config.getoption("--second-chance"):
        terminalreporter.section(f"{len(passed)} needed a second chance", sep="!", yellow=True)
        for name in passed:
            terminalreporter.write_line(f"SECOND CHANCE {name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests that wait first; leave out, for `make quick`, those that start other processes."""
    items.sort(key=lambda item: not item.nodeid.startswith(WAITING))
    if config.getoption("--quick"):
        slow = [item for item in items if PROCESSES & set(getattr(item, "fixturenames", ()))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Take note that a test's fixtures are made, rather than that its module is imported."""
    with running():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """Take note that a test runs."""
    with running():
        return (yield)


@contextmanager
def running() -> Iterator[None]:
    """Have a test be skipped in here, rather than in the hooks of pytest, which could not bear it."""
    _running.set()
    try:
        yield
    finally:
        _running.clear()


def skip_slow_test(event: str, arguments: object) -> None:
    """Skip a test as it starts another process: a server, a worker, or another Python."""
    if event in {"os.fork", "subprocess.Popen"} and _running.is_set():
        pytest.skip("starts another process")


def interrupt_once(sent: int, frame: object) -> None:
    """Interrupt the tests, but never their teardown, as execnet would after 5 s."""
    for other in SIGNALS:
        signal.signal(other, lambda *_: None)
    raise KeyboardInterrupt


def pytest_configure_node(node: Any) -> None:
    """Lend the processes of `pytest -n` the servers that are slow to start."""
    if not node.config.getoption("--quick"):
        if not _lenders:
            _lenders.append(Lender({"Postgres": Postgres, "RabbitMQ": RabbitMQ}))
        node.workerinput["lender"] = _lenders[0].address


def pytest_unconfigure() -> None:
    """Stop the servers that were lent."""
    while _lenders:
        _lenders.pop().close()


def pytest_xdist_newgateway(gateway: execnet.Gateway) -> None:
    """Remember the workers of `pytest -n`."""
    _workers.append(gateway.remote_exec("import os; channel.send(os.getpid())").receive())


def pytest_keyboard_interrupt() -> None:
    """Have the workers tear their servers down at once; xdist would leave them at their tests for 5 s."""
    for pid in _workers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The log, without the lines of the heartbeats of earlier tests' bridges: they never end."""
    earlier = {thread.ident for thread in threading.enumerate() if thread.name == "ojs-heartbeat"}

    def of_this_test(record: logging.LogRecord) -> bool:
        return record.thread not in earlier

    caplog.handler.addFilter(of_this_test)
    yield caplog
    caplog.handler.removeFilter(of_this_test)


@pytest.fixture(autouse=True)
def memory_broker() -> Iterator[None]:
    """Empty Celery's broker in memory after a test: all apps of a process share its queues."""
    yield
    if (memory := sys.modules.get("kombu.transport.memory")) is not None:
        memory.Channel.queues.clear()


@pytest.fixture(autouse=True)
def shared_tasks() -> Iterator[None]:
    """Forget a test's Celery tasks: all apps that are finalized later in the process would get them, too."""
    state: Any = sys.modules.get("celery._state")
    before = set(state._on_app_finalizers) if state else set()
    yield
    if state:
        state._on_app_finalizers.intersection_update(before)


@pytest.fixture
def unique() -> str:
    """A short name that no other test uses, for queues, tables and keys."""
    return f"t{uuid4().hex[:10]}"


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory without a pyproject.toml, and no OJS_BRIDGE_* variables."""
    for name in [name for name in os.environ if name.startswith("OJS_BRIDGE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """The session's Valkey."""
    with Valkey() as server:
        yield server


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    """The URL of the session's Valkey, empty."""
    with redis.Redis.from_url(valkey.url) as client:
        client.flushall()
    return valkey.url


@pytest.fixture(scope="session")
def rabbitmq(pytestconfig: pytest.Config) -> Iterator[RabbitMQ]:
    """The session's RabbitMQ."""
    with shared(RabbitMQ, pytestconfig) as server:
        yield server


def shared(kind: type[Kind], config: pytest.Config) -> AbstractContextManager[Kind]:
    """Return a server of the session's own, or the one that the processes of `pytest -n` share."""
    lender = getattr(config, "workerinput", {}).get("lender")
    return borrowed(kind, lender) if lender else kind()


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitMQ) -> str:
    """The URL of the session's RabbitMQ, which tests share: name queues with `unique`."""
    return rabbitmq.url


@pytest.fixture(scope="session")
def postgres(pytestconfig: pytest.Config) -> Iterator[Postgres]:
    """The session's PostgreSQL."""
    with shared(Postgres, pytestconfig) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres, unique: str) -> Iterator[str]:
    """The URL of a fresh database in the session's PostgreSQL."""
    postgres.execute(f"CREATE DATABASE {unique}")
    yield postgres.url_of(unique)
    postgres.execute(f"DROP DATABASE {unique} WITH (FORCE)")


@pytest.fixture(scope="session")
def cleared_databases() -> list[str]:
    """The databases of the session's PostgreSQL that have the tables of a store, and nothing in them."""
    return []


@pytest.fixture
def postgres_store_url(postgres: Postgres, cleared_databases: list[str], unique: str) -> Iterator[str]:
    """The URL of an empty store in the session's PostgreSQL, in a fresh database or in one that is cleared.

    To clear a database takes a fifth of what it takes to make one.
    """
    name = cleared_databases.pop() if cleared_databases else unique
    if name == unique:
        postgres.execute(f"CREATE DATABASE {name}")
    yield postgres.url_of(name)
    if cleared := postgres.cleared(name, {*metadata.tables} - {versions.name}):
        cleared_databases.append(cleared)


def store_url(kind: str, request: pytest.FixtureRequest) -> str:
    """Return the URL of an empty store of a kind; a server is started when the first test asks for it."""
    if kind == "sqlite":
        folder: Path = request.getfixturevalue("tmp_path")
        return f"sqlite:///{folder}/ojs.db"
    served: str = request.getfixturevalue("postgres_store_url" if kind == "postgres" else f"{kind}_url")
    return served


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of either family."""
    return store_url(request.param, request)
