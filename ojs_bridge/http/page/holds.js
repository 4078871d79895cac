// The holds that are on: what they hold, whose pause it is, why, until when, and how many jobs are held.

import { ask, typed } from "./ask.js";
import {
  about, age, call, count, cut, guarded, html, localized, may, pathOf, Sign, span, stamp, useDesk, useTick, when,
} from "./ui.js";

const DAY = 86_400;
const RATE = [{ label: "Jobs a second, at most", name: "rate", type: "number", min: "0.1", max: "10000", step: "any",
  placeholder: "no limit", isFirst: true }];
const PAUSE = [
  { label: "Job type", name: "type", placeholder: "billing.charge, billing.*, or * for all", isFirst: true },
    { label: "Queue", name: "queue", placeholder: "any" },
  { label: "Type of the last error", name: "error_type", placeholder: "any, or external.stripe.*" },
    { label: "Dependency", name: "dependency", placeholder: "any, or stripe" },
  { label: "Until", name: "until", type: "datetime-local" },
];
const TOLD = "The jobs that have all that is named here do not begin, and use no attempt. Jobs that run, run on.";

export function pause(start = {}) {
  const work = (values) => call("POST", "holds", { body: typed(values, PAUSE) });
  const deed = ({ type }) => (type ? `Pause ${cut(type, 80)}` : "Pause jobs");
  return ask({ title: deed, yes: deed, no: "Do not pause", lines: [TOLD], fields: PAUSE, values: start,
    work, done: "Paused jobs" });
}

export function resume(hold) {
  const work = (values) => call("POST", pathOf("holds", hold.id, "resume"), { body: typed(values, RATE) });
  return ask({ title: "Resume the jobs", yes: "Resume the jobs", no: "Leave them held",
    lines: [`${jobsOf(hold)}: ${count(hold.held)} held.`], fields: RATE, work, done: "Resumed jobs" });
}

export const loadHolds = async () => (await call("GET", "holds")).holds;

// A hold that is on: a card of Now, and a line of what waits.
export function Hold({ hold, reload = () => null }) {
  const { id, dependency, held, limit_rate: limit } = hold, isBreaker = id.startsWith("breaker:");
  const end = () => guarded(async () => { if (await resume(hold)) await reload(); });
  return html`<li class="holder" data-id=${id}>
    <div class="l"><b class="held"><${Sign} name="held" /></b>
      <b class="wrap">${cut(isBreaker ? dependency : jobsOf(hold), 80)}</b>
      <span class="held s nw">${isBreaker ? "breaker open" : limit ? "limited" : "paused"}</span>
      <b class="nw">${count(held)} held</b></div>
    <p class="s wrap">${isBreaker ? html`<${Breaker} ...${hold} />` : html`<${Pause} ...${hold} />`}</p>
    ${may("write") && html`<div class="acts"><button type="button" onClick=${end}>Resume…</button></div>`}</li>`;
}

// Since when a breaker is open, what had failed, and when it tries again.
function Breaker({ dependency, reason, probe_at: probe }) {
  const { away } = useDesk(), left = probe ? Date.parse(probe) - Date.now() : 0;
  useTick(!away && left > 0);
  const [said] = localized(reason).replace(`the breaker of ${dependency} `, "").split(";");
  const next = left <= 0 ? "; probes run" : away ? "" : `; the next probe in ${about(left / 1000)}`;
  return `${cut(said, 300).replace(/^./, (first) => first.toUpperCase())}${probe ? next : ""}.`;
}

// Whose a pause is, since and until when, and why.
function Pause({ by, why, reason, since, until }) {
  const long = age(since), begun = long > DAY ? `still on after ${span(Math.floor(long / DAY) * DAY)}`
    : `since ${when(since, false)}`;
  return html`${by ? `By ${by}` : cut(reason, 200)}, <span class=${long > DAY ? "died" : ""} title=${stamp(since)}>
    ${begun}</span>${until && `, until ${when(until, false)}`}${why ? html`: “${cut(why, 200)}”` : "."}`;
}

// The jobs that a hold is about: a type alone needs no word.
function jobsOf({ type, queue, error_type: error, dependency }) {
  const named = Object.entries({ type, queue, error, dependency }).filter(([, value]) => value);
  return type && named.length === 1 ? type : named.map(([name, value]) => `${name} ${value}`).join(", ");
}
