"""A gRPC service that the tests call: it ends each call as the test has said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc


@contextmanager
def remote() -> Iterator[tuple[int, dict[str, Any]]]:
    """Have a service answer; yield its port, and what it reads: the `code`, `metadata` and rich `status`.

    Without a code it answers late.
    """
    asked: dict[str, Any] = {"code": grpc.StatusCode.UNAVAILABLE, "metadata": (), "status": None}

    def buy(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(asked["metadata"])
        if asked["status"] is not None:
            context.abort_with_status(asked["status"])
        if asked["code"] is not None:
            context.abort(asked["code"], "no")
        time.sleep(2)
        return b""

    handlers = {"Buy": grpc.unary_unary_rpc_method_handler(buy)}
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("shop.Shop", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port, asked
    finally:
        server.stop(None).wait()
