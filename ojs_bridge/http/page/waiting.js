// All that waits until it is due: parked retries, scheduled jobs and held ones, each with a countdown.

import { call, mayWrite, pathOf } from "./api.js";
import * as detail from "./detail.js";
import * as holds from "./holds.js";
import { listOf } from "./list.js";
import { byId, deed, guarded, make, question } from "./view.js";

const KIND = "waiting", JOBS = "admin/jobs";
const WORDS = { retryable: "Retry", scheduled: "Scheduled", pending: "Held" };

const list = listOf({
  name: KIND,
  kind: KIND,
  row,
  more: holds.load,
  pageOf: tellShort,
  words: {
    none: "Nothing waits.", unmatched: "Nothing that waits matches these filters.",
    all: "All that waits: no filter is set.",
  },
});

export const { load, loadMore, fill, isFree } = list;
export const refresh = () => Promise.all([list.refresh(), holds.load()]);
export const keys = {
  r: (id) => list.doSelected("Run", id), m: (id) => list.doSelected("Move", id), d: (id) => list.doSelected("Cancel", id),
};
export const open = (id) => detail.open(JOBS, id, load, buttons);

// What waits in the broker is no part of the list.
function tellShort(page) {
  byId("waiting-short").textContent = page.in_broker ? words(page.in_broker) : "";
  return page;
}

function words({ count, next_due_at: at }) {
  if (!count) return "None waits there now.";
  return `${count.toLocaleString()} ${count === 1 ? "waits" : "wait"} there now, the first ${left(at)}.`;
}

const dueOf = (job) => job.next_retry_at || job.scheduled_at;

function row(job, box) {
  const acts = buttons(job), due = dueOf(job), why = reason(job);
  const click = (event) => event.target !== box && !acts.includes(event.target) && guarded(() => open(job.id));
  return make(
    "li", { on: { click } }, box,
    make("time", { dateTime: due, title: new Date(due).toLocaleString("sv") }, left(due)),
    make("span", {}, WORDS[job.state]),
    make("span", { className: "kind", title: job.type }, job.type),
    make("span", { className: "what", title: why }, why),
    make("span", { className: "quiet" }, job.queue),
    make("span", { className: "quiet" }, `${job.attempt} of ${job.max_attempts}`),
    make("span", {}, ...acts.flatMap((button) => [button, " "])),
  );
}

// Why it waits. What it has failed with stands in the reason of a retry.
function reason({ state, attempt, max_attempts: most, metadata }) {
  return state === "retryable" && attempt >= most ? `Its last attempt. ${metadata.reason}` : metadata.reason;
}

function buttons(job) {
  return [
    act("Run now", "Run", job, (body) => call("POST", pathOf(KIND, job.id, "run"), { body })),
    act("Move…", "Move", job, (body) => call("POST", pathOf(KIND, job.id, "move"), { body })),
    act("Cancel", "Cancel", job, (body) => call("DELETE", pathOf("jobs", job.id), { body })),
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
  for (const place of byId(KIND).querySelectorAll("time")) place.textContent = left(place.dateTime);
}

function left(at) {
  const seconds = Math.round((Date.parse(at) - Date.now()) / 1000);
  return seconds > 0 ? `in ${clock(seconds)}` : "due";
}

function clock(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part, n) => (n ? String(part).padStart(2, "0") : part)).join(":");
}
