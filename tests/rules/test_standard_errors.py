"""The standard errors: real libraries raise them, at a real service or server, and each has its type."""

from __future__ import annotations

import asyncio
import http.client
import importlib
import json
import smtplib
import socket
import socketserver
import sqlite3
import ssl
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from ojs_bridge import standard_errors
from ojs_bridge.rules.failures import ErrorMap, Failure, name_of, outcome_of
from tests.answers import Service, answering
from tests.remote import remote
from tests.servers import Postgres, Valkey
from tests.servers.ports import free_port

aiohttp = pytest.importorskip("aiohttp")
asyncpg = pytest.importorskip("asyncpg")
botocore = pytest.importorskip("botocore")
grpc = pytest.importorskip("grpc")
httpx = pytest.importorskip("httpx")
psycopg = pytest.importorskip("psycopg")
psycopg2 = pytest.importorskip("psycopg2")
pymysql = pytest.importorskip("pymysql")
pymongo = pytest.importorskip("pymongo")
requests = pytest.importorskip("requests")
urllib3 = pytest.importorskip("urllib3")

pytest.importorskip("botocore.session")

STANDARD = ErrorMap(standard_errors())
#: Seconds that a caller waits for an answer.
PATIENCE = 0.3


def failure_of(raises: Callable[[], object]) -> Failure:
    """The failure that a call comes to."""
    try:
        raises()
    except BaseException as error:
        failure = outcome_of(error, STANDARD)
        assert isinstance(failure, Failure)
        return failure
    raise AssertionError("the call raised nothing")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with answering() as service:
        yield service


def by_requests(url: str) -> None:
    with requests.Session() as session:
        session.trust_env = False
        session.get(url, timeout=PATIENCE).raise_for_status()


def by_httpx(url: str) -> None:
    httpx.get(url, timeout=PATIENCE, trust_env=False).raise_for_status()


def by_urllib(url: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE) as answer:
        answer.read()


def by_aiohttp(url: str) -> None:
    async def call() -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=PATIENCE, sock_read=PATIENCE)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            answer.raise_for_status()
            await answer.read()

    asyncio.run(call())


def by_aiohttp_in_all(url: str) -> None:
    """With a time for the whole call, as is its default."""

    async def call() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as session:
            await session.get(url)

    asyncio.run(call())


def by_urllib3(url: str) -> None:
    with urllib3.PoolManager() as pool:
        pool.request("GET", url, timeout=PATIENCE, retries=False)


def by_urllib3_again(url: str) -> None:
    retries = urllib3.Retry(1, status_forcelist=[429, 503], respect_retry_after_header=False)
    with urllib3.PoolManager() as pool:
        pool.request("GET", url, timeout=PATIENCE, retries=retries)


def by_requests_again(url: str) -> None:
    retries = urllib3.Retry(1, status_forcelist=[429, 503], respect_retry_after_header=False)
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", requests.adapters.HTTPAdapter(max_retries=retries))
        session.get(url, timeout=PATIENCE)


def aws(name: str, url: str) -> Any:
    config = botocore.config.Config(
        read_timeout=PATIENCE, connect_timeout=PATIENCE, retries={"total_max_attempts": 1}, proxies={}
    )
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    session = botocore.session.get_session()
    return session.create_client(name, "eu-west-1", endpoint_url=url, config=config, **keys)


def by_botocore(url: str) -> None:
    aws("dynamodb", url).list_tables()


def by_s3(url: str) -> None:
    aws("s3", url).get_object(Bucket="bucket", Key="key")["Body"].read()


ALL = (by_requests, by_httpx, by_urllib, by_aiohttp, by_botocore)
POOLS = (by_urllib3, by_urllib3_again)
#: Statuses, and what they mean.
STATUSES = {
    400: "external.rejected", 401: "external.unauthorized", 403: "external.unauthorized",
    404: "external.rejected", 408: "external.timeout", 409: "external.conflict", 422: "external.rejected",
    425: "external.unavailable", 429: "external.rate_limited", 500: "external.unavailable",
    501: "external.rejected", 502: "external.unavailable", 503: "external.unavailable",
    504: "external.timeout",
}  # fmt: skip


@pytest.mark.parametrize("by", ALL)
def test_a_status_decides(service: Service, by: Callable[[str], None]) -> None:
    found = {status: failure_of(lambda: by(f"{service.url}/{status}")).type for status in STATUSES}  # noqa: B023
    assert found == STATUSES


