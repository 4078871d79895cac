// How many runs came to which outcome over time, as charts, with marks for deploys and replays.

import { call } from "./api.js";
import { fill as fillForm, keepFilters, read, refusal } from "./place.js";
import { byId, cut, guarded, make, stamp } from "./view.js";

const DAY = 86_400_000, COLOURS = 5;
const CHARTS = [
  { title: "Succeeded", of: ["completed"] },
  { title: "Retries", of: ["retried"] },
  { title: "Deaths", of: ["dead_lettered", "discarded"] },
  { title: "Exhausted", of: ["exhausted"] },
  { title: "Lost with their worker", of: ["lost"] },
];
const COLUMNS = { succeeded: ["completed"], retries: ["retried"], deaths: ["dead_lettered", "discarded"], lost: ["lost"] };
const RUNS = ["completed", "retried", "snoozed", "dead_lettered", "discarded"];
const form = byId("rates-filters");
// The time that a click on a bar has chosen.
const state = { zoom: {}, told: "", wrong: "" };

const typed = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));

export function fill({ since, until, ...filters }, wrong = "") {
  state.zoom = since ? { since, until } : {};
  const alone = until && !since ? '"until" goes with "since"' : "", both = since && filters.within;
  state.wrong = wrong || alone || (both ? '"within" and "since" do not go together' : fillForm(form, filters));
}

export async function load() {
  const { within, ...where } = typed();
  if (state.wrong) {
    for (const id of ["rates", "rates-types"]) byId(id).replaceChildren();
    state.told = "";
    throw refusal(state.wrong);
  }
  if (read().view === "rates") keepFilters({ ...where, ...(state.zoom.since ? state.zoom : { within }) });
  const span = state.zoom.since ? state.zoom : { since: new Date(Date.now() - within * 1000).toISOString() };
  const [rates, { marks }, { operations }] = await Promise.all([
    call("GET", "rates", { query: { ...where, ...span } }),
    call("GET", "marks", { query: { since: span.since, limit: 100 } }),
    call("GET", "operations", { query: { limit: 100 } }),
  ]);
  const replays = operations.filter(({ action }) => action === "retry");
  const told = JSON.stringify([rates, marks, replays]);
  if (told === state.told) return;
  state.told = told;
  draw(rates, [
    ...marks.map(({ at, text, by }) => ({ at: Date.parse(at), text: `${text}, by ${by}` })),
    ...replays.map((one) => ({ at: Date.parse(one.began_at), text: `replay: ${one.succeeded} jobs` })),
  ]);
}

export const refresh = async () => state.wrong || load();
export const loadMore = async () => null;
export const isFree = () => !byId("rates").matches(":hover");

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
const total = (outcomes, names) => sum(names.flatMap((name) => outcomes[name] || []));

function draw(rates, marks) {
  const types = Object.entries(rates.by_type).sort(([, a], [, b]) => total(b, RUNS) - total(a, RUNS));
  const since = Date.parse(rates.since), step = rates.step_seconds * 1000;
  const steps = rates.seconds.completed.p50.length;
  const time = { since, step, steps, marks: marks.filter(({ at }) => at >= since && at < since + steps * step) };
  byId("rates").replaceChildren(
    ...CHARTS.map(({ title, of }) => chart(title, time, stacked(types, of, steps), number, sum)),
    chart("Share of retries", time, ratio(types, steps), (share) => `${Math.round(100 * share)} %`, null),
    chart("Time to success after a failure, median", time, single(rates.seconds.recovered.p50), seconds, null),
    chart("Run of a success, 95 %", time, single(rates.seconds.completed.p95), seconds, null),
    chart("After a replay: succeeded, died again", time, replayed(types, steps), number, sum),
  );
  byId("rates-types").replaceChildren(...types.map(typeRow));
  byId("rates-end").textContent = types.length ? "" : "No run was counted in this time.";
  byId("rates-out").hidden = !state.zoom.since;
}

// A chart's bars: each has its parts, from the bottom up, with the names of their colours.
const bars = (steps, partsAt) => Array.from({ length: steps }, (_, n) => partsAt(n));

function stacked(types, names, steps) {
  const at = (outcomes, n) => sum(names.map((name) => outcomes[name]?.[n] || 0));
  return bars(steps, (n) => [
    ...types.slice(0, COLOURS).map(([, outcomes], place) => ({ value: at(outcomes, n), colour: `c${place}` })),
    { value: sum(types.slice(COLOURS).map(([, outcomes]) => at(outcomes, n))), colour: "other" },
  ]);
}

