// The dead letters, with their summary: groups and chart.

import { call } from "./api.js";
import { drawDeaths, drawGroups, drawTotal } from "./chart.js";
import * as detail from "./detail.js";
import { listOf } from "./list.js";
import { byId, guarded, make, when } from "./view.js";

const KIND = "dead-letter";
let known, replayable = [];
const frameworks = new Set();

const list = listOf({
  name: "letters",
  kind: KIND,
  row,
  more: loadSummary,
  words: {
    none: "There is no dead letter.", unmatched: "No dead letter matches these filters.",
    all: "Every dead letter there is: no filter is set.",
  },
});

export const { load, loadMore, fill, isFree } = list;
export const keys = { r: (id) => list.doSelected("Replay", id), d: (id) => list.doSelected("Delete", id) };
export const open = (id) => detail.open(KIND, id, load);

// Groups and chart follow the filters. With a text there are none: it would be looked for in every letter.
async function loadSummary() {
  const generation = list.generation(), { text, ...where } = list.filter(), isFiltered = Object.keys(where).length > 0;
  const [all, timeline, stats] = await Promise.all([
    call("GET", `${KIND}/stats`),
    text ? null : call("GET", `${KIND}/timeline`, { query: where }),
    isFiltered && !text ? call("GET", `${KIND}/stats`, { query: where }) : null,
  ]);
  if (generation !== list.generation()) return;
  known = JSON.stringify(all);
  drawTotal(all);
  replayable = all.replayable;
  tellUnreplayable();
  byId("retention").textContent = warning(all.retention);
  byId("summary").hidden = Boolean(text);
  if (text) return;
  drawGroups(stats || all, where, list.choose);
  drawDeaths(timeline);
}

// Says at once, and not after a question, which letters this page cannot send back.
function tellUnreplayable() {
  const others = [...frameworks].filter((name) => !replayable.includes(name)).join(" and ");
  const text = `This page cannot replay the letters of ${others}: it is served without their app or broker.`;
  byId("unreplayable").textContent = others ? text : "";
}

// What a limit of the number has deleted in the last day, or is about to delete.
function warning({ fullness = {}, overflow = 0, overflow_of: groups = {} }) {
  const keep = "An export keeps them, and so does Retention(archive=…).";
  const named = Object.entries(groups).map(([name, count]) => `${count.toLocaleString()} of ${name}`).join(", ");
  if (overflow) return `max_count has deleted ${overflow.toLocaleString()} dead letters in the last day: ${named}. ${keep}`;
  const full = Object.entries(fullness).filter(([, share]) => share >= 0.9);
  if (!full.length) return "";
  const told = full.map(([queue, share]) => `${queue === "*" ? "" : `queue ${queue} `}${Math.round(100 * share)} %`).join(", ");
  return `Dead letters are nearly as many as max_count (${told}): beyond it the largest groups lose their oldest. ${keep}`;
}

// Brings the list up to date, and the summary if the counts have changed.
export async function refresh() {
  const generation = list.generation();
  if (list.isRefused()) return;
  const [stats] = await Promise.all([call("GET", `${KIND}/stats`), list.refresh()]);
  if (generation === list.generation() && JSON.stringify(stats) !== known) await loadSummary();
}

function row(job, box) {
  if (!frameworks.has(job.metadata.framework)) {
    frameworks.add(job.metadata.framework);
    if (known) tellUnreplayable();
  }
  const click = (event) => event.target !== box && guarded(() => open(job.id));
  const last = job.errors.at(-1) || { type: "Unknown", message: "" };
  return make(
    "li", { on: { click } },
    box, when(job.metadata.discarded_at), make("span", { className: "kind", title: job.type }, job.type),
    make("span", { className: "what", title: last.message }, make("code", {}, last.type), ` ${last.message}`),
    make("span", { className: "quiet" }, job.queue), make("span", { className: "quiet" }, `×${job.attempt}`),
  );
}
