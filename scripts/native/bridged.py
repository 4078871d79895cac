"""A plugin of pytest: it puts a bridge on each app of Celery and each broker of Dramatiq as they are made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import celery
import celery.contrib.testing.mocks as messages
import dramatiq

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge.celery.task import Bridged


def install_on_each(kind: Any, install: Callable[[Any], object]) -> None:
    """Call `install` with each object of a class when the `__init__` of this class ends."""
    init = kind.__init__

    @functools.wraps(init)
    def init_and_install(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        install(self)

    kind.__init__ = init_and_install


def give_errors(kind: Any) -> None:
    """Give a consumer of Celery's tests, which is a mock, the errors of a broker that a real one names."""
    start = kind.start_strategy

    @functools.wraps(start)
    def start_strategy(self: Any, app: Any, consumer: Any, **options: Any) -> Any:
        if isinstance(consumer, Mock):
            consumer.connection_errors = consumer.channel_errors = ()
        return start(self, app, consumer, **options)

    kind.start_strategy = start_strategy


install_on_each(celery.Celery, ojs_bridge.celery.install)
install_on_each(dramatiq.Broker, ojs_bridge.dramatiq.install)
give_errors(Bridged)
# A message of Celery's tests is a mock. A real one has properties.
messages.Mock = functools.partial(Mock, properties={})
