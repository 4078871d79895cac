"""Groups with completion callbacks: a member that runs again, because its worker died, is counted once."""

from __future__ import annotations

from typing import Any

from dramatiq.broker import Broker
from dramatiq.middleware import GroupCallbacks, group_callbacks

#: For how many milliseconds a group is known where its middleware does not say, as in Dramatiq 2.0.
_BARRIER_TTL: int = getattr(group_callbacks, "GROUP_CALLBACK_BARRIER_TTL", 86_400_000)
_COUNTED = "_ojs_counts_once"


def count_members_once(broker: Broker) -> None:
    """Have the broker's GroupCallbacks, each of them once, count no member of a group a second time."""
    for middleware in broker.middleware:
        if isinstance(middleware, GroupCallbacks) and not hasattr(middleware, _COUNTED):
            setattr(middleware, _COUNTED, True)
            middleware.after_process_message = _counting_once(middleware)  # type: ignore[method-assign]


def _counting_once(callbacks: Any) -> Any:
    count = callbacks.after_process_message

    def after_process_message(
        broker: Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        group = None if exception else message.options.get("group_completion_uuid")
        if group is None:
            return
        limits, ttl = callbacks.rate_limiter_backend, getattr(callbacks, "barrier_ttl", _BARRIER_TTL)
        key = f"{group}-{message.message_id}"
        # 0 while the member is being counted and 1 afterwards. Only the second keeps it from being counted.
        if limits.add(key, 0, ttl) or limits.incr(key, 0, 0, ttl):
            count(broker, message, result=result, exception=exception)
            limits.incr(key, 1, 1, ttl)

    return after_process_message
