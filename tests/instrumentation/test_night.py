"""Which alerts fire in each of the eight faults of a night, and when; no other does.

`make night` asks the same of real workers, servers and Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.instrumentation.test_alerts import FIRES, RULES, promtool

#: The seconds between scrapes; when a fault begins and ends, and when the watching does.
STEP, BEGIN, END, LAST = 15, 600, 2400, 4500
#: The value of a series at a second; None where it is not there.
Values: TypeAlias = Callable[[int], float | None]
HOSTS = ("alder", "birch", "cedar")


def always(value: float) -> Values:
    """Return a gauge that stands."""
    return lambda _: value


def during(wrong: float | None, well: float | None, *, begin: int = BEGIN, end: int = END) -> Values:
    """Return a gauge that has another value during the fault."""
    return lambda at: wrong if begin <= at < end else well


def counts(wrong: float, well: float, *, begin: int = BEGIN, end: int = END) -> Values:
    """Return a counter that grows by so much a minute, during the fault and else."""

    def value(at: int) -> float:
        struck = max(0, min(at, end) - begin)
        return round((wrong * struck + well * (at - struck)) / 60)

    return value


def host(framework: str, name: str) -> str:
    """Return the name of the series of a host's workers."""
    return f'ojs_host_workers{{framework="{framework}",host="{name}",instance="serve:80",job="ojs"}}'


def of_store(name: str, labels: str = "") -> str:
    """Return the name of a series of `ojs-bridge serve`."""
    return f'{name}{{{labels}{"," * bool(labels)}instance="serve:80",job="ojs"}}'


NEW = of_store("ojs_groups_live", 'state="new",type="pay"')


def quiet() -> dict[str, Values]:
    """Return what Prometheus sees in a good hour: three hosts, each with a worker of both frameworks."""
    series: dict[str, Values] = {
        of_store("ojs_store_up"): always(1),
        of_store("ojs_workers_seen"): always(6),
        of_store("ojs_holds"): always(0),
        of_store("ojs_waiting_overdue_seconds"): always(2),
        of_store("ojs_dead_letter_overflow"): always(0),
        of_store("ojs_dead_letter_fullness", 'queue="*"'): always(0.1),
        of_store("ojs_breaker_open", 'dependency="bank"'): always(0),
        NEW: lambda _: None,
    }
    for framework in ("celery", "dramatiq"):
        labels = f'framework="{framework}",queue="{framework}"'
        series[of_store("ojs_broker_up", f'framework="{framework}"')] = always(1)
        series[of_store("ojs_queue_workers", labels)] = always(3)
        series[of_store("ojs_queue_backlog", labels)] = lambda at: at // STEP % 4
        series[of_store("ojs_queue_oldest_seconds", labels)] = always(1)
        series |= {host(framework, name): always(1) for name in HOSTS}
    for name in HOSTS:
        series[f'up{{instance="{name}:9191",job="workers"}}'] = always(1)
        series[f'ojs_workers_active{{instance="{name}:9191",job="workers"}}'] = always(2)
        for type_, queue in (("pay", "celery"), ("mail", "dramatiq")):
            labels = f'{{instance="{name}:9191",job="workers",queue="{queue}",type="{type_}"}}'
            series[f"ojs_job_duration_seconds_count{labels}"] = counts(100, 100)
            series[f"ojs_job_completed_total{labels}"] = counts(98, 98)
            series[f"ojs_job_retried_total{labels}"] = counts(2, 2)
            series[f"ojs_dead_letter_added_total{labels}"] = counts(0, 0)
            series[f'ojs_job_queue_time_seconds_bucket{labels[:-1]},le="600"}}'] = counts(100, 100)
            series[f'ojs_job_queue_time_seconds_bucket{labels[:-1]},le="+Inf"}}'] = counts(100, 100)
    return series


def of_worker(metric: str, name: str = "alder") -> str:
    """Return the name of a series that a worker counts of the type `pay`."""
    return f'{metric}{{instance="{name}:9191",job="workers",queue="celery",type="pay"}}'


def store_silent(begin: int = BEGIN, end: int = END) -> dict[str, Values]:
    """Return what is not there while the store does not answer."""
    gone = (
        "ojs_workers_seen",
        "ojs_holds",
        "ojs_waiting",
        "ojs_dead",
        "ojs_breaker",
        "ojs_groups",
        "ojs_queue_workers",
        "ojs_host",
    )
    return {
        name: (lambda at, well=well: None if begin <= at < end else well(at))
        for name, well in quiet().items()
        if name.startswith(gone)
    }


def server_silent(begin: int = BEGIN, end: int = END) -> dict[str, Values]:
    """Return what is not there while `ojs-bridge serve` is not."""
    return {
        name: (lambda at, well=well: None if begin <= at < end else well(at))
        for name, well in quiet().items()
        if 'job="ojs"' in name
    }


