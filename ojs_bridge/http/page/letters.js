// The list of dead letters: filtered, paged as it is scrolled, selected, replayed, deleted.

import { call, mayWrite, pathOf } from "./api.js";
import { drawDeaths, drawGroups, drawTotal } from "./chart.js";
import * as detail from "./detail.js";
import { renew, timeOf } from "./live.js";
import * as operations from "./operations.js";
import { keepFilters, read } from "./place.js";
import { ago, byId, deed, guarded, isNear, make, question, when } from "./view.js";

const { KIND } = detail;
const PAGE = 100, HEAD = 20;
const state = { cursor: null, more: false, busy: false, count: 0, rows: new Map(), chosen: new Set(), generation: 0 };

const chosen = () => Object.fromEntries([...new FormData(byId("filters"))].filter(([, value]) => value));

export function filter() {
  const { within, ...rest } = chosen();
  return within ? { ...rest, since: new Date(Date.now() - within * 1000).toISOString() } : rest;
}

// Sets the filters as an address has them.
export function fill(filters) {
  for (const field of byId("filters").querySelectorAll("[name]")) field.value = filters[field.name] || "";
}

export async function load() {
  state.generation += 1;
  if (read().view === "letters") keepFilters(chosen());
  const empty = { cursor: null, more: true, busy: false, stopped: false, count: 0 };
  Object.assign(state, { ...empty, rows: new Map(), chosen: new Set() });
  byId("letters").replaceChildren();
  byId("letters-new").hidden = true;
  tellChosen();
  await Promise.all([loadMore(), loadSummary()]);
}

// Groups and chart follow the filters, but for a text, which would be looked for in every letter.
async function loadSummary() {
  const { generation } = state, { text, ...where } = filter(), isFiltered = Object.keys(where).length > 0;
  const [all, timeline, stats] = await Promise.all([
    call("GET", `${KIND}/stats`),
    call("GET", `${KIND}/timeline`, { query: where }),
    isFiltered ? call("GET", `${KIND}/stats`, { query: where }) : null,
  ]);
  if (generation !== state.generation) return;
  state.stats = JSON.stringify(all);
  drawTotal(all);
  drawGroups(stats || all, where, choose);
  drawDeaths(timeline, text);
}

// Brings the head of the list up to date, and the counts if they have changed. A text is not looked for again.
export async function refresh() {
  const list = byId("letters"), { generation } = state;
  if (!list.firstElementChild) return state.busy ? null : load();
  const [stats, page] = await Promise.all([
    call("GET", `${KIND}/stats`),
    filter().text ? null : call("GET", KIND, { query: { ...filter(), limit: HEAD } }),
  ]);
  if (generation !== state.generation || !isFree()) return;
  for (const time of list.firstElementChild.querySelectorAll("time")) time.textContent = ago(time.dateTime);
  if (page && !renew(list, page.jobs, !page.pagination.has_more, row)) return tellGap();
  for (const job of page?.jobs || []) state.rows.set(job.id, brief(job));
  state.count = list.querySelectorAll("li").length;
  tellEnd();
  loadIfNear();
  if (JSON.stringify(stats) !== state.stats) await loadSummary();
}

export const isFree = () => !state.chosen.size;

// More have come than a look at the head shows. Loading again would lose the reader's place.
function tellGap() {
  if (scrollY === 0 && !byId("letters").contains(document.activeElement)) return load();
  byId("letters-new").hidden = false;
}

export async function loadMore() {
  if (state.busy || !state.more || state.stopped) return;
  state.busy = true;
  const generation = state.generation;
  try {
    const page = await call("GET", KIND, { query: { ...filter(), limit: PAGE, cursor: state.cursor } });
    if (generation !== state.generation) return;
    byId("letters").append(make("ol", {}, ...page.jobs.map(row)));
    state.count += page.jobs.length;
    for (const job of page.jobs) state.rows.set(job.id, brief(job));
    state.cursor = page.pagination.next_cursor;
    state.more = page.pagination.has_more;
    tellEnd();
  } finally {
    if (generation === state.generation) state.busy = false;
  }
  loadIfNear();
}

