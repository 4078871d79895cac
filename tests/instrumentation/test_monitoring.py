"""The rules and the dashboard of examples/monitoring name metrics that exist; an alert fires."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine.holds import write
from ojs_bridge.http.guarding import Access, tokens_of
from ojs_bridge.instrumentation.metrics import GAUGES, METRICS, gauges_text
from ojs_bridge.operations import health
from ojs_bridge.operations.health import Beat
from ojs_bridge.rules.holds import Hold
from tests.http.doors import OPERATOR, READER, House, client_at, house, with_token
from tests.lives import FRAMEWORK, bridge_with_outbox
from tests.servers.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "monitoring"
REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text("utf-8")
RULES, DASHBOARD = EXAMPLE / "alerts.yml", EXAMPLE / "dashboard.json"


def names() -> set[str]:
    """Return every name under which Prometheus finds a metric."""
    from ojs_bridge.instrumentation.prometheus import name_of

    found = {*GAUGES, "ojs_workers_busy", "ojs_workers_active"}
    for metric in METRICS:
        suffixes = ("_bucket", "_count", "_sum") if metric.buckets else ("",)
        found |= {name_of(metric) + suffix for suffix in suffixes}
    return found


def expressions() -> list[str]:
    """Return the expressions of the dashboard and the rules."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    shown = [target["expr"] for panel in panels for target in panel["targets"]]
    return shown + re.findall(r"expr: (.*)", RULES.read_text())


def test_every_expression_names_metrics_that_exist() -> None:
    """A dashboard that shows nothing looks like a fleet that does nothing."""
    used = {name for expression in expressions() for name in re.findall(r"ojs_\w+", expression)}
    assert len(expressions()) > 15
    assert used <= names()


def test_promtool_takes_the_rules_and_the_expressions(tmp_path: Path) -> None:
    """The dashboard's expressions are checked as rules, with an interval in place of Grafana's variable."""
    dashboard = tmp_path / "dashboard.yml"
    exprs = [expression.replace("$__rate_interval", "5m") for expression in expressions()]
    rules = [{"record": f"checked:rule{n}", "expr": expression} for n, expression in enumerate(exprs)]
    dashboard.write_text(json.dumps({"groups": [{"name": "checked", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", RULES, dashboard], check=True, capture_output=True)


def test_an_alert_fires_in_a_real_outage() -> None:
    """The script of the example ends well."""
    done = subprocess.run(
        [sys.executable, EXAMPLE / "outage.py"], capture_output=True, text=True, timeout=115, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the alert fires" in done.stdout


@pytest.fixture
def shop(tmp_path: Path) -> House:
    """A house with two letters and an overdue parked retry."""
    shop = house(f"sqlite:///{tmp_path}/ojs.db")
    shop.bury("j-1", type="billing.charge", queue="slow")
    shop.bury("j-2", type="billing.charge", queue="fast")
    shop.park("j-3", next_retry_at=shop.bridge.engine.now().replace(year=2024))
    return shop


def test_the_server_tells_what_the_store_knows(shop: House) -> None:
    """Letters, parked retries, the oldest one that is overdue, workers, the broker and what waits there."""
    Beat(shop.bridge.engine.context, FRAMEWORK, lambda: ["slow"]).tell()
    shop.outbox.waiting, shop.outbox.oldest_at = {"slow": 7}, shop.bridge.engine.now() - timedelta(hours=1)
    shop.bridge.dead_letters.prune()
    assert shop.bridge.store
    documents, now = shop.bridge.store.documents, shop.bridge.engine.now()
    for name, ended in (("bank", None), ("mail", now)):
        write(documents, Hold(f"breaker:{name}", "a breaker", now, dependency=name, ended_at=ended))
    text = shop.client.get("/metrics").text
    assert 'ojs_dead_letter_fullness{queue="*"} 0.0' in text
    assert "ojs_dead_letter_overflow 0.0" in text
    assert 'ojs_dead_letter_total{type="billing.charge"} 2.0' in text
    assert 'ojs_dead_letter_depth{queue="slow"} 1.0' in text
    assert "ojs_retries_parked 1.0" in text
    assert 'ojs_breaker_open{dependency="bank"} 1.0' in text
    assert 'ojs_breaker_open{dependency="mail"} 0.0' in text
    assert "ojs_store_up 1.0" in text
    assert "ojs_workers_seen 1.0" in text
    assert 'ojs_broker_up{framework="outbox"} 1.0' in text
    assert 'ojs_queue_workers{framework="outbox",queue="slow"} 1.0' in text
    assert 'ojs_queue_backlog{framework="outbox",queue="slow"} 7.0' in text
    assert re.search(r'^ojs_queue_oldest_seconds\{framework="outbox",queue="slow"\} 36', text, re.MULTILINE)
    (overdue,) = re.findall(r"^ojs_waiting_overdue_seconds (\S+)", text, re.MULTILINE)
    assert float(overdue) > 1_000_000
    assert set(re.findall(r"^(ojs_\w+)", text, re.MULTILINE)) == {*GAUGES}


def test_a_broker_that_is_away_is_told(shop: House) -> None:
    """Also while the store is away."""
    shop.outbox.raises = ConnectionError("down")
    assert 'ojs_broker_up{framework="outbox"} 0.0' in shop.client.get("/metrics").text
    bridge, outbox = bridge_with_outbox(f"redis://127.0.0.1:{free_port()}")
    outbox.raises = ConnectionError("down")
    text = gauges_text(bridge)
    assert b"ojs_store_up 0.0" in text
    assert b'ojs_broker_up{framework="outbox"} 0.0' in text


def test_scrapes_do_not_pile_up_behind_a_silent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape waits for the answer to the first one's question."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bridge = Bridge(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(health.Probe.check, "__defaults__", (0.2, 0.0, None))
        before = [thread.name for thread in threading.enumerate()].count("ojs-health-store")
        for _ in range(3):
            assert b"ojs_store_up 0.0" in gauges_text(bridge)
        after = [thread.name for thread in threading.enumerate()].count("ojs-health-store")
        assert after - before == 1


def test_the_metrics_are_guarded_as_the_rest_of_the_api(shop: House) -> None:
    """Another site's page cannot read them; where there are tokens, a reader's will do."""
    assert shop.client.get("/metrics", headers={"Host": "evil.example"}).status_code == 403
    client = client_at(shop.bridge, Access(tokens_of(OPERATOR, READER)))
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers=with_token(READER)).status_code == 200


def test_the_table_of_the_docs_has_every_metric() -> None:
    """Under its names for OpenTelemetry and Prometheus, and no name that does not exist."""
    from ojs_bridge.instrumentation.prometheus import name_of

    shown = {*re.findall(r"`(ojs[._][\w.]+)`", REFERENCE.partition("## Fields of a log line")[0])}
    prometheus = {*map(name_of, METRICS), *GAUGES, "ojs_workers_busy", "ojs_workers_active"}
    otel = {*(metric.name for metric in METRICS), "ojs.workers.active", "ojs.workers.busy"}
    assert prometheus | otel == shown - {"ojs.job.expired", "ojs.job.attempt", "ojs.breaker.probe"}