@pytest.mark.parametrize("by", [*ALL, *POOLS])
def test_nobody_is_there(by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"http://127.0.0.1:{free_port()}")).type == "external.unreachable"


@pytest.mark.parametrize("by", [*ALL, *POOLS, by_aiohttp_in_all])
def test_the_answer_takes_too_long(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"{service.url}/slow")).type == "external.timeout"


@pytest.mark.parametrize("by", ALL)
def test_the_answer_stops_in_the_middle(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"{service.url}/stalled")).type == "external.timeout"


@pytest.mark.parametrize("by", [by_requests, by_httpx, by_urllib, by_aiohttp, by_s3])
def test_the_connection_is_cut(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"{service.url}/cut")).type == "external.unreachable"


@pytest.mark.parametrize("by", [*ALL, *POOLS])
def test_the_connection_ends_without_an_answer(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"{service.url}/none")).type == "external.unreachable"


@pytest.mark.parametrize("by", [*ALL, *POOLS])
def test_it_speaks_no_tls(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"https://127.0.0.1:{service.port}")).type == "external.unreachable"


@pytest.mark.parametrize("by", [by_urllib3_again, by_requests_again])
def test_a_status_that_came_too_often(service: Service, by: Callable[[str], None]) -> None:
    assert failure_of(lambda: by(f"{service.url}/503")).type == "external.unavailable"
    assert failure_of(lambda: by(f"{service.url}/429")).type == "external.rate_limited"


def test_what_is_the_callers_own_mistake_keeps_its_name(service: Service) -> None:
    assert failure_of(lambda: requests.get("no-url")).type == "requests.exceptions.MissingSchema"
    assert failure_of(lambda: httpx.get("ftp://a")).type == "httpx.UnsupportedProtocol"
    assert failure_of(lambda: open("/no/such/file")).type == "builtins.FileNotFoundError"  # noqa: PTH123, SIM115
    assert failure_of(lambda: requests.get(f"{service.url}/200").json()["no"]).type == "builtins.KeyError"


# the code of AWS -> its status, and the type
AWS = {
    "ThrottlingException": (400, "external.rate_limited"),
    "ProvisionedThroughputExceededException": (400, "external.rate_limited"),
    "TransactionConflictException": (400, "external.conflict"),
    "AccessDeniedException": (400, "external.unauthorized"),
    "ValidationException": (400, "external.rejected"),
    "InternalServerError": (500, "external.unavailable"),
}


@pytest.mark.parametrize("code", AWS)
def test_the_codes_of_aws(service: Service, code: str) -> None:
    status, error_type = AWS[code]
    service.body = json.dumps({"__type": f"com.amazonaws.dynamodb.v20120810#{code}"})
    assert failure_of(lambda: by_botocore(f"{service.url}/{status}")).type == error_type


def test_sockets(service: Service) -> None:
    closed = ("127.0.0.1", free_port())
    assert failure_of(lambda: socket.create_connection(closed)).type == "external.unreachable"
    assert failure_of(lambda: socket.getaddrinfo("127.0.0.1", "no such port")).type == "external.unreachable"
    with socket.create_connection(("127.0.0.1", service.port), timeout=0.1) as connection:
        assert failure_of(lambda: connection.recv(1)).type == "external.timeout"
        context = ssl.create_default_context()
        tls = failure_of(lambda: context.wrap_socket(connection, server_hostname="localhost"))
    assert tls.type == "external.unreachable"
    assert failure_of(lambda: raised(OSError(113, "No route to host"))).type == "external.unreachable"
    assert failure_of(lambda: raised(OSError(28, "No space left"))).type == "builtins.OSError"


def raised(error: BaseException) -> None:
    raise error


def test_times_that_python_itself_keeps() -> None:
    async def late() -> None:
        await asyncio.wait_for(asyncio.sleep(5), 0.01)

    assert failure_of(lambda: asyncio.run(late())).type == "external.timeout"
    assert failure_of(lambda: futures.Future[None]().result(0.01)).type == "external.timeout"


def test_a_cut_answer_by_http_client(service: Service) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=5)
    connection.request("GET", "/cut")
    with connection.getresponse() as answer:
        assert failure_of(answer.read).type == "external.unreachable"


# what a mail server replies to which command -> the type
MAIL = {
    "421 busy": ("", "external.unavailable"),
    "554 go away": ("", "external.rejected"),
    "450 later": ("MAIL", "external.unavailable"),
    "550 no": ("MAIL", "external.rejected"),
    "451 later": ("RCPT", "external.unavailable"),
    "551 no": ("RCPT", "external.rejected"),
    "530 log in": ("RCPT", "external.unauthorized"),
    "452 full": ("DATA", "external.unavailable"),
    "535 wrong": ("AUTH", "external.unauthorized"),
    "": ("MAIL", "external.unreachable"),
}


