// Bulk operations. Each goes on by itself; the page watches, stops and resumes them.

import { call, mayWrite, pathOf } from "./api.js";
import { addressOf } from "./place.js";
import { byId, deed, guarded, make, question, tell, trouble } from "./view.js";

const KIND = "operations";
const ACTION = { Replay: "retry", Delete: "purge", Run: "run", Move: "move", Cancel: "cancel" };
const VERB = Object.fromEntries(Object.entries(ACTION).map(([verb, action]) => [action, verb]));
// An operation that stopped or failed is offered to be resumed for so long.
const RECENT = 600_000;
const WATCH = 1_000;
// So many job types are named in a question.
const TYPES = 12;
// The operations whose end is news.
const watched = new Set();
// The operations whose letters that died again are shown.
const opened = new Map();
let changed = () => {}, timer;

export function whenEnded(work) {
  changed = work;
}

export async function begin(verb, choice) {
  const { id } = await call("POST", KIND, { body: { action: ACTION[verb], confirm: true, ...choice } });
  watched.add(id);
  await load();
}

// A server refuses to begin without consent, and tells how many it would be, of which types, and until when.
async function preview(verb, filter) {
  try {
    // The time of a move is asked for afterwards.
    const at = verb === "Move" ? { at: new Date().toISOString() } : {};
    return await call("POST", KIND, { body: { action: ACTION[verb], filter, ...at } });
  } catch (error) {
    if (error.details?.matched !== undefined) return error.details;
    throw error;
  }
}

// Does something with all of a filter, after telling what they are. What comes after the question is not among them.
export async function askForAll(verb, filter, all, title = "") {
  byId("told").textContent = "Counting what matches…";
  const { matched, by_type: types, filter: now } = await preview(verb, filter).finally(() => tell(""));
  const keep = verb === "Delete" && `To keep them first: ojs-bridge dead-letters export ${wordsOf(now)}FILE`;
  const told = [title, types && typesOf(types), filtersOf(filter) || all, keep].filter(Boolean).join("\n");
  const work = (reason) => begin(verb, { filter: now, ...reason });
  return question(told, { ...deed(verb, matched), done: "" }, work);
}

// The largest numbers of job types, in words.
export function typesOf(counts) {
  const types = Object.entries(counts).sort(([, a], [, b]) => b - a), more = types.slice(TYPES);
  const rest = more.reduce((sum, [, count]) => sum + count, 0);
  return [
    ...types.slice(0, TYPES).map(([type, count]) => `${count.toLocaleString()} × ${type}`),
    ...(rest ? [`${rest.toLocaleString()} of ${more.length.toLocaleString()} other types`] : []),
  ].join("\n");
}

const TIMES = ["since", "until"];

function filtersOf(filter) {
  const told = ([name, value]) => `${name}: ${TIMES.includes(name) ? new Date(value).toLocaleString("sv") : value}`;
  return Object.entries(filter).map(told).join("\n");
}

// A filter as options of the command line, each with a space after it.
function wordsOf(filter) {
  const quoted = (value) => `'${String(value).replaceAll("'", "'\\''")}'`;
  const given = Object.entries(filter || {}).filter(([, value]) => value);
  return given.map(([name, value]) => `--${name.replace("_", "-")} ${quoted(value)} `).join("");
}

export async function load() {
  clearTimeout(timer);
  const { operations } = await call("GET", KIND, { query: { limit: 20 } });
  const goOn = operations.filter(({ state }) => state === "running" || state === "stopping");
  const ended = operations.filter((one) => !goOn.includes(one) && watched.delete(one.id));
  for (const { id } of goOn) watched.add(id);
  byId("operations").replaceChildren(...operations.filter(isShown).map(row));
  if (goOn.length) timer = setTimeout(() => load().catch(trouble), WATCH);
  for (const operation of ended) news(operation);
  if (ended.length) await changed();
}

// A replay that is done is shown while its jobs go on, for an hour at most.
function isShown({ state, updated_at: at, jobs }) {
  const age = Date.now() - Date.parse(at), goesOn = Boolean(jobs && jobs.waiting + jobs.running);
  if (state === "done") return jobs !== null && age < (goesOn ? 6 * RECENT : RECENT);
  return !["stopped", "failed"].includes(state) || age < RECENT;
}

function news({ action, state, matched, succeeded, failed, errors, why }) {
  const stayed = failed ? `${failed} of ${matched} failed. ${errors[0]?.error || ""}` : "";
  tell(state === "failed" ? "" : deed(VERB[action], succeeded).done, [why, stayed].filter(Boolean).join(". "));
}

function row(operation) {
  const { id, action, state, succeeded, total, matched, why, jobs } = operation;
  const isOn = state === "running" || state === "stopping", canGoOn = !isOn && state !== "done";
  const bar = make("progress", { ariaLabel: `Progress of ${id}`, ...(total && { max: total, value: matched }) });
  const number = `${succeeded.toLocaleString()}${total === null ? "" : ` of ${total.toLocaleString()}`}`;
  const name = make("span", { title: id }, `${VERB[action]} ${choice(operation)}: `, make("b", {}, state), ` ${number}${jobs ? " sent" : ""}`);
  return make(
    "li", {}, name, isOn ? bar : make("span", { className: "quiet" }, why), ...became(id, jobs),
    ...(mayWrite() && state === "running" ? [act("Stop", "DELETE", pathOf(KIND, id))] : []),
    ...(mayWrite() && canGoOn ? [act("Resume", "POST", pathOf(KIND, id, "resume"))] : []),
  );
}

// What became of the jobs of a replay, with the letters of those that died again.
function became(id, jobs) {
  if (!jobs?.sent) return [];
  const { succeeded, running, waiting, discarded, died_again: died } = jobs;
  const told = [
    [succeeded, "succeeded"], [running, "running or waiting for a retry"], [waiting, "not begun"], [discarded, "discarded"],
  ].filter(([count]) => count).map(([count, what]) => `${count.toLocaleString()} ${what}`).join(", ");
  const click = () => guarded(async () => {
    if (!opened.delete(id)) opened.set(id, await lettersOf(id));
    await load();
  });
  const button = make("button", { type: "button", ariaExpanded: opened.has(id), on: { click } }, `${died.toLocaleString()} died again`);
  return [make("span", { className: "quiet" }, told), ...(died ? [button] : []), ...(opened.has(id) ? [opened.get(id)] : [])];
}

async function lettersOf(id) {
  const { jobs } = await call("GET", pathOf(KIND, id, "dead-letters"));
  const link = (job) => make("a", { href: addressOf("letters", {}, job.id), title: job.error_type }, job.id);
  return make("span", { className: "died" }, ...jobs.flatMap((job) => [link(job), " "]));
}

function choice({ kind, ids }) {
  if (ids !== null) return `${ids} selected`;
  const { until, ...filters } = kind;
  return Object.entries(filters).map(([name, value]) => `${name} ${value}`).join(", ") || "all";
}

function act(name, method, path) {
  const click = () => guarded(async () => {
    await call(method, path, method === "POST" ? { body: {} } : {});
    await load();
  });
  return make("button", { type: "button", on: { click } }, name);
}
