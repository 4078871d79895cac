"""Private servers on free loopback ports, for tests and benchmarks."""

from tests.servers.pgbouncer import PgBouncer
from tests.servers.ports import free_port
from tests.servers.postgres import Postgres
from tests.servers.process import Server, ServerFailed, ServerMissing, eventually, processes_in
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ
from tests.servers.replicated import Cluster, Replicated, Watched, ask
from tests.servers.valkey import Valkey

__all__ = [
    "Cluster",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "RabbitMQ",
    "Replicated",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "Valkey",
    "Watched",
    "ask",
    "eventually",
    "free_port",
    "processes_in",
]
