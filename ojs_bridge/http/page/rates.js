// How many runs came to which outcome over time, with marks for deploys and replays; by job type, each in its colour.

import { colourFor, OTHER } from "./colours.js";
import { Filters } from "./rows.js";
import {
  Bars, call, count, cut, Dot, go, html, many, rate, span, sum, TIMES, useLive, useTitle, Window, windowOf,
  withoutWindow,
} from "./ui.js";

const { all, 2592000: month, ...short } = TIMES;
export const times = { ...short, 1209600: "Last 14 days" };
export const filters = { type: null, queue: null };

const SHOWN = 7, DAY = 86_400_000;
const RUNS = ["completed", "retried", "snoozed", "dead_lettered", "discarded"];
const DEATHS = ["dead_lettered", "discarded"];
const SEARCH = { name: "type", label: "Job type, or prefix.*" }, FIELDS = [{ name: "queue", label: "Queue" }];
const total = (outcomes, names) => sum(names.flatMap((name) => outcomes[name] || []));
const percent = (share) => `${rate(100 * share)} %`;

async function load(filters) {
  const where = { ...withoutWindow(filters), ...windowOf(filters) };
  const [rates, { marks }, { operations }] = await Promise.all([
    call("GET", "rates", { query: where }),
    call("GET", "marks", { query: { since: where.since, limit: 100 } }),
    call("GET", "operations", { query: { limit: 100 } }),
  ]);
  const replays = operations.filter(({ action }) => action === "retry");
  const named = [
    ...marks.map(({ at, text }) => ({ time: at, text })),
    ...replays.map((one) => ({ time: one.began_at, text: `replay of ${count(one.succeeded)}` })),
  ];
  const end = Date.parse(rates.since) + rates.seconds.completed.p50.length * rates.step_seconds * 1000;
  const isSeen = ({ time }) => Date.parse(time) >= Date.parse(rates.since) && Date.parse(time) < end;
  return { rates, marks: named.filter(isSeen).sort((a, b) => Date.parse(a.time) - Date.parse(b.time)) };
}

export function View({ filters }) {
  const { data } = useLive(() => load(filters), [JSON.stringify(filters)]);
  useTitle(filters.type, "Rates");
  return html`<div class="top"><h1 class="h">Rates</h1></div>
    <${Filters} view="rates" filters=${filters} fields=${FIELDS} search=${SEARCH}>
      <${Window} view="rates" filters=${filters} /><//>
    ${data ? html`<${Charts} ...${data} filters=${filters} />` : html`<p class="end q">Loading…</p>`}`;
}

function Charts({ rates, marks, filters }) {
  const types = Object.entries(rates.by_type).sort(([, a], [, b]) => total(b, RUNS) - total(a, RUNS));
  if (!types.length) return html`<p class="nothing">No run was counted in this time.</p>`;
  const { since, step_seconds: step, seconds } = rates, steps = seconds.completed.p50.length;
  const rest = withoutWindow(filters);
  const zoom = (from, to) => go("rates", { ...rest, since: from, until: to });
  const onBar = (from, to) => zoom(...around(from, to, step));
  const chart = { since, step, marks, unit: `in ${span(step)}`, onZoom: zoom, onBar };
  const lines = { ...chart, line: true, unit: "", shown: span };
  const toLetters = (from, to) => go("letters", { ...rest, since: from, until: to });
  return html`<div class="rates">
      <${Bars} title="Succeeded" ...${chart} series=${stacked(types, ["completed"], steps)} />
      <${Bars} title="Deaths" ...${chart} series=${stacked(types, DEATHS, steps)} onBar=${toLetters} />
      <${Bars} title="Retries" ...${chart} series=${stacked(types, ["retried"], steps)} />
      <${Bars} title="Share of retries" ...${lines} shown=${percent} series=${[{ label: "retries of all runs",
        colour: "retried-fill", values: ratio(types, steps) }]} />
      <${Bars} title="Run of a success" ...${lines} series=${quantiles(seconds.completed)} />
      ${seconds.recovered.p50.some(Boolean) && html`<${Bars} title="Time to success after a failure" ...${lines}
        series=${quantiles(seconds.recovered)} />`}
      ${has(types, ["replay_completed", "replay_died"]) && html`<${Bars} title="After a replay" ...${chart}
        series=${replayed(types, steps)} />`}
      ${has(types, ["lost"]) && html`<${Bars} title="Lost with their worker" ...${chart}
        series=${stacked(types, ["lost"], steps)} />`}
    </div>
    <${Table} types=${types} seconds=${rates.seconds_by_type || {}} filters=${filters} />`;
}

