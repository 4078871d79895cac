"""Why tests of the frameworks differ under the bridge, by file, class and function; `*` is any text."""

TASKS = "t/unit/tasks/test_tasks.py::"
TRACE = "t/unit/tasks/test_trace.py::"
SHUTDOWN = "tests/middleware/test_shutdown.py::test_shutdown_notifications_"
JITTER = "It replaces `random.randrange`. The bridge draws from the same range with a generator of its own."
NOT_LEFT = "A shutdown uses no attempt: the job goes back to its queue, which the test expects to be empty."
NO_HEADERS = "It gives `apply` a number for its headers, among which the bridge looks for its own."

REASONS = {
    f"{TASKS}test_task_retries::test_autoretry_backoff_jitter": JITTER,
    f"{TASKS}test_task_retries::test_override_backoff_jitter_from_base": JITTER,
    f"{TASKS}test_apply_task::test_autoretry_shared_retry_kwargs_not_mutated_*": (
        "It reads the closure of Celery's wrapper for `autoretry_for`, whose place the bridge takes."
    ),
    f"{TRACE}test_trace::test_trace_SystemExit": (
        "Under the bridge `SystemExit` is a failure. Celery alone ends the child, and loses the attempt."
    ),
    f"{TRACE}test_trace::test_trace_Retry": (
        "Celery alone publishes nothing for a bare `Retry`. The bridge publishes a retry, and JSON cannot "
        "hold the argument of this job."
    ),
    f"{TRACE}test_stackprotection::test_stackprotection_headers_*": NO_HEADERS,
    f"{SHUTDOWN}worker_shutdown_messages": (
        "It tells of the end of a worker that is `None`. The bridge logs one line more."
    ),
    f"{SHUTDOWN}are_received": NOT_LEFT,
    f"{SHUTDOWN}dont_notify_completed_threads": NOT_LEFT,
    "tests/middleware/test_asyncio.py::test_event_loop_thread_run_coroutine_interrupted": (
        "It depends on the time at which a thread is interrupted, and fails at times alone, too."
    ),
    "tests/test_broker.py::test_can_instantiate_brokers_without_middleware": (
        "It expects no middleware. The bridge is one."
    ),
    "tests/test_redis.py::test_redis_consumer_nack_does_not_raise_on_missing_id": (
        "It gives the consumer a `Message`, and not a worker's `MessageProxy`."
    ),
}
