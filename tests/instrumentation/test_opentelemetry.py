"""The spans and metrics of jobs, as the SDK exports them from real workers."""

from __future__ import annotations

import ast
from collections.abc import Callable
from multiprocessing import Pipe, get_context
from typing import Any

import pytest
from dramatiq.brokers.stub import StubBroker
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from ojs_bridge import Discard
from ojs_bridge.instrumentation.metrics import ENQUEUED
from ojs_bridge.instrumentation.opentelemetry import Meters
from tests.contract.fleet import Fleet, end
from tests.contract.notes import Noting, client
from tests.contract.steps import calls, raises
from tests.contract.test_breakers import PATIENT, QUICK, bank_with
from tests.on_dramatiq.fleet import Fleet as OnStub
from tests.servers import eventually

FLEETS = ["celery-valkey", "celery-rabbitmq", "dramatiq-valkey", "dramatiq-rabbitmq"]
OTEL = ("otel",)


def spans(fleet: Fleet, *words: str, job: str = "") -> list[dict[str, Any]]:
    """Return the spans whose names have all words, in the order of their beginning."""
    found = Noting(fleet.settings.backend).read("spans", fleet.queue)
    found.sort(key=lambda span: span["start_time"])
    named = [span for span in found if all(word in span["name"] for word in words)]
    return [span for span in named if not job or span["attributes"].get("ojs.job.id") == job]


def context(span: dict[str, Any]) -> tuple[str, str]:
    """Return the ids of a span and its trace."""
    return span["context"]["trace_id"], span["context"]["span_id"]


