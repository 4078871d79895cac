// The parked retries, each with a countdown.

import { call, mayWrite, pathOf } from "./api.js";
import * as detail from "./detail.js";
import { listOf } from "./list.js";
import { byId, deed, guarded, make, question } from "./view.js";

const KIND = "retries";
const HOUR = 3_600_000;

const list = listOf({
  name: "retries",
  kind: KIND,
  row,
  more: countShort,
  words: {
    none: "No retry is parked.", unmatched: "No retry matches these filters.",
    all: "Every parked retry there is: no filter is set.",
  },
});

export const { load, loadMore, refresh, fill, isFree } = list;
export const keys = { r: (id) => list.doSelected("Run", id), d: (id) => list.doSelected("Cancel", id) };
export const open = (id) => detail.open(KIND, id, load, buttons);

// A short wait is the broker's, and only the rates know of it.
async function countShort() {
  const generation = list.generation(), { queue, type } = list.filter();
  const since = new Date(Date.now() - HOUR).toISOString();
  const { by_type: types } = await call("GET", "rates", { query: { queue, type, since } });
  if (generation !== list.generation()) return;
  const told = Object.values(types).flatMap((outcomes) => outcomes.waits_in_broker || []);
  const count = told.reduce((all, n) => all + n, 0).toLocaleString();
  byId("retries-short").textContent = `${count} such waits began in the last hour.`;
}

function row(job, box) {
  const acts = buttons(job);
  const click = (event) => event.target !== box && !acts.includes(event.target) && guarded(() => open(job.id));
  return make(
    "li", { on: { click } }, box,
    make("time", { dateTime: job.next_retry_at, title: new Date(job.next_retry_at).toLocaleString("sv") }, left(job)),
    make("span", { className: "kind", title: job.type }, job.type),
    make("span", { className: "what", title: job.metadata.reason }, job.metadata.reason),
    make("span", { className: "quiet" }, job.queue),
    make("span", { className: "quiet" }, `${job.attempt} of ${job.max_attempts}`),
    make("span", {}, acts[0], " ", acts[1]),
  );
}

function buttons(job) {
  return [
    act("Run now", "Run", job, (body) => call("POST", pathOf(KIND, job.id, "run"), { body })),
    act("Cancel", "Cancel", job, (body) => call("DELETE", pathOf(KIND, job.id), { body })),
  ];
}

function act(name, verb, job, work) {
  const words = deed(verb, 1);
  const ask = async () => {
    if (!await question(detail.summary(job), words, work)) return;
    detail.close();
    await guarded(load);
  };
  const className = words.isDanger ? "danger" : "";
  return make("button", { type: "button", className, disabled: !mayWrite(), data: { write: "" }, on: { click: ask } }, name);
}

export function tick() {
  for (const place of byId("retries").querySelectorAll("time")) {
    place.textContent = left({ next_retry_at: place.dateTime });
  }
}

function left({ next_retry_at: at }) {
  const seconds = Math.round((Date.parse(at) - Date.now()) / 1000);
  return seconds > 0 ? `in ${clock(seconds)}` : "due";
}

function clock(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part, n) => (n ? String(part).padStart(2, "0") : part)).join(":");
}
