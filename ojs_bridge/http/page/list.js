// A list of a view: filtered, paged as it is scrolled, brought up to date, selected.

import { call, mayWrite } from "./api.js";
import * as detail from "./detail.js";
import { renew, versionOf } from "./live.js";
import * as operations from "./operations.js";
import { fill as fillForm, keepFilters, read, refusal } from "./place.js";
import { ago, byId, deed, guarded, isNear, make, question, trouble } from "./view.js";

const PAGE = 100, HEAD = 20;

// `name` is the name of the view and of its elements, `kind` the path of its entries. `row` makes the element of an
// entry, around the box that selects it. `words` tell an empty list, and the choice of all. `more` is done with a load.
export function listOf({ name, kind, row, words, more = () => {}, pageOf = (page) => page }) {
  const place = byId(name), end = byId(`${name}-end`), form = byId(`${name}-filters`);
  const tools = byId(`${name}-actions`), gap = byId(`${name}-new`);
  const state = { generation: 0, rows: new Map(), chosen: new Set(), wrong: "" };

  const typed = () => Object.fromEntries([...new FormData(form)].filter(([, value]) => value));

  function filter() {
    const { within, ...rest } = typed();
    return within ? { ...rest, since: new Date(Date.now() - within * 1000).toISOString() } : rest;
  }

  function fill(filters, wrong) {
    state.wrong = wrong || fillForm(form, filters);
  }

  function choose(field, value) {
    state.wrong = "";
    form.elements[field].value = value;
    guarded(load);
  }

  async function load() {
    state.generation += 1;
    if (read().view === name && !state.wrong) keepFilters(typed());
    const empty = { cursor: null, more: true, busy: false, stopped: false, count: 0 };
    Object.assign(state, { ...empty, rows: new Map(), chosen: new Set() });
    place.replaceChildren();
    if (gap) gap.hidden = true;
    tellChosen();
    end.replaceChildren();
    if (state.wrong) throw refusal(state.wrong);
    await Promise.all([loadMore(), more()]);
  }

  // Brings the head of the list up to date. A text is not looked for again.
  async function refresh() {
    const { generation } = state;
    if (state.wrong) return null;
    if (!place.firstElementChild) return state.busy ? null : load();
    if (filter().text) return null;
    const page = pageOf(await call("GET", kind, { query: { ...filter(), limit: HEAD } }));
    if (generation !== state.generation || !isFree()) return null;
    for (const time of place.firstElementChild.querySelectorAll("time.ago")) time.textContent = ago(time.dateTime);
    if (!renew(place, page.jobs, !page.pagination.has_more, entry)) return tellGap();
    for (const job of page.jobs) state.rows.set(job.id, brief(job));
    state.count = place.querySelectorAll("li").length;
    tellEnd();
    return loadIfNear();
  }

  const isFree = () => !state.chosen.size;

  // More have come than a look at the head shows. Loading again would lose the reader's place.
  function tellGap() {
    if (!gap || (scrollY === 0 && !place.contains(document.activeElement))) return load();
    gap.hidden = false;
    return null;
  }

  async function loadMore() {
    if (state.busy || !state.more || state.stopped || state.wrong) return;
    state.busy = true;
    const { generation } = state;
    try {
      const page = pageOf(await call("GET", kind, { query: { ...filter(), limit: PAGE, cursor: state.cursor } }));
      if (generation !== state.generation) return;
      place.append(make("ol", {}, ...page.jobs.map(entry)));
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

  // A page that does not fill the window is never scrolled; a search goes on until the window is full. Rows have
  // their height when they have been drawn.
  function loadIfNear() {
    const check = () => isNear(end) && loadMore().catch(trouble);
    requestAnimationFrame(() => requestAnimationFrame(check));
  }

  function tellEnd() {
    const isSearch = state.more && filter().text;
    const none = Object.keys(typed()).length ? words.unmatched : words.none;
    end.replaceChildren(
      isSearch ? `${state.count} found so far ` : state.more ? "" : state.count ? `${state.count} in all` : none,
      isSearch ? make("button", { type: "button", on: { click: turn } }, state.stopped ? "Search on" : "Stop") : "",
    );
  }

  function turn() {
    state.stopped = !state.stopped;
    tellEnd();
    if (!state.stopped) guarded(loadMore);
  }

  function entry(job) {
    const box = make("input", { type: "checkbox", ariaLabel: `Select ${job.id}`, on: { change: () => pick(job, box) } });
    const li = row(job, box);
    Object.assign(li.dataset, { id: job.id, at: versionOf(job) });
    li.tabIndex = 0;
    return li;
  }

  function pick(job, box) {
    if (box.checked) state.chosen.add(job.id);
    else state.chosen.delete(job.id);
    tellChosen();
  }

  function pickAll(on) {
    for (const box of place.querySelectorAll("input")) if (box.checked !== on) box.click();
  }

  function tellChosen() {
    if (!tools) return;
    const count = state.chosen.size;
    tools.querySelector("label span").textContent = count ? `${count} selected` : "None selected";
    tools.querySelector("input").checked = count > 0 && count === state.count;
    for (const button of tools.querySelectorAll("button")) {
      button.disabled = !mayWrite() || Boolean(state.wrong) || ("chosen" in button.dataset && !count);
    }
  }

  // Does something with the selected ones, or with this one.
  async function doSelected(verb, id) {
    const ids = state.chosen.size ? [...state.chosen] : id ? [id] : [];
    if (ids.length) await ask(told(ids), verb, ids.length, { ids });
  }

  function told(ids) {
    const jobs = ids.map((id) => state.rows.get(id));
    if (jobs.length === 1) return detail.summary(jobs[0]);
    const counts = {};
    for (const { type } of jobs) counts[type] = (counts[type] || 0) + 1;
    return operations.typesOf(counts);
  }

  // Does something with all that match the filters.
  const doAll = (verb) => operations.askForAll(verb, filter(), words.all);

  function ask(text, verb, count, choice) {
    const begin = (reason) => operations.begin(verb, { ...choice, ...reason });
    return question(text, { ...deed(verb, count), done: "" }, begin);
  }

  let timer;
  form.addEventListener("input", ({ target }) => {
    state.wrong = "";
    // The window that an address had ends where another is chosen.
    if (target.name === "within") for (const name of ["since", "until"]) form.elements[name].value = "";
    clearTimeout(timer);
    timer = setTimeout(() => guarded(load), 250);
  });
  form.addEventListener("reset", () => setTimeout(() => {
    state.wrong = "";
    guarded(load);
  }));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("role", tellChosen);
  gap?.addEventListener("click", () => guarded(load));
  tools?.querySelector("input").addEventListener("change", (event) => pickAll(event.target.checked));
  for (const button of tools?.querySelectorAll("button") || []) {
    const { verb } = button.dataset;
    button.addEventListener("click", () => guarded(() => ("chosen" in button.dataset ? doSelected(verb) : doAll(verb))));
  }
  const isRefused = () => Boolean(state.wrong);
  const generation = () => state.generation;
  return { load, loadMore, refresh, fill, typed, filter, choose, isFree, isRefused, doSelected, generation };
}

// Of a job in the list only what a question tells of it: ten thousand backtraces are too many.
function brief({ id, type, errors = [] }) {
  return { id, type, errors: errors.slice(-1).map((last) => ({ type: last.type, message: last.message })) };
}