def links(span: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the spans to which a span links."""
    return [context(link) for link in span["links"]]


def metrics(fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    """Return the last points of each metric, of all processes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key in client(fleet.settings.backend).scan_iter(f"metrics:{fleet.queue}:*"):
        last = Noting(fleet.settings.backend).read("metrics", key.removeprefix("metrics:"))[-1]
        for resource in last["resource_metrics"]:
            for metric in resource["scope_metrics"][0]["metrics"]:
                found.setdefault(metric["name"], []).extend(metric["data"]["data_points"])
    return found


@pytest.fixture(params=FLEETS)
def fleet(request: pytest.FixtureRequest, made: Callable[..., Fleet]) -> Fleet:
    """A fleet with spans and metrics, whose longer retries are parked."""
    fleet = made(request.param, instruments=OTEL, park_after="PT0.01S")
    fleet.start().await_ready()
    return fleet


def test_an_attempt_is_a_span_with_links_to_the_sender_and_to_the_attempt_before(fleet: Fleet) -> None:
    """Through parked retries, a dead letter and its replay; the first context travels unmodified."""
    job = fleet.send("act_kept", raises(TimeoutError, "slow"))
    end(fleet, job)
    letter = fleet.bridge.dead_letters.get(job)
    fleet.bridge.dead_letters.replay(job)
    end(fleet, job, nth=2)
    fleet.worker.stop()
    (sent,) = spans(fleet, "enqueue")
    runs = spans(fleet, "process", job=job)
    assert sent["name"] == f"{fleet.queue} enqueue"
    assert sent["kind"] == "SpanKind.PRODUCER"
    assert [run["name"] for run in runs] == [f"{fleet.queue} process"] * 4
    assert [run["attributes"]["ojs.job.attempt"] for run in runs] == [1, 2, 1, 2]
    assert [run["attributes"]["ojs.job.state"] for run in runs] == ["retryable", "discarded"] * 2
    assert {run["parent_id"] for run in runs} == {None}
    assert len({context(run)[0] for run in [sent, *runs]}) == 5
    before = [[], *([context(run)] for run in runs)]
    assert [links(run) for run in runs] == [[context(sent), *before[n]] for n in range(4)]
    assert {run["status"]["status_code"] for run in runs} == {"ERROR"}
    first = runs[0]
    assert first["kind"] == "SpanKind.CONSUMER"
    assert {
        "messaging.system": "ojs",
        "messaging.operation.type": "process",
        "messaging.destination.name": fleet.queue,
        "messaging.message.id": job,
        "ojs.job.id": job,
        "ojs.job.type": "act_kept",
        "error.type": "external.timeout",
        "ojs.job.error.attempt": 1,
    }.items() <= first["attributes"].items()
    assert [event["name"] for event in first["events"]] == ["exception"]
    steps = [span for span in spans(fleet, "ojs.", job=job) if span["parent_id"] == context(first)[1]]
    assert [span["name"] for span in steps] == ["ojs.retry.evaluate", "ojs.nack"]
    kept = [error["traceparent"].split("-")[2] for error in letter.errors]
    assert kept == [context(run)[1][2:] for run in runs[:2]]


def test_the_first_context_travels_unmodified(fleet: Fleet) -> None:
    """Trace state and baggage, too; the handler has the baggage, and its span links to the context."""
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    first = {"traceparent": f"00-{trace}-{span}-01", "tracestate": "a=b", "baggage": "tenant=acme"}
    steps = [raises(OSError), raises(OSError), calls("opentelemetry.baggage.get_baggage", "tenant")]
    job = fleet.send("act_kept", *steps, meta=first)
    end(fleet, job)
    fleet.bridge.dead_letters.replay(job)
    end(fleet, job, nth=2)
    fleet.worker.stop()
    notes = Noting(fleet.settings.backend).read("runs", job)
    came = [note["meta"] if "meta" in note else ast.literal_eval(note["headers"]) for note in notes]
    assert [{name: headers[name] for name in first} for headers in came] == [first] * 3
    runs = spans(fleet, "process", job=job)
    assert [links(run)[0] for run in runs] == [(f"0x{trace}", f"0x{span}")] * 3
    assert spans(fleet, "enqueue") == []


def test_the_span_is_active_while_the_handler_runs_and_a_success_is_acknowledged(fleet: Fleet) -> None:
    """The handler finds the span, and the settling of the run is within it."""
    job = fleet.send("act", calls("tests.instrumentation.instruments.mark_the_span"))
    end(fleet, job)
    fleet.worker.stop()
    (run,) = spans(fleet, "process", job=job)
    assert run["attributes"]["own"] == 1
    assert run["attributes"]["ojs.job.state"] == "completed"
    assert run["status"]["status_code"] == "UNSET"
    assert [span["parent_id"] for span in spans(fleet, "ojs.ack", job=job)] == [context(run)[1]]


def test_the_metrics_count_what_happened(fleet: Fleet) -> None:
    """The spec's counters and histograms, with queue, type and state, also from forked processes."""
    steps = ["ok", raises(OSError), raises(Discard, "a.b")]
    jobs = [fleet.send("act_kept", step) for step in steps]
    for job in jobs:
        end(fleet, job)

    def counted(name: str) -> float:
        points = metrics(fleet).get(name, [])
        assert all(point["attributes"]["queue"] == fleet.queue for point in points)
        return sum(point.get("value", point.get("count", 0)) for point in points)

    expected = {
        "job.enqueued": 3, "job.completed": 1, "job.retried": 1, "job.failed": 2, "job.duration": 4,
        "dead_letter.added_total": 1, "job.queue_time": 4, "job.enqueue_duration": 3,
    }  # fmt: skip
    eventually(
        lambda: {name: counted(f"ojs.{name}") for name in expected} == expected,
        seconds=20,
        what=f"all metrics, not { ({name: counted(f'ojs.{name}') for name in expected}) }",
    )
    states = {point["attributes"]["state"] for point in metrics(fleet)["ojs.job.duration"]}
    assert states == {"completed", "retryable", "discarded"}
    assert {point["value"] for point in metrics(fleet)["ojs.workers.active"]} == {1}
    assert {point["value"] for point in metrics(fleet)["ojs.workers.busy"]} == {0}


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_breaker_that_opens_is_counted_and_its_probes_are_marked(
    made: Callable[..., Fleet], kind: str
) -> None:
    """Once for the whole fleet, by the dependency."""
    # A probe that has not ended after a cool-down counts as lost, and another one runs.
    fleet = made(kind, instruments=OTEL, dependencies=bank_with({**QUICK, "cool_down": "PT15S"}))
    fleet.start().await_ready()
    slow = raises(TimeoutError, "slow")
    # All of them have failed when it opens: no probe fails.
    policy = {**PATIENT, "initial_interval": "PT5S"}
    jobs = [fleet.send("act", slow, "ok", policy=policy) for _ in range(QUICK["least"])]
    for job in jobs:
        assert end(fleet, job, seconds=60).type == "job.completed"
    eventually(lambda: "ojs.breaker.opened" in metrics(fleet), seconds=20, what="the counter")
    (point,) = metrics(fleet)["ojs.breaker.opened"]
    assert (point["attributes"], point["value"]) == ({"dependency": "bank"}, 1)
    fleet.worker.stop()
    runs = spans(fleet, "process")
    assert [run["attributes"].get("ojs.breaker.probe") for run in runs].count("bank") == QUICK["probes"]


def test_beside_celery_s_own_instrumentation_nothing_is_doubled(made: Callable[..., Fleet]) -> None:
    """Its spans get the attributes and the links of the bridge, and its sender's context stays the first."""
    fleet = made("celery-valkey", instruments=("celerys_own", "otel"))
    fleet.start().await_ready()
    job = fleet.send("act_kept", raises(OSError, "away"))
    end(fleet, job)
    fleet.worker.stop()
    assert spans(fleet, "enqueue") == spans(fleet, "process") == []
    runs = spans(fleet, "run/act_kept")
    sent = spans(fleet, "apply_async/act_kept")[0]
    assert [run["attributes"]["ojs.job.attempt"] for run in runs] == [1, 2]
    assert [run["attributes"]["ojs.job.state"] for run in runs] == ["retryable", "discarded"]
    assert links(runs[1]) == [context(runs[0])]
    assert {run["parent_id"] for run in runs} == {context(sent)[1]}


@pytest.mark.parametrize(("opted", "names"), [("messaging", (False, True)), ("messaging/dup", (True, True))])
def test_open_telemetry_s_own_names(
    made: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, opted: str, names: tuple[bool, bool]
) -> None:
    """An environment variable chooses them, or both."""
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", opted)
    fleet = made("dramatiq-valkey", instruments=OTEL)
    fleet.start().await_ready()
    job = fleet.send("act", raises(Discard, "a.b"))
    end(fleet, job)

    def found() -> tuple[bool, bool]:
        return "ojs.job.duration" in metrics(fleet), "messaging.process.duration" in metrics(fleet)

    eventually(lambda: found() == names, what="the metrics")
    (point,) = metrics(fleet)["messaging.process.duration"]
    assert point["attributes"] == {
        "messaging.operation.name": "process",
        "messaging.destination.name": fleet.queue,
        "messaging.system": "redis",
        "error.type": "a.b",
    }
    (run,) = spans(fleet, "process", job=job)
    both = names[0]
    assert run["name"] == (f"{fleet.queue} process" if both else f"process {fleet.queue}")
    assert run["attributes"]["messaging.system"] == ("ojs" if both else "redis")
    assert run["attributes"]["messaging.operation.name"] == "process"
    assert run["attributes"]["error.type"] == "a.b"


@pytest.mark.parametrize("redact", [None, {"card"}])
def test_what_the_bridge_redacts_is_in_no_span(redact: set[str] | None, unique: str) -> None:
    """The text of an error may quote an argument: the spans have the error's type alone."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from ojs_bridge.instrumentation import opentelemetry

    exporter, traces, secret = InMemorySpanExporter(), TracerProvider(), "4111-1111"
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    fleet = OnStub(StubBroker(), unique, redact=redact)
    opentelemetry.instrument(fleet.bridge, traces, MeterProvider())

    def charge(n: int) -> None:
        raise OSError(f"no card {secret}")

    with fleet.working():
        fleet.end(fleet.send(fleet.actor(charge, max_retries=1)))
    within = fleet.bridge.engine.instruments.sending("dramatiq", "act", "q", {})
    with pytest.raises(OSError, match=secret), within:
        raise OSError(secret)
    found = exporter.get_finished_spans()
    failed = [span for span in found if not span.status.is_ok]
    assert len(failed) == 3
    assert all((secret in span.to_json()) == (redact is None) for span in failed)
    assert all(span.attributes and "OSError" in str(span.attributes["error.type"]) for span in failed)
    assert redact is None or secret not in "".join(span.to_json() for span in found)


def test_a_forked_child_counts_from_zero() -> None:
    """The sums of the parent are exported by the parent alone."""
    reader = InMemoryMetricReader()
    meters = Meters(MeterProvider([reader]).get_meter("test"), lambda: "celery")
    meters.add([(ENQUEUED, 3, ("default", "mail"))])

    def sums() -> list[Any]:
        found = reader.get_metrics_data()
        told = found.resource_metrics[0].scope_metrics[0].metrics if found else ()
        return [point.value for each in told if each.name == ENQUEUED.name for point in each.data.data_points]

    there, here = Pipe()
    child = get_context("fork").Process(target=lambda: there.send(sums()))
    child.start()
    assert here.recv() == []
    child.join()
    assert sums() == [3]