@contextmanager
def mail_server(command: str, reply: str) -> Iterator[int]:
    """A mail server that says yes to all but one command."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("" if command else reply, "220 ready")
            for line in self.rfile:
                said = line.decode().upper()
                if command and said.startswith(command):
                    self.wfile.write(f"{reply}\r\n".encode() if reply else b"")
                    if not reply:
                        return
                else:
                    replies = {"EHLO": "250-here\r\n250 AUTH PLAIN", "DATA": "354 go on", "QUIT": "221 bye"}
                    self.say(replies.get(said[:4], "250 ok"))

        def say(self, *replies: str) -> None:
            self.wfile.write(f"{next(filter(None, replies))}\r\n".encode())

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@pytest.mark.parametrize("reply", MAIL)
def test_mail(reply: str) -> None:
    command, error_type = MAIL[reply]

    def send() -> None:
        with smtplib.SMTP("127.0.0.1", port, timeout=5) as client:
            if command == "AUTH":
                client.login("u", "p")
            client.sendmail("a@example.org", ["b@example.org"], "hello")

    with mail_server(command, reply) as port:
        assert failure_of(send).type == error_type


def test_a_locked_sqlite(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as one:
        one.execute("CREATE TABLE t (a)")
        one.execute("BEGIN IMMEDIATE")
        two = sqlite3.connect(tmp_path / "a.db", timeout=0)
        assert failure_of(lambda: two.execute("INSERT INTO t VALUES (1)")).type == "database.conflict"
        assert failure_of(lambda: two.execute("no SQL")).type == "sqlite3.OperationalError"
        engine = sa.create_engine(f"sqlite:///{tmp_path}/a.db", connect_args={"timeout": 0})
        with engine.connect() as three:
            insert = sa.text("INSERT INTO t VALUES (1)")
            assert failure_of(lambda: three.execute(insert)).type == "database.conflict"
        two.close()


DJANGO = """
    import sqlite3, sys
    import django
    from django.conf import settings
    from django.db import connection
    from ojs_bridge import standard_errors
    from ojs_bridge.rules.failures import ErrorMap, outcome_of
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1], "OPTIONS": {"timeout": 0}}
    settings.configure(DATABASES={"default": database})
    django.setup()
    other = sqlite3.connect(sys.argv[1])
    other.execute("CREATE TABLE t (a)")
    other.execute("BEGIN IMMEDIATE")
    for statement in ("INSERT INTO t VALUES (1)", "SELECT 1 FROM nothing"):
        try:
            connection.cursor().execute(statement)
        except Exception as error:
            print(outcome_of(error, ErrorMap(standard_errors())).type)
"""


def test_django_has_the_error_of_its_driver(tmp_path: Path) -> None:
    """In a process of its own, because the settings of Django are a process's."""
    pytest.importorskip("django")
    found = printed(DJANGO, str(tmp_path / "a.db"))
    assert found == ["database.conflict", "django.db.utils.OperationalError"]


