"""A result backend that asks instead of subscribing."""

from typing import Any

from celery.backends.redis import RedisBackend
from celery.exceptions import TimeoutError as GetTimedOut
from celery.result import AsyncResult

from tests.servers import eventually


class Polling(RedisBackend):
    """Redis results, polled.

    A subscribing one unsubscribes whenever a result is collected, and that blocks for good, on Celery 5.4 at
    least, when the collection happens in the middle of another of the client's calls.
    """

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Do not subscribe."""

    def add_pending_result(self, result: AsyncResult, *rest: Any, **options: Any) -> AsyncResult:
        """Do not subscribe."""
        return result

    def remove_pending_result(self, result: AsyncResult) -> AsyncResult:
        """Do not unsubscribe."""
        return result

    def wait_for_pending(
        self, result: AsyncResult, timeout: float = 30, propagate: bool = True, **_: Any
    ) -> Any:
        """Ask until the job has ended."""
        try:
            eventually(result.ready, seconds=timeout or 30, what=f"the end of {result.id}")
        except TimeoutError as error:
            raise GetTimedOut(str(error)) from None
        return result.maybe_throw(propagate=propagate)
