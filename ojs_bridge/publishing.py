"""What an adapter offers to those who put messages back on their queues."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .job import Header
from .store import Letter, Parked


class Unreachable(Exception):
    """The broker did not take a message, and may take it later."""


class Unpublishable(Exception):
    """This message can never be published."""


class Publisher(Protocol):
    """Publishes messages of one framework.

    Raises Unreachable and Unpublishable; any other error is of this message alone, and may be over later.
    """

    def republish(self, letter: Letter, header: Header) -> None:
        """Publish a dead letter's original message with its retry state replaced by `header`."""

    def publish(self, parked: Parked, state: Mapping[str, Any]) -> None:
        """Publish a parked retry's message, due now, with `state` as its retry state."""
