"""The private servers keep what they acknowledged and leave nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pika
import psycopg
import pytest
import redis

from tests.servers import (
    Postgres,
    RabbitMQ,
    Server,
    ServerFailed,
    ServerMissing,
    Valkey,
    eventually,
    free_port,
    ports,
    processes_in,
)

ROOT = Path(__file__).parents[2]


def without_a_trace(server: Server) -> bool:
    return not processes_in(server.folder) and not server.folder.exists()


def test_valkey_keeps_a_write_over_a_kill() -> None:
    with Valkey() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "kept")
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"kept"
    assert without_a_trace(server)


def test_rabbitmq_keeps_a_persistent_message_over_a_kill(unique: str) -> None:
    with RabbitMQ() as server:
        connection = pika.BlockingConnection(pika.URLParameters(server.url))
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(unique, durable=True)
        channel.basic_publish("", unique, b"kept", pika.BasicProperties(delivery_mode=2))
        server.await_declared(unique)
        server.kill()
        with pytest.raises(pika.exceptions.AMQPConnectionError):
            connection.process_data_events(5)
        server.start()
        with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
            assert connection.channel().basic_get(unique, auto_ack=True)[2] == b"kept"
    assert without_a_trace(server)


def test_postgres_keeps_a_committed_row_over_a_kill() -> None:
    with Postgres() as server:
        address = server.url.replace("+psycopg", "")
        with psycopg.connect(address) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        server.kill()
        server.start()
        with psycopg.connect(address) as connection:
            assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
    assert without_a_trace(server)


@pytest.mark.parametrize("kind", [Valkey, Postgres])
def test_restart_changes_the_process_and_keeps_the_port(kind: type[Server]) -> None:
    with kind() as server:
        port, pid = server.port, server.pid
        server.restart()
        assert server.port == port
        assert server.pid != pid


@pytest.mark.parametrize("kind", [Valkey, RabbitMQ, Postgres])
def test_dies_with_a_killed_owner(kind: type[Server]) -> None:
    code = (
        f"from tests.servers import {kind.__name__} as Kind\n"
        "with Kind() as server: print(server.folder, flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout
        folder = Path(owner.stdout.readline().strip())
        assert processes_in(folder)
        owner.kill()
    eventually(lambda: not processes_in(folder), seconds=30, what="the end of the orphan")
    shutil.rmtree(folder)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_pytest_closes_the_servers(sent: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "folder"
    os.mkfifo(told)
    test = tmp_path / "test_waits.py"
    test.write_text(
        "import pathlib, select, sys\n"
        "def test_waits(valkey):\n"
        f"    pathlib.Path({str(told)!r}).write_text(str(valkey.folder))\n"
        # Until the signal, or until we are interrupted ourselves. In short waits: a signal that comes on the
        # last step into a system call is seen only after it.
        "    while not select.select([sys.stdin], [], [], 0.1)[0]: pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-sq", "-p", "tests.conftest", "-c", os.devnull, str(test)]
    with subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=subprocess.DEVNULL) as owner:
        folder = Path(told.read_text())
        owner.send_signal(sent)
        assert owner.wait(90) == pytest.ExitCode.INTERRUPTED
    assert not processes_in(folder)
    assert not folder.exists()


@pytest.mark.parametrize("name", ["first", "second"])
def test_each_test_has_an_empty_valkey(valkey_url: str, name: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        assert client.dbsize() == 0
        client.set(name, "left behind")


@pytest.mark.parametrize("name", ["first", "second"])
def test_each_test_has_an_empty_database(postgres_url: str, name: str) -> None:
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        tables = connection.execute("SELECT 1 FROM pg_tables WHERE schemaname = 'public'").fetchall()
        assert tables == []
        connection.execute(b"CREATE TABLE %s ()" % name.encode())


def test_a_server_that_cannot_start_shows_its_log() -> None:
    with Valkey() as server:
        rival = Valkey()
        rival.port = server.port
        with pytest.raises(ServerFailed, match="Address already in use"):
            rival.start()
        rival.close()
    assert without_a_trace(rival)


def test_a_missing_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    server = RabbitMQ()
    with pytest.raises(ServerMissing, match="install Debian's package"):
        server.start()
    server.close()


def test_ports_differ() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == len(given)


def test_ports_differ_between_processes_as_long_as_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tests.servers import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout
        taken = int(other.stdout.readline())
        monkeypatch.setattr(ports, "_CANDIDATES", [taken])
        with pytest.raises(OSError, match="no loopback port is free"):
            free_port()
        other.kill()
    assert free_port() == taken
