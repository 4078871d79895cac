"""The fleets of the contract, with instruments."""

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.instrumentation.celery import CeleryInstrumentor

from tests.contract.conftest import made

__all__ = ["made"]


@pytest.fixture(autouse=True)
def uninstrumented() -> Iterator[None]:
    """Take from this process, which sends the jobs, what instruments have put there."""
    logger = logging.getLogger("ojs_bridge")
    handlers = [*logger.handlers]
    yield
    logger.handlers[:] = handlers
    if CeleryInstrumentor().is_instrumented_by_opentelemetry:
        CeleryInstrumentor().uninstrument()
