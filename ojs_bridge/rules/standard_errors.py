"""The standard errors: types for the errors that well-known libraries raise, by the names of their classes.

No library is imported. Where the class of an error does not say enough, the error is asked for a value, such
as the status of an answer.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from .failures import SNOOZE, Entry, ErrorMap, Mapped
from .hints import FORBIDDEN, RETRY_AFTER, TOO_MANY, has_spent, header_of, read, status_of

TIMEOUT, UNREACHABLE, UNAVAILABLE = "external.timeout", "external.unreachable", "external.unavailable"
LIMITED, UNAUTHORIZED = "external.rate_limited", "external.unauthorized"
CONFLICT, REJECTED = "external.conflict", "external.rejected"
DB_TIMEOUT, DB_UNAVAILABLE = "database.timeout", "database.unavailable"
DB_CONFLICT, DB_UNAUTHORIZED = "database.conflict", "database.unauthorized"
LOCAL = "local.rate_limited"


def _types(words: dict[str, str]) -> dict[str, str]:
    """Return the type of each word among the words of a type."""
    return {word: error_type for error_type, said in words.items() for word in said.split()}


#: HTTP statuses (RFC 9110, RFC 6585). Any other 4xx is a rejection, any other 5xx means unavailable.
STATUSES = _types({
    UNAUTHORIZED: "401 403 407", TIMEOUT: "408 504", CONFLICT: "409 412 423", UNAVAILABLE: "425",
    LIMITED: "429", REJECTED: "501 505",
})  # fmt: skip
#: The codes of gRPC. OK and CANCELLED have no type.
GRPC = _types({
    TIMEOUT: "DEADLINE_EXCEEDED",
    LIMITED: "RESOURCE_EXHAUSTED",
    CONFLICT: "ABORTED",
    UNAVAILABLE: "UNAVAILABLE INTERNAL UNKNOWN DATA_LOSS",
    UNAUTHORIZED: "UNAUTHENTICATED PERMISSION_DENIED",
    REJECTED: "INVALID_ARGUMENT NOT_FOUND ALREADY_EXISTS FAILED_PRECONDITION OUT_OF_RANGE UNIMPLEMENTED",
})  # fmt: skip
#: The codes of AWS that say more than the status beside them; the limits are those of botocore's own retries.
AWS = _types({
    LIMITED: """Throttling ThrottlingException ThrottledException RequestThrottledException RequestThrottled
        TooManyRequestsException ProvisionedThroughputExceededException RequestLimitExceeded SlowDown
        BandwidthLimitExceeded LimitExceededException PriorRequestNotComplete EC2ThrottledException""",
    TIMEOUT: "RequestTimeout RequestTimeoutException",
    CONFLICT: "TransactionInProgressException TransactionConflictException",
    UNAUTHORIZED: """AccessDenied AccessDeniedException AuthFailure ExpiredToken ExpiredTokenException
        InvalidClientTokenId InvalidSignatureException UnrecognizedClientException""",
})  # fmt: skip
#: SQLSTATE: whole codes, and classes, which are the first two characters.
SQLSTATES = _types({
    DB_UNAVAILABLE: "08 25006 53 57P01 57P02 57P03 57P05 58",
    DB_TIMEOUT: "25P03 57014",
    DB_CONFLICT: "40 55P03",
    DB_UNAUTHORIZED: "28",
})  # fmt: skip
MONGODB = _types({
    DB_UNAVAILABLE: "91 189 10107 11600 11602 13435 13436",
    DB_TIMEOUT: "50 262",
    DB_CONFLICT: "112 251",
    DB_UNAUTHORIZED: "13 18",
})  # fmt: skip
MYSQL = _types({
    DB_UNAVAILABLE: "1040 1053 1203 1290 2002 2003 2005 2006 2013",
    DB_TIMEOUT: "3024",
    DB_CONFLICT: "1205 1213",
    DB_UNAUTHORIZED: "1045",
})  # fmt: skip
#: The replies of SMTP servers (RFC 5321, RFC 4954). Any other 4xx means unavailable, 5xx a rejection.
SMTP = _types({UNAUTHORIZED: "530 534 535 538"})
_ROUTES = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
_TOO_MANY = re.compile(r"too many (\d{3}) error responses")
_SQLITE_BUSY = {5, 6}


@dataclass(frozen=True, slots=True)
class ByValue:
    """An entry that reads the type out of an error; `what` says where it looks.

    A map with such an entry hears what answers say about when to ask again.
    """

    what: str
    type_of: Callable[[Any], Mapped | None]
    hears: ClassVar[bool] = True

    def __call__(self, error: BaseException) -> Mapped | None:
        """Return the type, or None for an error that has none."""
        return self.type_of(error)


def standard_errors() -> dict[Any, Entry]:
    """Return an error map for the errors of well-known libraries, to which you add your own.

    `Bridge(errors=standard_errors() | {CardStolen: "payment.card_stolen"})`. Its keys are dotted names of
    classes, and nothing is imported. With it the bridge also hears Retry-After, X-RateLimit-Reset and gRPC's
    RetryInfo (docs/reference/error-types.md).
    """
    return {**STANDARD}


def _by_status(error: object) -> str | None:
    status = status_of(error)
    if status == FORBIDDEN and (has_spent(error) or header_of(error, RETRY_AFTER)):
        status = TOO_MANY
    return of_status(status)


def of_status(status: int | None) -> str | None:
    """Return the type of an HTTP status; None for one that is no error."""
    return STATUSES.get(str(status), {4: REJECTED, 5: UNAVAILABLE}.get((status or 0) // 100))


def _by_aws(error: object) -> str | None:
    return AWS.get(read(error, "response", "Error", "Code")) or _by_status(error)


def _by_smtp(error: object) -> str | None:
    replies = [read(error, "smtp_code")] if read(error, "smtp_code") else []
    replies = replies or [code for code, _ in read(error, "recipients").values()]
    # One recipient that may be taken later is worth a retry.
    return SMTP.get(str(replies[0]), UNAVAILABLE if min(replies) < 500 else REJECTED)  # noqa: PLR2004


def _sqlstate(error: object) -> str:
    return read(error, "sqlstate") or read(error, "pgcode") or ""


def _by_sqlstate(error: object) -> str | None:
    state = _sqlstate(error)
    return SQLSTATES.get(state) or SQLSTATES.get(state[:2])


def _by_orig(error: object) -> Mapped | None:
    orig = read(error, "orig")
    gone = DB_UNAVAILABLE if read(error, "connection_invalidated") is True else None
    return _by_sqlstate(orig) or _typed(orig) or gone


def _by_sqlite(error: object) -> str | None:
    busy = read(error, "sqlite_errorcode") in _SQLITE_BUSY or "is locked" in str(error)
    return DB_CONFLICT if busy else None


def _by_refusals(error: object) -> str | None:
    count = _TOO_MANY.search(str(error))
    return of_status(int(count[1])) if count else None


def _typed(error: object) -> Mapped | None:
    """Return the type of an error that stands within another one."""
    return _standard_map().find(error)[0] if isinstance(error, BaseException) else None


@cache
def _standard_map() -> ErrorMap:
    return ErrorMap(STANDARD)


#: The types by the names of classes; the nearest class decides.
STANDARD: dict[str, Entry] = {
    **_types({
        TIMEOUT: """TimeoutError asyncio.exceptions.TimeoutError concurrent.futures._base.TimeoutError
            requests.exceptions.Timeout requests.exceptions.ConnectTimeout urllib3.exceptions.TimeoutError
            httpx.TimeoutException aiohttp.client_exceptions.ServerTimeoutError
            botocore.exceptions.ConnectTimeoutError botocore.exceptions.ReadTimeoutError""",
        UNREACHABLE: """ConnectionError socket.gaierror socket.herror ssl.SSLError
            http.client.IncompleteRead http.client.BadStatusLine smtplib.SMTPServerDisconnected
            requests.exceptions.ChunkedEncodingError
            urllib3.exceptions.NewConnectionError urllib3.exceptions.ProtocolError
            urllib3.exceptions.ProxyError urllib3.exceptions.SSLError
            httpx.NetworkError httpx.ProxyError httpx.RemoteProtocolError
            aiohttp.client_exceptions.ClientConnectionError aiohttp.client_exceptions.ClientPayloadError
            botocore.exceptions.ConnectionError botocore.exceptions.HTTPClientError
            botocore.exceptions.IncompleteReadError""",
        DB_TIMEOUT: """redis.exceptions.TimeoutError sqlalchemy.exc.TimeoutError
            pymongo.errors.NetworkTimeout pymongo.errors.WaitQueueTimeoutError
            pymongo.errors.ExecutionTimeout pymongo.errors.WTimeoutError""",
        DB_UNAVAILABLE: """redis.exceptions.ConnectionError redis.exceptions.ReadOnlyError
            redis.exceptions.ClusterDownError redis.exceptions.TryAgainError
            redis.exceptions.OutOfMemoryError
            sqlalchemy.exc.DisconnectionError pymongo.errors.ConnectionFailure""",
        DB_CONFLICT: "redis.exceptions.WatchError sqlalchemy.orm.exc.StaleDataError",
        DB_UNAUTHORIZED: """redis.exceptions.AuthenticationError redis.exceptions.AuthorizationError
            redis.exceptions.NoPermissionError""",
    }),
    "OSError": ByValue("its `errno`", lambda error: UNREACHABLE if error.errno in _ROUTES else None),
    **dict.fromkeys(
        ("urllib.error.HTTPError", "requests.exceptions.HTTPError", "httpx.HTTPStatusError",
         "aiohttp.client_exceptions.ClientResponseError"),
        ByValue("the status of the answer", _by_status),
    ),
    "botocore.exceptions.ClientError": ByValue("its code, and the status of the answer", _by_aws),
    "grpc.RpcError": ByValue("its code", lambda error: GRPC.get(error.code().name)),
    **dict.fromkeys(
        ("smtplib.SMTPResponseException", "smtplib.SMTPRecipientsRefused"),
        ByValue("the replies of the server", _by_smtp),
    ),
    **dict.fromkeys(
        ("urllib.error.URLError", "urllib3.exceptions.MaxRetryError"),
        ByValue("its reason", lambda error: _typed(error.reason) or UNREACHABLE),
    ),
    **dict.fromkeys(
        ("requests.exceptions.ConnectionError", "requests.exceptions.RetryError"),
        ByValue("the error of urllib3 within it", lambda error: _typed(error.args[0]) or UNREACHABLE),
    ),
    "urllib3.exceptions.ResponseError": ByValue("the status that came too often", _by_refusals),
    **dict.fromkeys(
        ("psycopg.Error", "psycopg2.Error", "asyncpg.exceptions._base.PostgresError"),
        ByValue("its SQLSTATE", _by_sqlstate),
    ),
    **dict.fromkeys(
        ("psycopg.OperationalError", "psycopg2.OperationalError"),
        ByValue("its SQLSTATE, if it has one", lambda error: None if _sqlstate(error) else DB_UNAVAILABLE),
    ),
    **dict.fromkeys(
        ("pymysql.err.OperationalError", "MySQLdb.OperationalError"),
        ByValue("its code", lambda error: MYSQL.get(str(error.args[0]))),
    ),
    "sqlalchemy.exc.DBAPIError": ByValue("the error of the driver, `orig`", _by_orig),
    "django.db.utils.Error": ByValue(
        "the error of the driver, its cause", lambda error: _typed(error.__cause__)
    ),
    "sqlite3.OperationalError": ByValue("whether the database is locked", _by_sqlite),
    "pymongo.errors.OperationFailure": ByValue("its code", lambda error: MONGODB.get(str(error.code))),
    "dramatiq.errors.RateLimitExceeded": (LOCAL, SNOOZE),
}  # fmt: skip