const has = (types, names) => types.some(([, outcomes]) => total(outcomes, names));

// What a click on a bar opens: the minutes of its hour, where the store still has them; else the day around it.
function around(from, to, step) {
  const begin = Date.parse(from), middle = (begin + Date.parse(to)) / 2;
  if (Date.now() - begin < 23 * DAY / 24) return step > 60 ? [from, to] : [begin - 300_000, begin + 360_000].map(iso);
  return [middle - DAY / 2, middle + DAY / 2].map(iso);
}
const iso = (time) => new Date(time).toISOString();

function stacked(types, names, steps) {
  const at = (outcomes, n) => sum(names.map((name) => outcomes[name]?.[n] || 0));
  const values = (some) => Array.from({ length: steps }, (_, n) => sum(some.map(([, outcomes]) => at(outcomes, n))));
  const own = types.slice(0, SHOWN).filter(([, outcomes]) => total(outcomes, names));
  const others = types.slice(SHOWN).filter(([, outcomes]) => total(outcomes, names));
  const series = own.map((one) => ({ label: cut(one[0], 40), colour: colourFor(one[0]), values: values([one]) }))
    .sort((a, b) => sum(b.values) - sum(a.values));
  if (others.length) series.push({ label: many(others.length, "other"), colour: OTHER, values: values(others) });
  return series.length ? series : [{ label: "none", colour: OTHER, values: values([]) }];
}

const quantiles = ({ p50, p95 }) => [
  { label: "p50", colour: "type-1", values: p50 }, { label: "p95", colour: "type-5", values: p95 },
];

function ratio(types, steps) {
  const at = (names, n) => sum(types.flatMap(([, outcomes]) => names.map((name) => outcomes[name]?.[n] || 0)));
  return Array.from({ length: steps }, (_, n) => at(["retried"], n) / (at(RUNS, n) || 1));
}

function replayed(types, steps) {
  const at = (name, n) => sum(types.map(([, outcomes]) => outcomes[name]?.[n] || 0));
  const of = (name) => Array.from({ length: steps }, (_, n) => at(name, n));
  return [
    { label: "succeeded", colour: "succeeded-fill", values: of("replay_completed") },
    { label: "died again", colour: "died-fill", values: of("replay_died") },
  ];
}

const COLUMNS = ["succeeded", "retries", "deaths", "lost", "share of retries", "p50", "p95"];

function Table({ types, seconds, filters }) {
  return html`<div class="scrolls"><table class="types"><thead><tr><th scope="col">job type</th>
    ${COLUMNS.map((name) => html`<th scope="col" class="num">${name}</th>`)}</tr></thead>
    <tbody>${types.map((one, n) => html`<${Type} key=${one[0]} one=${one} filters=${filters}
      colour=${n < SHOWN ? colourFor(one[0]) : OTHER} seconds=${seconds[one[0]]} />`)}</tbody>
  </table></div>`;
}

function Type({ one: [type, outcomes], filters, colour, seconds = {} }) {
  const choose = () => go("rates", { ...filters, type: filters.type === type ? "" : type });
  const counts = [["completed"], ["retried"], DEATHS, ["lost"]].map((names) => total(outcomes, names));
  const share = total(outcomes, ["retried"]) / (total(outcomes, RUNS) || 1);
  return html`<tr data-row><th scope="row">
      <button type="button" class="bare key" aria-pressed=${filters.type === type} onClick=${choose}>
      <${Dot} colour=${colour} />${cut(type, 100)}</button></th>
    ${counts.map((number) => html`<td class=${`num ${number ? "" : "zero"}`}>${count(number)}</td>`)}
    <td class="num">${percent(share)}</td>
    ${["p50", "p95"].map((name) => html`<td class="num">${seconds[name] ? span(seconds[name]) : "–"}</td>`)}</tr>`;
}
