// The holds that are on: whose pause it is, why, until when, and how many jobs are held.

import { call, mayWrite, pathOf } from "./api.js";
import { age, byId, cut, guarded, make, question, stamp } from "./view.js";

const DAY = 86_400_000;
const RESUME = {
  yes: "Resume the jobs", no: "Leave them held", isDanger: false, done: "Resumed jobs",
  fields: [{ label: "Jobs a second, at most", name: "rate", type: "number", min: "0.1", max: "10000", step: "any", placeholder: "no limit" }],
};
const PAUSE = {
  yes: "Pause jobs", no: "Do not pause", isDanger: false, done: "Paused jobs",
  fields: [
    { label: "Job type", name: "type", placeholder: "billing.charge, billing.*, or * for all" },
    { label: "Queue", name: "queue", placeholder: "any" },
    { label: "Type of the last error", name: "error_type", placeholder: "any, or external.stripe.*" },
    { label: "Dependency", name: "dependency", placeholder: "any, or stripe" },
    { label: "Until", name: "until", type: "datetime-local" },
  ],
};
const TOLD = "The jobs that have all that is named here do not begin, and use no attempt. Jobs that run, run on.";
let last = "";

export async function load() {
  const { holds } = await call("GET", "holds"), told = JSON.stringify(holds);
  if (told === last) return;
  last = told;
  const list = byId("holds"), focused = list.contains(document.activeElement) && document.activeElement.closest("li").dataset.id;
  list.replaceChildren(...holds.map(row));
  [...list.children].find(({ dataset }) => dataset.id === focused)?.querySelector("button").focus();
}

function row(hold) {
  const { id, by, why, reason, since, until, held } = hold, isLong = Date.now() - Date.parse(since) > DAY;
  const ask = () => guarded(async () => {
    const work = (body) => call("POST", pathOf("holds", id, "resume"), { body });
    if (await question(`${jobs(hold)}: ${held.toLocaleString()} held.`, RESUME, work)) await load();
  });
  const words = by ? ["by ", by, why && `: ${cut(why, 200)}`] : [cut(reason, 200)];
  return make(
    "li", { data: { id } },
    make("span", { className: "kind" }, jobs(hold)), make("b", {}, `${held.toLocaleString()} held`),
    make("span", { className: "what", title: reason }, ...words),
    make("span", { className: isLong ? "danger" : "quiet", title: stamp(since) }, isLong ? `still on after ${age(since)}` : `since ${stamp(since)}`),
    ...(until ? [make("span", { className: "quiet" }, `until ${stamp(until)}`)] : []),
    make("button", { type: "button", disabled: !mayWrite(), data: { write: "" }, on: { click: ask } }, "Resume…"),
  );
}

function jobs({ type, queue, error_type: error, dependency }) {
  const named = [["type", type], ["queue", queue], ["error", error], ["dependency", dependency]].filter(([, value]) => value);
  return named.map(([name, value]) => `${name} ${value}`).join(", ");
}

byId("pause").addEventListener("click", () => guarded(async () => {
  if (await question(TOLD, PAUSE, (body) => call("POST", "holds", { body }))) await load();
}));
