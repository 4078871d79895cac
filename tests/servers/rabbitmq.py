"""A private RabbitMQ node with an Erlang port mapper of its own."""

import os
import re
import shutil
import socket
from pathlib import Path

import pika
from pika.exceptions import AMQPError

from tests.servers.ports import free_port
from tests.servers.process import Server, ServerMissing, eventually

_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30
_SCRIPTS = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"


def _memory() -> Path | None:
    """Return a folder whose files are in memory, if there is room."""
    usable = _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK | os.X_OK)
    return _MEMORY if usable and shutil.disk_usage(_MEMORY).free > _ROOM else None


class RabbitMQ(Server):
    """RabbitMQ that shares neither node, cookie, port mapper nor folder with the system's.

    Options are settings of its Erlang application, a text as Erlang writes it.
    """

    # Its queues stand still with its disk, and a test could not tell that from a retry that comes late.
    place = _memory()

    def __init__(self, **options: int | str) -> None:
        super().__init__()
        self._options = options
        self._mapper_port = free_port()
        self._node_port = free_port()
        self._node = f"ojs{self.port}@localhost"

    @property
    def url(self) -> str:
        """The URL by which AMQP clients connect; the virtual host is the default one."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def close(self) -> None:
        """Kill the server and remove its data; a good order would take seconds, for the data's sake alone."""
        self.kill()
        super().close()

    def await_declared(self, queue: str) -> None:
        """Return when a kill would keep this durable queue, up to 2 s after its declaration is confirmed."""
        tables = self.folder / "mnesia" / self._node
        eventually(lambda: _is_committed(queue.encode(), tables), what=f"the declaration of {queue} on disk")

    def _launch(self) -> None:
        script, mapper = _script(), _mapper()
        if not (self.folder / "home").exists():
            _make_home(self.folder / "home", script.parents[1])
        options = {"disk_free_limit": 1_000_000, **self._options}
        terms = ", ".join(f"{{{name}, {value}}}" for name, value in options.items())
        # Not in the newer format, which takes the start a second to translate.
        (self.folder / "rabbitmq.config").write_text(f"[{{rabbit, [{terms}]}}].\n")
        (self.folder / "enabled_plugins").write_text("[].\n")
        environment = self._environment()
        # Ours and in the foreground, so that it ends with the server; Erlang's would stay as a daemon.
        self._spawn([mapper], env=environment)
        eventually(lambda: _listens(self._mapper_port), what="an answer of the Erlang port mapper")
        self._spawn([script], env=environment)

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            # Every Erlang of the start-up reads these, the short-lived ones too.
            "ERL_AFLAGS": "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.config"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "rabbitmq-env.conf"),
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SCRIPTS_DIR": str(folder / "home" / "sbin"),
            # Many servers on few cores: a start takes a fifth less of them when it uses one.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1",
            # Then the script becomes the server, and needs no signal passed on.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def _answers(self) -> bool:
        if not _listens(self.port):  # far cheaper to ask than through a client
            return False
        try:
            pika.BlockingConnection(pika.URLParameters(self.url)).close()
        except (AMQPError, OSError):
            return False
        return True


def _is_committed(queue: bytes, tables: Path) -> bool:
    # RabbitMQ syncs the declaration, yet a restart drops it unless the log also says "committed".
    # From 4.3 on there is no such log, and a confirmed declaration is kept.
    if not (tables / "LATEST.LOG").exists():
        return True
    log = (tables / "LATEST.LOG").read_bytes()
    dumped = any(queue in table.read_bytes() for table in tables.glob("rabbit_durable_queue.DC?"))
    return dumped or (queue in log and b"committed" in log[log.rindex(queue) :])


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _make_home(home: Path, installed: Path) -> None:
    """Link what RabbitMQ itself needs; among fifty plugins Erlang takes twice as long to find its modules."""
    (home / "plugins").mkdir(parents=True)
    (home / "sbin").symlink_to(installed / "sbin")
    there = {path.name.partition("-")[0]: path for path in (installed / "plugins").iterdir()}
    wanted, linked = ["rabbit"], set()
    while wanted:
        name = wanted.pop()
        if name in there and name not in linked:
            linked.add(name)
            (home / "plugins" / there[name].name).symlink_to(there[name])
            text = (there[name] / "ebin" / f"{name}.app").read_text()
            wanted += re.findall(r"\w+", text.partition("{applications,")[2].partition("]")[0])


def _script() -> Path:
    found = sorted(Path("/").glob(_SCRIPTS))
    if not found:
        raise ServerMissing("RabbitMQ is missing: install Debian's package rabbitmq-server.")
    return found[-1]


def _mapper() -> str:
    found = shutil.which("epmd")
    if found is None:
        raise ServerMissing("Erlang's epmd is missing: install Debian's package erlang-base.")
    return found
