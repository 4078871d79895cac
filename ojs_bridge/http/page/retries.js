// The list of parked retries, each with a countdown.

import { call, mayWrite, pathOf } from "./api.js";
import { summary } from "./detail.js";
import { renew, versionOf } from "./live.js";
import { byId, guarded, make, question } from "./view.js";

const KIND = "retries";
const PAGE = 100;
const RUN = { yes: "Run the retry now", no: "Let it wait", isDanger: false, told: "", done: "Made a retry due" };
const CANCEL = {
  yes: "Cancel the retry", no: "Keep it", isDanger: true, told: "\nIts job will never run again.",
  done: "Cancelled a retry",
};
const state = { cursor: null, more: false };

export const isFree = () => true;

export async function load() {
  Object.assign(state, { cursor: null, more: true });
  byId("retries").replaceChildren();
  await loadMore();
}

export async function loadMore() {
  if (!state.more) return;
  state.more = false;
  const page = await call("GET", KIND, { query: { limit: PAGE, cursor: state.cursor } });
  byId("retries").append(make("ol", {}, ...page.jobs.map(row)));
  state.cursor = page.pagination.next_cursor;
  state.more = page.pagination.has_more;
  tellEnd();
}

// Brings the first page up to date; the times of its retries are what changes.
export async function refresh() {
  const list = byId("retries");
  if (!list.firstElementChild) return load();
  const page = await call("GET", KIND, { query: { limit: PAGE } });
  if (!renew(list, page.jobs, !page.pagination.has_more, row)) return load();
  tellEnd();
}

function tellEnd() {
  byId("retries-end").textContent = byId("retries").querySelector("li") ? "" : "No retry is parked.";
  tick();
}

function row(job) {
  return make(
    "li", { tabIndex: 0, data: { id: job.id, at: versionOf(job) } },
    make("time", { dateTime: job.next_retry_at, title: new Date(job.next_retry_at).toLocaleString("sv") }),
    make("span", { className: "kind", title: job.type }, job.type),
    make("span", { className: "what", title: job.metadata.reason }, job.metadata.reason),
    make("span", { className: "quiet" }, job.queue),
    make("span", { className: "quiet" }, `${job.attempt} of ${job.max_attempts}`),
    make(
      "span", {},
      act("Run now", job, RUN, (body) => call("POST", pathOf(KIND, job.id, "run"), { body })), " ",
      act("Cancel", job, CANCEL, (body) => call("DELETE", pathOf(KIND, job.id), { body })),
    ),
  );
}

function act(name, job, words, work) {
  const ask = async () => {
    if (await question(summary(job) + words.told, words, work)) await guarded(load);
  };
  const className = words.isDanger ? "danger" : "";
  return make("button", { type: "button", className, disabled: !mayWrite(), on: { click: ask } }, name);
}

export function tick() {
  for (const place of byId("retries").querySelectorAll("time")) {
    const left = Math.round((Date.parse(place.dateTime) - Date.now()) / 1000);
    place.textContent = left > 0 ? `in ${clock(left)}` : "due";
  }
}

function clock(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
  return parts.map((part, n) => (n ? String(part).padStart(2, "0") : part)).join(":");
}