def printed(program: str, *words: str) -> list[str]:
    """The lines that a program prints."""
    command = [sys.executable, "-c", textwrap.dedent(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Database:
    """A PostgreSQL by a driver, or by SQLAlchemy on a driver."""

    def __init__(self, url: str, by: str) -> None:
        self.driver, _, self.above = by.partition(" in ")
        self.url = sa.make_url(url).set(drivername=f"postgresql+{self.driver}")

    def connect(self) -> Any:
        if self.above:
            return sa.create_engine(self.url, poolclass=sa.NullPool).connect()
        module = {"psycopg": psycopg, "psycopg2": psycopg2}[self.driver]
        url = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        return closing(module.connect(url))

    def run(self, connection: Any, text: str) -> Any:
        if self.above:
            return connection.execute(sa.text(text))
        cursor = connection.cursor()
        cursor.execute(text)
        return cursor


@pytest.fixture(params=["psycopg", "psycopg2", "psycopg in SQLAlchemy", "psycopg2 in SQLAlchemy"])
def database(request: pytest.FixtureRequest, postgres_url: str) -> Database:
    return Database(postgres_url, request.param)


def test_postgresql(database: Database, postgres: Postgres) -> None:
    def failing(connection: Any, text: str) -> str:
        found = failure_of(lambda: database.run(connection, text)).type
        connection.rollback()
        return found

    with database.connect() as one, database.connect() as two:
        database.run(one, "CREATE TABLE t (a int primary key)")
        database.run(one, "INSERT INTO t VALUES (1), (2)")
        one.commit()
        database.run(one, "UPDATE t SET a = a WHERE a = 1")
        assert failing(two, "SELECT a FROM t FOR UPDATE NOWAIT") == "database.conflict"
        database.run(two, "SET statement_timeout = 50")
        assert failing(two, "SELECT pg_sleep(5)") == "database.timeout"
        one.rollback()
        for n, connection in enumerate((one, two), 3):
            database.run(connection, "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            database.run(connection, "SELECT sum(a) FROM t")
            database.run(connection, f"INSERT INTO t VALUES ({n})")
        one.commit()
        assert failing(two, "INSERT INTO t VALUES (9)") == "database.conflict"
        room = "sqlalchemy.exc." if database.above else f"{database.driver}.errors."
        names = (
            ("IntegrityError", "ProgrammingError")
            if database.above
            else ("UniqueViolation", "UndefinedTable")
        )
        assert failing(two, "INSERT INTO t VALUES (1)") == room + names[0]
        assert failing(two, "SELECT 1 FROM nothing") == room + names[1]
        pid = database.run(one, "SELECT pg_backend_pid()").fetchone()[0]
        postgres.execute(f"SELECT pg_terminate_backend({pid})")
        assert failure_of(lambda: database.run(one, "SELECT 1")).type == "database.unavailable"
        if database.above:
            one.invalidate()


def test_no_postgresql_is_there(database: Database) -> None:
    database.url = database.url.set(port=free_port())
    assert failure_of(database.connect).type == "database.unavailable"


def test_postgresql_by_asyncpg(postgres_url: str) -> None:
    async def main() -> list[str]:
        found = []
        connection = await asyncpg.connect(postgres_url.replace("+psycopg", "").partition("?")[0])
        for text in (
            "SELECT pg_sleep(5)",
            "SELECT 1 FROM nothing",
            "SELECT pg_terminate_backend(pg_backend_pid())",
        ):
            await connection.execute("SET statement_timeout = 50")
            try:
                await connection.execute(text)
            except Exception as error:
                found.append(outcome_of(error, STANDARD))
        return [failure.type for failure in found if isinstance(failure, Failure)]

    names = ["database.timeout", "asyncpg.exceptions.UndefinedTableError", "database.unavailable"]
    assert asyncio.run(main()) == names


def test_mysql() -> None:
    """No server of it is here: but for the first error they are made by hand."""
    away = failure_of(lambda: pymysql.connect(host="127.0.0.1", port=free_port()))
    assert away.type == "database.unavailable"
    codes = {1213: "database.conflict", 1205: "database.conflict", 2013: "database.unavailable"}
    codes |= {1045: "database.unauthorized", 3024: "database.timeout", 1364: "pymysql.err.OperationalError"}
    kind = pymysql.err.OperationalError
    assert {code: failure_of(lambda: raised(kind(code, "no"))).type for code in codes} == codes  # noqa: B023


def test_a_pool_of_sqlalchemy_is_empty(postgres_url: str) -> None:
    engine = sa.create_engine(postgres_url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    with engine.connect():
        assert failure_of(engine.connect).type == "database.timeout"
    engine.dispose()


def test_redis(valkey: Valkey) -> None:
    with redis.Redis.from_url(valkey.url, socket_timeout=0.2) as client:
        assert failure_of(lambda: client.blpop("nothing", 5)).type == "database.timeout"
        with client.pipeline() as pipe:
            pipe.watch("seen")
            client.set("seen", 1)
            pipe.multi()
            pipe.get("seen")
            assert failure_of(pipe.execute).type == "database.conflict"
        assert failure_of(lambda: client.lpop("seen")).type == "redis.exceptions.ResponseError"
        client.acl_setuser("reader", enabled=True, passwords=["+word"], commands=["+ping"])
    port = valkey.port
    with redis.Redis(port=port, username="reader", password="word") as reader:
        assert failure_of(lambda: reader.get("seen")).type == "database.unauthorized"
    with redis.Redis(port=port, username="reader", password="wrong") as reader:
        assert failure_of(reader.ping).type == "database.unauthorized"
    with redis.Redis(port=free_port(), retry=None) as away:
        assert failure_of(away.ping).type == "database.unavailable"


def test_mongodb() -> None:
    client = pymongo.MongoClient(port=free_port(), serverSelectionTimeoutMS=100)
    assert failure_of(lambda: client.admin.command("ping")).type == "database.unavailable"
    client.close()
    codes = {112: "database.conflict", 18: "database.unauthorized", 50: "database.timeout"}
    codes |= {11600: "database.unavailable", 11000: "pymongo.errors.OperationFailure"}
    failure = pymongo.errors.OperationFailure
    assert {code: failure_of(lambda: raised(failure("no", code))).type for code in codes} == codes  # noqa: B023


# the code of gRPC -> the type; one without a type keeps the name of its class
GRPC = {
    "DEADLINE_EXCEEDED": "external.timeout", "UNAVAILABLE": "external.unavailable",
    "RESOURCE_EXHAUSTED": "external.rate_limited", "PERMISSION_DENIED": "external.unauthorized",
    "UNAUTHENTICATED": "external.unauthorized", "ABORTED": "external.conflict",
    "NOT_FOUND": "external.rejected", "INVALID_ARGUMENT": "external.rejected",
    "INTERNAL": "external.unavailable",
    "CANCELLED": "grpc._channel._InactiveRpcError",
}  # fmt: skip


def test_grpc() -> None:
    with remote() as (port, asked), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/shop.Shop/Buy")
        found = {}
        for code in GRPC:
            asked["code"] = grpc.StatusCode[code]
            found[code] = failure_of(lambda: call(b"", timeout=10)).type
        assert found == GRPC
        asked["code"] = None
        assert failure_of(lambda: call(b"", timeout=PATIENCE)).type == "external.timeout"
        asynchronous = failure_of(lambda: asyncio.run(call_later(port)))
    assert asynchronous.type == "external.unavailable"


async def call_later(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{free_port()}") as channel:
        await channel.unary_unary("/shop.Shop/Buy")(b"", timeout=10)


def test_each_standard_error_is_a_class_of_its_library() -> None:
    """By its own name: nothing else is known of a class that no module has under another name."""
    missing = []
    # The client of MySQL whose source needs a compiler.
    for name in standard_errors().keys() - {"MySQLdb.OperationalError"}:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module or "builtins"), attribute, None)
        is_it = isinstance(found, type) and name_of(found).removeprefix("builtins.") == name
        if not (is_it or found in (TimeoutError, ConnectionError)):
            missing.append(name)
    assert missing == []


def test_nothing_is_imported() -> None:
    """Neither by the map, nor by an error that it covers."""
    program = """
        import sys
        from ojs_bridge import Bridge, standard_errors
        bridge = Bridge(errors=standard_errors() | {KeyError: "a.b"})
        assert bridge.engine.task().errors.find(TimeoutError())[0] == ("external.timeout", "RETRY")
        web = ["requests", "httpx", "aiohttp", "urllib3", "botocore", "grpc", "django", "dramatiq", "celery"]
        print([name for name in [*web, "redis", "psycopg", "pymongo", "sqlalchemy"] if name in sys.modules])
    """
    assert printed(program) == ["[]"]


class Hostile(Exception):
    """Each attribute that the standard errors read raises, or lies."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("args", "__class__", "__traceback__", "__dict__"):
            return super().__getattribute__(name)
        raise SystemExit(name)


class Lying(Exception):
    """Whatever is read is no value that its library has."""

    def __getattr__(self, name: str) -> Any:
        return [self, 7, "x", b"\xff", None, object][len(name) % 6]


@pytest.mark.parametrize("kind", [Hostile, Lying])
@pytest.mark.parametrize("name", [name for name, entry in standard_errors().items() if callable(entry)])
def test_an_error_that_fights_back_loses_no_job(kind: type[Exception], name: str) -> None:
    errors = ErrorMap({kind: standard_errors()[name], Exception: "any.error"})
    failure = outcome_of(kind("hello"), errors)
    assert isinstance(failure, Failure)
    assert failure.type.split(".")[0] in ("any", "external", "database")


def test_an_error_that_stands_within_itself() -> None:
    error = urllib.error.URLError("x")
    error.reason = error  # type: ignore[assignment]
    failure = outcome_of(error, STANDARD)
    assert isinstance(failure, Failure)
    assert failure.type == "external.unreachable"


def test_the_cause_of_another_error_is_not_asked() -> None:
    class OrderFailed(Exception):
        pass

    error = OrderFailed("no")
    error.__cause__ = TimeoutError()
    failure = outcome_of(error, STANDARD)
    assert isinstance(failure, Failure)
    assert failure.type.endswith("OrderFailed")
