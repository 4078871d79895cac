"""Each alert of examples/monitoring fires when it should, as promtool tries it, and leads somewhere."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ojs_bridge.http

ROOT = Path(__file__).parents[2]
RULES, RUNBOOK = ROOT / "examples" / "monitoring" / "alerts.yml", ROOT / "docs" / "how-to" / "alerts.md"
PAGE = Path(ojs_bridge.http.__file__).parent / "page"


#: An alert, the series under which it fires after twenty minutes, and those under which it does not.
FIRES = [
    (
        "OjsBrokerAway",
        {'ojs_broker_up{framework="celery"}': "0x30"},
        {'ojs_broker_up{framework="celery"}': "1x30"},
    ),
    (
        "OjsQueueWithoutWorker",
        {'ojs_queue_workers{framework="celery",queue="a"}': "0x30"},
        {'ojs_queue_workers{framework="celery",queue="a"}': "2x30"},
    ),
    (
        "OjsQueueWithoutWorker",
        {'ojs_queue_backlog{framework="celery",queue="a"}': "7x30"},
        {
            'ojs_queue_backlog{framework="celery",queue="a"}': "7x30",
            'ojs_queue_workers{framework="celery",queue="a"}': "1x30",
        },
    ),
    (
        "OjsQueueWithoutWorker",
        {"ojs_store_up": "1x30", 'ojs_queue_backlog{framework="celery",queue="a"}': "7x30"},
        {
            "ojs_store_up": "1x2 0x28",
            'ojs_queue_backlog{framework="celery",queue="a"}': "7x30",
            'ojs_queue_workers{framework="celery",queue="a"}': "1x2 stale",
        },
    ),
    (
        "OjsQueueWithoutWorker",
        {
            'ojs_store_up{instance="a:1",job="x"}': "0x30",
            'ojs_store_up{instance="b:1",job="x"}': "1x30",
            'ojs_queue_backlog{framework="celery",queue="a",instance="b:1",job="x"}': "7x30",
        },
        {
            'ojs_store_up{instance="a:1",job="x"}': "0x30",
            'ojs_queue_backlog{framework="celery",queue="a",instance="a:1",job="x"}': "7x30",
        },
    ),
    (
        "OjsTargetDown",
        {
            'up{instance="a:9191",job="w"}': "1x10 0x20",
            'ojs_workers_active{instance="a:9191",job="w"}': "1x10",
        },
        {'up{instance="a:80",job="x"}': "0x30", 'ojs_workers_active{instance="a:9191",job="w"}': "1x30"},
    ),
    (
        "OjsServerGone",
        {'up{job="store"}': "1x2 0x28", "ojs_store_up": "1x2 stale"},
        {'up{job="store"}': "1x30", "ojs_store_up": "0x30"},
    ),
    (
        "OjsBacklogOld",
        {'ojs_queue_oldest_seconds{framework="celery",queue="a"}': "0+60x30"},
        {'ojs_queue_oldest_seconds{framework="celery",queue="a"}': "30x30"},
    ),
    (
        "OjsJobsWaitLong",
        {
            'ojs_job_queue_time_seconds_bucket{queue="a",le="600"}': "0x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="+Inf"}': "0+60x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="1800"}': "0+60x30",
        },
        {
            'ojs_job_queue_time_seconds_bucket{queue="a",le="600"}': "0+60x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="+Inf"}': "0+60x30",
        },
    ),
    (
        "OjsBacklogStands",
        {'ojs_queue_backlog{framework="dramatiq",queue="a"}': "7x10 8x20"},
        {
            'ojs_queue_backlog{framework="dramatiq",queue="a"}': "9-1x8 9-1x8 9-1x8",
            'ojs_queue_backlog{framework="dramatiq",queue="b"}': "0x30",
        },
    ),
    (
        "OjsBacklogGrows",
        {'ojs_queue_backlog{framework="celery",queue="a"}': "500+500x30"},
        {'ojs_queue_backlog{framework="celery",queue="a"}': "5000x30"},
    ),
    (
        "OjsLettersNearLimit",
        {'ojs_dead_letter_fullness{queue="*"}': "0.95x30"},
        {'ojs_dead_letter_fullness{queue="*"}': "0.5x30"},
    ),
    (
        "OjsBreakerOpen",
        {'ojs_breaker_open{dependency="bank"}': "1x30"},
        {'ojs_breaker_open{dependency="bank"}': "1x18 0x12"},
    ),
    (
        "OjsBacklogStands",
        {
            'ojs_queue_backlog{framework="dramatiq",queue="a"}': "7x10 8x20",
            'ojs_job_completed_total{queue="b"}': "0+9x30",
        },
        {
            'ojs_queue_backlog{framework="dramatiq",queue="a"}': "7+9x30",
            'ojs_job_completed_total{queue="a"}': "0+9x30",
        },
    ),
    (
        "OjsJobsWaitLong",
        {
            'ojs_job_queue_time_seconds_bucket{queue="a",le="600"}': "0x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="1800"}': "0+60x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="+Inf"}': "0+60x30",
            'ojs_queue_oldest_seconds{framework="celery",queue="b"}': "30x30",
        },
        {
            'ojs_job_queue_time_seconds_bucket{queue="a",le="600"}': "0x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="1800"}': "0+60x30",
            'ojs_job_queue_time_seconds_bucket{queue="a",le="+Inf"}': "0+60x30",
            'ojs_queue_oldest_seconds{framework="celery",queue="a"}': "30x30",
        },
    ),
    (
        "OjsRetryOverdue",
        {"ojs_waiting_overdue_seconds": "0+60x30", 'ojs_broker_up{framework="celery"}': "1x30"},
        {"ojs_waiting_overdue_seconds": "0+60x30", 'ojs_broker_up{framework="celery"}': "0x30"},
    ),
    (
        "OjsNewErrors",
        {
            'ojs_groups_live{state="new",type="pay"}': "1x15 stale",
            "ojs_store_up": "1x15 0x20",
        },
        {
            'ojs_groups_live{state="new",type="pay"}': "1x15 stale",
            "ojs_store_up": "1x30",
        },
    ),
    (
        "OjsErrorCameBack",
        {'ojs_groups_live{state="came_back",type="pay"}': "1x30"},
        {'ojs_groups_live{state="growing",type="pay"}': "1x30"},
    ),
    ("OjsHoldForgotten", {"ojs_holds": "2x400"}, {"ojs_holds": "2x350 0 2x50"}),
    ("OjsLettersDeleted", {"ojs_dead_letter_overflow": "0x10 28x20"}, {"ojs_dead_letter_overflow": "28x30"}),
]


def test_the_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    """As promtool tries them: on a broker away, dead queues, a backlog, and a limit of dead letters."""
    tests = []
    for alert, wrong, well in FIRES:
        for series, fires in ((wrong, True), (well, False)):
            inputs = [{"series": name, "values": values} for name, values in series.items()]
            expr = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
            expected = [{"labels": "{}", "value": int(fires)}]
            # The forgotten are those of a day.
            interval, at = ("4m", "25h") if alert == "OjsHoldForgotten" else ("1m", "20m")
            asked = [{"expr": expr, "eval_time": at, "exp_samples": expected}]
            tests.append({"interval": interval, "input_series": inputs, "promql_expr_test": asked})
    promtool(tmp_path, tests)


def promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool try the rules."""
    file = folder / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