def workers_gone(*names: str, begin: int = BEGIN, end: int = END) -> dict[str, Values]:
    """Return what is otherwise while hosts are dead: the store misses them after 90 seconds."""
    found: dict[str, Values] = {}
    for framework in ("celery", "dramatiq"):
        found |= {host(framework, name): during(0, 1, begin=begin + 90, end=end) for name in names}
        labels = f'framework="{framework}",queue="{framework}"'
        found[of_store("ojs_queue_workers", labels)] = during(3 - len(names), 3, begin=begin + 90, end=end)
    found[of_store("ojs_workers_seen")] = during(6 - 2 * len(names), 6, begin=begin + 90, end=end)
    for name in names:
        found[f'up{{instance="{name}:9191",job="workers"}}'] = during(0, 1, begin=begin, end=end)
        for series, well in quiet().items():
            if f'"{name}:9191"' in series and series.startswith("ojs"):
                found[series] = lambda at, well=well: None if begin <= at < end else well(at)
    return found


def brokers_away(begin: int = BEGIN, end: int = END) -> dict[str, Values]:
    """Return what is otherwise while the broker of both frameworks is away."""
    found: dict[str, Values] = {}
    for name, well in quiet().items():
        if name.startswith("ojs_broker_up"):
            found[name] = during(0, 1, begin=begin, end=end)
        elif name.startswith(("ojs_queue_backlog", "ojs_queue_oldest")):
            found[name] = lambda at, well=well: None if begin <= at < end else well(at)
        elif "job_completed" in name or "duration" in name or "retried" in name:
            found[name] = counts(0, well(6000) / 100, begin=begin, end=end)
    # What is due cannot be published.
    found[of_store("ojs_waiting_overdue_seconds")] = lambda at: at - begin if begin <= at < end else 2
    return found


def told() -> Values:
    """Return a group of errors that is new for an hour; the store tells it within a minute."""
    return during(1, None, begin=BEGIN + 60, end=BEGIN + 3600)


def floods(at: int) -> float:
    """Return what waits when a queue gets 200 jobs a minute more than its workers take, and later fewer."""
    return max(0.0, (min(at, END) - BEGIN) * 200 / 60 - max(0, at - END) * 10)


FLOODED = 'framework="celery",queue="celery"'
BURST = BEGIN + 55
#: A fault, what is otherwise in it, and the alerts: severity, and the first and last minute after its begin.
FAULTS: dict[str, tuple[Mapping[str, Values], dict[str, tuple[str, float, float]]]] = {
    "dead dependency": (
        {
            of_worker("ojs_dead_letter_added_total"): counts(75, 0, end=BEGIN + 30),
            of_worker("ojs_job_retried_total"): counts(150, 2, end=BEGIN + 30),
            of_store("ojs_breaker_open", 'dependency="bank"'): during(1, 0, begin=BEGIN + 30),
            of_store("ojs_holds"): during(1, 0, begin=BEGIN + 30),
        },
        {"OjsBreakerOpen": ("ticket", 5.5, 29.5)},
    ),
    "dead dependency without a breaker": (
        {
            of_worker("ojs_dead_letter_added_total"): counts(75, 0),
            of_worker("ojs_job_retried_total"): counts(150, 2),
        },
        {"OjsJobsDie": ("page", 1, 31.5), "OjsManyRetries": ("ticket", 9, 31)},
    ),
    "bad deploy": (
        {of_worker("ojs_dead_letter_added_total"): counts(100, 0), NEW: told()},
        {"OjsJobsDie": ("page", 0.5, 31.5), "OjsNewErrors": ("ticket", 1, 59.5)},
    ),
    "half a fleet dead": (
        workers_gone("alder", "birch"),
        {
            "OjsHalfTheHostsSilent": ("page", 2.5, 29.5),
            "OjsHostSilent": ("ticket", 2.5, 29.5),
            "OjsTargetDown": ("ticket", 2, 29.5),
        },
    ),
    "one host dead": (
        workers_gone("alder"),
        {"OjsHostSilent": ("ticket", 2.5, 29.5), "OjsTargetDown": ("ticket", 2, 29.5)},
    ),
    "all workers dead": (
        workers_gone(*HOSTS),
        {"OjsNoWorker": ("page", 3.5, 29.5), "OjsTargetDown": ("ticket", 2, 29.5)},
    ),
    "poison": (
        {of_worker("ojs_dead_letter_added_total"): counts(2, 0, end=BEGIN + 60), NEW: told()},
        {"OjsNewErrors": ("ticket", 1, 59.5)},
    ),
    "backlog": (
        {
            of_store("ojs_queue_backlog", FLOODED): floods,
            of_store("ojs_queue_oldest_seconds", FLOODED): lambda at: floods(at) / 4,
        },
        {"OjsBacklogGrows": ("ticket", 10.5, 29.5), "OjsBacklogOld": ("ticket", 17.5, 35.5)},
    ),
    "away store": (
        {**store_silent(), of_store("ojs_store_up"): during(0, 1)},
        {"OjsStoreAway": ("page", 0.5, 29.5)},
    ),
    "away broker": (brokers_away(), {"OjsBrokerAway": ("page", 1, 29.5)}),
    "dead serve": (server_silent(), {"OjsServerGone": ("page", 2, 29.5)}),
    "55 s of deaths": (
        {of_worker("ojs_dead_letter_added_total"): counts(75, 0, end=BURST)},
        {"OjsJobsDie": ("page", 1, 2)},
    ),
    "55 s without a store": (
        {**store_silent(end=BURST), of_store("ojs_store_up"): during(0, 1, end=BURST)},
        {"OjsStoreAway": ("page", 0.5, 0.5)},
    ),
    "55 s without a broker": (brokers_away(end=BURST), {}),
    "55 s without serve": (server_silent(end=BURST), {}),
    "55 s without workers": (workers_gone(*HOSTS, end=BURST), {}),
    "55 s of retries": ({of_worker("ojs_job_retried_total"): counts(300, 2, end=BURST)}, {}),
}