// A page that does not fill the window is never scrolled; a search goes on until the window is full.
function loadIfNear() {
  if (isNear(byId("letters-end"))) requestAnimationFrame(() => guarded(loadMore));
}

// Of a job in the list only what a question tells of it: ten thousand backtraces are too many.
function brief({ id, type, errors }) {
  return { id, type, errors: errors.slice(-1).map((last) => ({ type: last.type, message: last.message })) };
}

function tellEnd() {
  const isSearch = state.more && filter().text;
  byId("letters-end").replaceChildren(
    isSearch ? `${state.count} found so far ` : state.more ? "" : state.count ? `${state.count} in all` : nothing(),
    isSearch ? make("button", { type: "button", on: { click: turn } }, state.stopped ? "Search on" : "Stop") : "",
  );
}

function turn() {
  state.stopped = !state.stopped;
  tellEnd();
  if (!state.stopped) guarded(loadMore);
}

function nothing() {
  return Object.keys(chosen()).length ? "No dead letter matches these filters." : "There is no dead letter.";
}

function row(job) {
  const box = make("input", { type: "checkbox", ariaLabel: `Select ${job.id}`, on: { change: () => pick(job, box) } });
  const click = (event) => event.target !== box && guarded(() => open(job.id));
  const last = job.errors.at(-1) || { type: "Unknown", message: "" };
  return make(
    "li",
    { tabIndex: 0, data: { id: job.id, at: timeOf(job) }, on: { click } },
    box, when(job.metadata.discarded_at), make("span", { className: "kind", title: job.type }, job.type),
    make("span", { className: "what", title: last.message }, make("code", {}, last.type), ` ${last.message}`),
    make("span", { className: "quiet" }, job.queue), make("span", { className: "quiet" }, `×${job.attempt}`),
  );
}

export const open = (id) => detail.open(id, load);

function pick(job, box) {
  if (box.checked) state.chosen.add(job.id);
  else state.chosen.delete(job.id);
  tellChosen();
}

export function pickAll(on) {
  for (const box of byId("letters").querySelectorAll("input")) if (box.checked !== on) box.click();
}

export function tellChosen() {
  const count = state.chosen.size;
  byId("selected").textContent = count ? `${count} selected` : "None selected";
  byId("select-all").checked = count > 0 && count === state.count;
  for (const id of ["replay-selected", "delete-selected"]) byId(id).disabled = !count || !mayWrite();
  for (const id of ["replay-all", "delete-all"]) byId(id).disabled = !mayWrite();
}

function choose(name, value) {
  byId("filters").elements[name].value = value;
  guarded(load);
}

// Replays or deletes the selected ones, or this one.
export async function doSelected(verb, id) {
  const ids = state.chosen.size ? [...state.chosen] : id ? [id] : [];
  if (ids.length) await ask(told(ids), verb, ids.length, { ids });
}

function told(ids) {
  const jobs = ids.map((id) => state.rows.get(id));
  if (jobs.length === 1) return detail.summary(jobs[0]);
  const counts = new Map();
  for (const { type } of jobs) counts.set(type, (counts.get(type) || 0) + 1);
  return [...counts].sort(([, a], [, b]) => b - a).map(([type, count]) => `${count} × ${type}`).join("\n");
}

// Replays or deletes all that match the filters, after telling how many they are. A text would have to be looked for
// in all of them first, so their number is not told.
export async function doAll(verb) {
  const where = filter();
  const matched = where.text ? null : await operations.count(verb, where);
  const filters = Object.entries(where).map(([name, value]) => `${name}: ${value}`).join("\n");
  await ask(filters || "Every dead letter there is: no filter is set.", verb, matched, { filter: where });
}

const ask = (text, verb, count, choice) =>
  question(text, { ...deed(verb, count), done: "" }, () => operations.begin(verb, choice));
