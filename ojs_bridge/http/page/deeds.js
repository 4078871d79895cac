// What can be done to dead letters and to what waits: each deed asks, begins a bulk operation, and tells its end.

import { ask, typed } from "./ask.js";
import { begin } from "./operations.js";
import { Sending, sent } from "./sending.js";
import { call, count as number, stamp, told } from "./ui.js";

const KIND = "operations";
const LETTERS = ["1 dead letter", "dead letters"], JOBS = ["the job", "jobs"];
const keep = (count) => (count === 1 ? "Keep it" : "Keep them");
const UNDO = "For an hour it can be undone.";
const DEEDS = {
  retry: { verb: "Replay", what: LETTERS, no: () => "Do not replay", done: "Replayed" },
  purge: { verb: "Delete", what: LETTERS, no: keep, isDanger: true, done: "Deleted", note: UNDO },
  run: { verb: "Run", what: JOBS, after: " now", no: (count) => (count === 1 ? "Let it wait" : "Let them wait"),
    done: "Made", end: " due" },
  move: { verb: "Move", what: JOBS, no: (count) => (count === 1 ? "Leave it" : "Leave them"), done: "Moved" },
  cancel: { verb: "Cancel", what: JOBS, no: keep, isDanger: true, note: "What is cancelled never runs again.",
    done: "Cancelled" },
};
// So many job types are named in a question.
const TYPES = 12;

export const verbOf = (action) => DEEDS[action].verb;
const what = ([one, many], count) => (count === 1 ? one : `${number(count)} ${many}`);
export const doneOf = (action, count) => `${DEEDS[action].done} ${what(DEEDS[action].what,
  count)}${DEEDS[action].end || ""}`;

// Does something with some rows, or with all of a filter, after telling what they are. What comes after the question
// is not among them.
export async function act(action, { rows, filter }, { quote, firstAt, queues, all = "" } = {}) {
  const found = rows ? countOf(rows) : await preview(action, filter), { matched, by_type: types } = found;
  if (!matched) return told("Nothing matches any more, so nothing was begun");
  const { verb, what: words, after = "", no, isDanger, note } = DEEDS[action];
  const choice = rows ? { ids: rows.map(({ id }) => id) } : { filter: found.filter };
  const isOne = types && Object.keys(types).length === 1 && quote?.type === Object.keys(types)[0];
  const known = [types && !isOne && typesOf(types), filter && (filtersOf(filter) || all)];
  const lines = [known.filter(Boolean).join("\n"), note, keepFirst(action, found.filter)];
  const deed = `${verb} ${what(words, matched)}${after}`;
  const question = { title: deed, yes: deed, no: no(matched), isDanger, lines, quote: quote || quoteOf(rows) };
  const work = (body) => begin({ action, ...choice, ...body });
  if (action === "move") return ask({ ...question, fields: AT, values: { at: inAnHour() }, work: (values) =>
    work(typed(values, AT)) });
  if (action !== "retry" || matched === 1) return ask({ ...question, work: (values) => work(typed(values)) });
  const sending = await Sending({ matched, choice, deed, firstAt, queues, canProbe: !rows });
  return ask({ ...question, ...sending, work: (values) => work({ ...sent(values, matched), ...typed(values) }) });
}

const AT = [{ label: "At", name: "at", type: "datetime-local", required: true }];
// An hour from now, in the reader's own time.
const inAnHour = () => stamp(Date.now() + 3_600_000).replace(" ", "T");

function countOf(rows) {
  const types = {};
  for (const { type } of rows) types[type] = (types[type] || 0) + 1;
  return { matched: rows.length, by_type: rows.length > 1 ? types : null };
}

const quoteOf = (rows) => (rows?.length === 1 ? { message: rows[0].message, type: rows[0].type } : {});

// A server refuses to begin without consent, and tells how many it would be, of which types, and until when.
async function preview(action, filter) {
  try {
    // The time of a move is asked for afterwards.
    return await call("POST", KIND,
      { body: { action, filter, ...(action === "move" && { at: new Date().toISOString() }) } });
  } catch (error) {
    if (error.details?.matched !== undefined) return error.details;
    throw error;
  }
}

// The largest numbers of job types, in words.
function typesOf(counts) {
  const types = Object.entries(counts).sort(([, a], [, b]) => b - a), more = types.slice(TYPES);
  const rest = more.reduce((sum, [, count]) => sum + count, 0);
  return [
    ...types.slice(0, TYPES).map(([type, count]) => `${number(count)} × ${type}`),
    ...(rest ? [`${number(rest)} of ${number(more.length)} other types`] : []),
  ].join("\n");
}

const TIMES = ["since", "until"];

function filtersOf(filter) {
  const told = ([name, value]) => (TIMES.includes(name) ? `${name}: ${stamp(value)}` : name !== "group" &&
    `${name}: ${value}`);
  return Object.entries(filter).map(told).filter(Boolean).join("\n");
}

// How what is deleted can be kept for longer than an hour.
function keepFirst(action, filter) {
  const given = Object.entries(filter || {}).filter(([, value]) => value);
  const quoted = (value) => `'${String(value).replaceAll("'", "'\\''")}'`;
  const words = given.map(([name, value]) => `--${name.replace("_", "-")} ${quoted(value)} `).join("");
  return action === "purge" && filter && `To keep them first: ojs-bridge dead-letters export ${words}FILE`;
}