function ratio(types, steps) {
  const at = (names, n) => sum(types.flatMap(([, outcomes]) => names.map((name) => outcomes[name]?.[n] || 0)));
  return bars(steps, (n) => [{ value: at(["retried"], n) / (at(RUNS, n) || 1), colour: "c0" }]);
}

const single = (values) => values.map((value) => [{ value: value || 0, colour: "c0" }]);

function replayed(types, steps) {
  const at = (name, n) => sum(types.map(([, outcomes]) => outcomes[name]?.[n] || 0));
  return bars(steps, (n) => [
    { value: at("replay_completed", n), colour: "c0" }, { value: at("replay_died", n), colour: "bad" },
  ]);
}

const number = (value) => value.toLocaleString();

function seconds(value) {
  const [size, unit] = [[3600, "h"], [60, "min"], [1, "s"]].find(([size]) => value >= size) || [0.001, "ms"];
  return `${(value / size).toLocaleString(undefined, { maximumFractionDigits: 1 })} ${unit}`;
}

// The caption tells all of the time, or what the pointer is at.
function chart(title, time, drawn, shown, adding) {
  const heights = drawn.map((parts) => sum(parts.map(({ value }) => value)));
  const most = Math.max(...heights), all = adding ? shown(adding(heights)) : `at most ${shown(most)}`;
  const value = make("b", {}, all);
  const start = (n) => time.since + n * time.step;
  const columns = drawn.map((parts, n) => make("i", { data: { n } }, ...parts.map(({ value: part, colour }) => {
    const box = make("s", { className: colour });
    box.style.height = `${most ? (100 * part) / most : 0}%`;
    return box;
  })));
  const lines = time.marks.map(({ at, text }) => {
    const line = make("u", { title: `${stamp(at)} ${cut(text, 200)}` });
    line.style.left = `${(100 * (at - time.since)) / (time.steps * time.step)}%`;
    return line;
  });
  const marked = (n) =>
    time.marks.filter(({ at }) => at >= start(n) && at < start(n + 1)).map(({ text }) => `; ${cut(text, 80)}`).join("");
  const pointed = (event) => event.target.closest("i")?.dataset.n;
  const box = make("div", {
    className: "bars", role: "img", ariaLabel: `${title}: ${all} since ${stamp(time.since)}`,
    on: {
      pointermove: (event) => {
        const n = pointed(event);
        if (n !== undefined) value.textContent = `${shown(heights[n])} from ${stamp(start(+n))}${marked(+n)}`;
      },
      pointerleave: () => { value.textContent = all; },
      click: (event) => pointed(event) !== undefined && zoom(start(+pointed(event)), time.step),
    },
  }, ...columns, ...lines);
  const axis = [0, time.steps / 2, time.steps].map((n) => make("span", {}, stamp(start(n))));
  return make(
    "figure", {}, make("figcaption", {}, `${title}: `, value), box,
    make("div", { className: "axis", ariaHidden: "true" }, ...axis),
  );
}

// The minutes of an hour, where the store still has them; else the day around it.
function zoom(at, step) {
  if (step === 60_000) return;
  const [from, to] = Date.now() - at < 23 * DAY / 24 ? [at, at + step] : [at - DAY / 2, at + DAY / 2];
  state.zoom = { since: new Date(from).toISOString(), until: new Date(to).toISOString() };
  guarded(load);
}

function typeRow([type, outcomes], place) {
  const choose = () => {
    form.elements.type.value = form.elements.type.value === type ? "" : type;
    state.wrong = "";
    guarded(load);
  };
  const dot = make("s", { className: place < COLOURS ? `c${place}` : "other" });
  const name = make("button", { type: "button", on: { click: choose } }, dot, type);
  const counts = Object.values(COLUMNS).map((names) => make("td", {}, number(total(outcomes, names))));
  const share = total(outcomes, ["retried"]) / (total(outcomes, RUNS) || 1);
  return make("tr", {}, make("th", { scope: "row" }, name), ...counts, make("td", {}, `${Math.round(100 * share)} %`));
}

let waiting;
form.addEventListener("input", ({ target }) => {
  state.wrong = "";
  if (target.name === "within") state.zoom = {};
  clearTimeout(waiting);
  waiting = setTimeout(() => guarded(load), 250);
});
form.addEventListener("reset", () => setTimeout(() => {
  fill({});
  guarded(load);
}));
form.addEventListener("submit", (event) => event.preventDefault());
byId("rates-out").addEventListener("click", () => {
  state.zoom = {};
  guarded(load);
});