def series_of(otherwise: Mapping[str, Values]) -> list[dict[str, str]]:
    """Return the series of a night as promtool reads them."""

    def values(value: Values) -> str:
        found = [value(at) for at in range(0, LAST + STEP, STEP)]
        # Prometheus knows at once that a series is gone.
        return " ".join("stale" if each is None else f"{each:g}" for each in found)

    night = {**quiet(), **otherwise}
    assert {*otherwise} <= {*quiet()}
    return [{"series": name, "values": values(value)} for name, value in night.items()]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_raises_its_alerts_and_no_other(tmp_path: Path, fault: str) -> None:
    """Minute by minute, from ten minutes before the fault until half an hour after its end."""
    otherwise, alerts = FAULTS[fault]
    asked: list[dict[str, Any]] = []
    for minute in (half / 2 for half in range(-18, (LAST - BEGIN) // 30)):
        found = [
            {"labels": f'{{alertname="{alert}",severity="{severity}"}}', "value": 1}
            for alert, (severity, first, last) in alerts.items()
            if first <= minute <= last
        ]
        asked.append(
            {
                "expr": 'group by (alertname, severity) (ALERTS{alertstate="firing"})',
                "eval_time": f"{BEGIN + minute * 60:g}s",
                "exp_samples": found,
            }
        )
    promtool(
        tmp_path, [{"interval": f"{STEP}s", "input_series": series_of(otherwise), "promql_expr_test": asked}]
    )


def test_a_page_names_what_is_wrong(tmp_path: Path) -> None:
    """The frameworks of a broker that is away, in one page; the hosts that are silent."""
    told = [
        (
            "OjsBrokerAway",
            brokers_away(),
            [
                (
                    {"job": "ojs"},
                    "The broker does not answer: jobs can be neither sent nor taken, celery, dramatiq",
                )
            ],
        ),
        (
            "OjsHalfTheHostsSilent",
            workers_gone("alder", "birch"),
            [({"job": "ojs"}, "66.67% of the hosts are silent, alder, birch")],
        ),
    ]
    tests = []
    for alert, otherwise, pages in told:
        wanted = [
            {
                "exp_labels": {**labels, "severity": "page"},
                "exp_annotations": {
                    "summary": summary,
                    "page": "https://jobs/",
                    "runbook_url": f"https://docs/how-to/alerts/#{alert.lower()}",
                },
            }
            for labels, summary in pages
        ]
        tests.append(
            {
                "interval": f"{STEP}s",
                "external_labels": {"ojs_page": "https://jobs/", "ojs_docs": "https://docs"},
                "input_series": series_of(otherwise),
                "alert_rule_test": [
                    {"eval_time": f"{BEGIN + 600}s", "alertname": alert, "exp_alerts": wanted}
                ],
            }
        )
    promtool(tmp_path, tests)


def test_a_host_whose_workers_others_replace_pages_nobody(tmp_path: Path) -> None:
    """As where each worker has a host name of its own: the dead are told as tickets, for six hours."""
    new = [f"{name}-2" for name in HOSTS]
    otherwise = workers_gone(*HOSTS)
    labels = 'instance="serve:80",job="ojs"'
    series = series_of({name: value for name, value in otherwise.items() if name.startswith("ojs_host")})
    for framework in ("celery", "dramatiq"):
        for name in new:
            series.append(
                {
                    "series": f'ojs_host_workers{{framework="{framework}",host="{name}",{labels}}}',
                    "values": f"_x{(BEGIN + 60) // STEP} 1x{(LAST - BEGIN) // STEP}",
                }
            )
    expr = 'group by (alertname) (ALERTS{alertstate="firing"})'
    found = [{"labels": '{alertname="OjsHostSilent"}', "value": 1}]
    asked = [{"expr": expr, "eval_time": f"{BEGIN + 900}s", "exp_samples": found}]
    promtool(tmp_path, [{"interval": f"{STEP}s", "input_series": series, "promql_expr_test": asked}])


def test_each_alert_is_tried() -> None:
    """Here, or alone in `test_alerts.py`."""
    tried = {alert for _, alerts in FAULTS.values() for alert in alerts} | {alert for alert, *_ in FIRES}
    assert tried == {*re.findall(r"alert: (\w+)", RULES.read_text())}
