"""Code of users, for `mypy --strict`; a line that mypy must refuse has the error's code in its comment."""

from celery import Celery

from ojs_bridge import Bridge, PartialPolicy, PolicyEntry, RetryPolicy, standard_errors
from ojs_bridge.celery import OJSTask, install, ojs_task
from ojs_bridge.migration import to_celery_options

app = Celery("typed")
PATIENT: PartialPolicy = {"max_attempts": 9, "initial_interval": "PT1M"}
POLICIES: dict[str, PolicyEntry] = {
    "billing.*": {"max_attempts": 9, "retry_on": [OSError]},
    "*": RetryPolicy(),
}

bridge = Bridge(retry={"max_attempts": 5, "jitter": False}, errors={OSError: "disk.full"})
Bridge(errors=standard_errors() | {"shop.Full": ("shop.full", "SNOOZE"), OSError: lambda error: None})
install(app, bridge, policies=POLICIES)
install(app, policies={"mail.*": {"retry_on": "asked", "backoff_strategy": lambda n, failure: n * 2.0}})


@ojs_task(app, retry={"max_attempts": 5, "on_exhaustion": "dead_letter"}, queue="slow")
def charge(order: int, currency: str = "EUR") -> float:
    return 1.0


@ojs_task(app, bind=True, retry=PATIENT)
def fetch(task: OJSTask, url: str) -> bytes:
    raise task.retry(countdown=5)


@ojs_task(name="shared")
def shared(order: int) -> None: ...


@ojs_task
def bare(order: int) -> None: ...


paid: float = charge(7, currency="USD")
fetched: bytes = fetch("https://example.org")
charge.delay(7)
charge.s(7).set(ojs_retry={"max_attempts": 2})
charge.apply_async((7,), countdown=3, ojs_retry={"max_attempts": 2})
fetch.delay(url="https://example.org").get()
charge.max_retries = 3
bare.delay(7)
bare(7)
shared.si(7)
to_celery_options({"max_attempts": 3})
to_celery_options(RetryPolicy(max_attempts=3))

charge("7")  # E: arg-type
charge.delay(order="7")  # E: arg-type
fetch.delay()  # E: call-arg
wrong: str = charge(7)  # E: assignment
charge.apply_async((7,), ojs_retry={"attempts": 2})  # E: arg-type
ojs_task(app, retry={"max_attemps": 5})  # E: call-overload
Bridge(retry={"max_attempts": "5"})  # E: arg-type
Bridge(retry={"on_exhaustion": "keep"})  # E: arg-type
install(app, policies={"a.*": {"max_attemps": 5}})  # E: dict-item
RetryPolicy(max_attemps=5)  # E: call-arg
