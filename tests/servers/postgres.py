"""A private PostgreSQL."""

import os
import pwd
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

import psycopg

from tests.servers.process import Server, ServerFailed, ServerMissing


class Postgres(Server):
    """PostgreSQL with its default durability, on a loopback port only."""

    stop_signal = signal.SIGINT  # a fast shutdown: open connections do not delay it

    @property
    def url(self) -> str:
        """The URL by which SQLAlchemy connects through psycopg."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """Return the URL by which SQLAlchemy connects to this database."""
        return f"postgresql+psycopg://ojs@127.0.0.1:{self.port}/{database}?connect_timeout=60"

    def execute(self, *statements: str, database: str = "postgres") -> None:
        """Run statements outside any transaction, such as CREATE DATABASE."""
        with psycopg.connect(_plain(self.url_of(database)), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def cleared(self, database: str, tables: Iterable[str]) -> str | None:
        """Empty these tables; return the new name of the database, or None if there are no such tables.

        The name is new for the sake of threads that go on with the old one.
        """
        name = f"t{uuid4().hex[:10]}"
        self.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'",
            f"ALTER DATABASE {database} RENAME TO {name}",
        )
        try:
            self.execute(*(f"DELETE FROM {table}" for table in tables), database=name)
        except psycopg.errors.UndefinedTable:
            self.execute(f"DROP DATABASE {name}")
            return None
        return name

    def _launch(self) -> None:
        programs = _programs()
        user = unprivileged_user()
        if user is not None:
            os.chown(self.folder, user, -1)
        data = self.folder / "data"
        if not data.exists():
            self._create(programs / "initdb", data, user)
        settings = (f"port={self.port}", "listen_addresses=127.0.0.1", "unix_socket_directories=")
        options = [word for setting in settings for word in ("-c", setting)]
        self._spawn([programs / "postgres", "-D", data, *options], user=user)

    def _create(self, initdb: Path, data: Path, user: int | None) -> None:
        options = ("-U", "ojs", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        command = (initdb, "-D", data, *options)
        done = subprocess.run(command, cwd=self.folder, user=user, capture_output=True, check=False)
        if done.returncode:
            raise ServerFailed(f"initdb failed\n{done.stderr.decode()}")

    def _answers(self) -> bool:
        try:
            psycopg.connect(_plain(self.url)).close()
        except psycopg.OperationalError:
            return False
        return True


def _plain(url: str) -> str:
    return url.replace("+psycopg", "", 1)


def _programs() -> Path:
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    found = debian[-1] if debian else shutil.which("postgres")
    if found is None:
        raise ServerMissing("PostgreSQL is missing: install Debian's package postgresql.")
    return Path(found).parent


def _version(program: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", program.parts[-3]))


def unprivileged_user() -> int | None:
    """Return the user that runs a server for root, whom it refuses to serve."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    raise ServerMissing("PostgreSQL does not run as root: add a user named postgres.")
