"""The fixture `ojs` for pytest. This file stands alone, so that other tests do not import the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ojs_bridge.testing import VirtualTime


def pytest_configure(config: pytest.Config) -> None:
    """Say what the marker is for."""
    config.addinivalue_line(
        "markers", "ojs(jitter): arguments of virtual_time for the fixture `ojs`: the seed of its jitter"
    )


@pytest.fixture
def ojs_app() -> Any:
    """The Celery app or the Dramatiq broker of `ojs`; without one of yours, the current one is found."""
    return None


@pytest.fixture
def ojs(ojs_app: Any, request: pytest.FixtureRequest) -> Iterator[VirtualTime]:
    """The jobs of the app or broker, in memory and under virtual time."""
    from ojs_bridge.testing import virtual_time

    marker = request.node.get_closest_marker("ojs")
    with virtual_time(ojs_app, **(marker.kwargs if marker else {})) as virtual:
        yield virtual