#: Deaths of one type, counted each 15 seconds, and when the rule says so, in seconds.
DEATHS = {
    "a burst of 55 s": ("0x40 18 36 54 69x60", [645, 660, 720]),
    "a few": ("0x40 3 6 9 9x60", []),
    "a steady trickle": ("0x40 1+2x80", [*range(1200, 1800, 60)]),
}


@pytest.mark.parametrize("deaths", DEATHS)
def test_deaths_are_told_while_they_last(tmp_path: Path, deaths: str) -> None:
    """A fault of less than a minute is told within two minutes of its begin, or not at all."""
    values, when = DEATHS[deaths]
    expr = 'count(ALERTS{alertname="OjsJobsDie",alertstate="firing"}) or vector(0)'
    told = [
        {"expr": expr, "eval_time": f"{at}s", "exp_samples": [{"labels": "{}", "value": int(at in when)}]}
        for at in sorted({*when, 600, 615, 780, 1080})
    ]
    series = [{"series": 'ojs_dead_letter_added_total{type="pay"}', "values": values}]
    promtool(tmp_path, [{"interval": "15s", "input_series": series, "promql_expr_test": told}])


def test_an_alert_leads_to_the_page_and_to_what_to_do(tmp_path: Path) -> None:
    """The names of the page's views and filters, and of the parts of the runbook, are those that exist."""
    parts = {
        f"#{name.lower()}" for name in re.findall(r"^## (\w+)$", RUNBOOK.read_text("utf-8"), re.MULTILINE)
    }
    text = RULES.read_text()
    alerts = re.findall(r"alert: (\w+)", text)
    assert {f"#{alert.lower()}" for alert in alerts} == parts
    links = re.findall(r'runbook_url: "\{\{ \$externalLabels.ojs_docs \}\}/how-to/alerts/(#\w+)"', text)
    assert links == [f"#{alert.lower()}" for alert in alerts]
    pages = re.findall(
        r'page: "\{\{ \$externalLabels.ojs_page \}\}(?:#(\w+)(?:\?(\w+)=\{\{ \$labels.\2 \}\})?)?"', text
    )
    assert len(pages) == len(alerts)
    shown = (PAGE / "index.html").read_text("utf-8")
    for view, name in pages:
        form = shown.partition(f'id="{view}-filters"')[2].partition("</form>")[0]
        code = (PAGE / f"{view or 'app'}.js").read_text("utf-8")
        filters = code.partition("export const filters = {")[2].partition("};")[0]
        assert (
            not view
            or f'href="#{view}"' in shown
            or "export const View" in code
            or "export function View" in code
        )
        assert not name or f'name="{name}"' in form or re.search(rf"\b{name}: ", filters)
    wanted = {
        "exp_labels": {"dependency": "bank", "severity": "ticket"},
        "exp_annotations": {
            "summary": "bank has failed for five minutes: its jobs are held, and `ojs-bridge holds` says why",
            "page": "https://jobs/#waiting",
            "runbook_url": "https://docs/how-to/alerts/#ojsbreakeropen",
        },
    }
    case = {
        "interval": "1m",
        "external_labels": {"ojs_page": "https://jobs/", "ojs_docs": "https://docs"},
        "input_series": [{"series": 'ojs_breaker_open{dependency="bank"}', "values": "1x30"}],
        "alert_rule_test": [{"eval_time": "20m", "alertname": "OjsBreakerOpen", "exp_alerts": [wanted]}],
    }
    promtool(tmp_path, [case])
