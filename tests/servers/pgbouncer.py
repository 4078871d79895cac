"""A private PgBouncer, which gives a session of PostgreSQL to another client for each transaction."""

import shutil
import socket
from pathlib import Path

from tests.servers.postgres import Postgres, unprivileged_user
from tests.servers.process import Server, ServerMissing

CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={target} user=ojs
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {sessions}
max_client_conn = 500
"""


class PgBouncer(Server):
    """A pool of few sessions in a PostgreSQL: all databases, transaction pooling, on a loopback port only."""

    def __init__(self, postgres: Postgres, *, sessions: int = 3) -> None:
        super().__init__()
        self._postgres, self._sessions = postgres, sessions

    @property
    def url(self) -> str:
        """The URL by which SQLAlchemy connects through psycopg."""
        return self.to(self._postgres.url)

    def to(self, url: str) -> str:
        """Return the URL of a database of that PostgreSQL that leads through the pool."""
        return url.replace(f"127.0.0.1:{self._postgres.port}", f"127.0.0.1:{self.port}")

    def _launch(self) -> None:
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            raise ServerMissing("PgBouncer is missing: install Debian's package pgbouncer.")
        settings = {"target": self._postgres.port, "port": self.port, "sessions": self._sessions}
        (self.folder / "pgbouncer.ini").write_text(CONFIGURATION.format(**settings))
        self.folder.chmod(0o755)
        self._spawn([Path(program), self.folder / "pgbouncer.ini"], user=unprivileged_user())

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True
