// The holds that are on: what they hold, whose pause it is, why, until when, and how many jobs are held.

import { ask, typed } from "./ask.js";
import { age, call, count, cut, guarded, html, may, pathOf, Sign, span, stamp, when } from "./ui.js";

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
  return ask({ title: "Pause jobs", yes: "Pause jobs", no: "Do not pause", lines: [TOLD], fields: PAUSE, values: start,
    work, done: "Paused jobs" });
}

export function resume(hold) {
  const work = (values) => call("POST", pathOf("holds", hold.id, "resume"), { body: typed(values, RATE) });
  return ask({ title: "Resume the jobs", yes: "Resume the jobs", no: "Leave them held",
    lines: [`${jobsOf(hold)}: ${count(hold.held)} held.`], fields: RATE, work, done: "Resumed jobs" });
}

export const loadHolds = async () => (await call("GET", "holds")).holds;

export function Hold({ hold, reload }) {
  const { id, by, why, reason, since, until, held, probe_at: probe } = hold, long = age(since);
  const end = () => guarded(async () => { if (await resume(hold)) await reload(); });
  return html`<li class="holder" data-id=${id}><b class="held"><${Sign} name="held" /> ${jobsOf(hold)}</b>
    <span title=${reason}><b>${count(held)} held
      </b>${" "}${by ? `by ${by}${why ? `: ${cut(why, 200)}` : ""}` : cut(reason, 200)}${", "}
      <span class=${long > DAY ? "died" : "q"} title=${stamp(since)}>${long > DAY ?
        `still on after ${span(Math.floor(long / DAY) * DAY)}` : `since ${when(since, false)}`}</span>
      ${until && `, until ${stamp(until).slice(0, 16)}`}${probe && Date.parse(probe) > Date.now() &&
        `, the next probe at ${when(probe)}`}</span>
    ${may("write") && html`<button type="button" onClick=${end}>Resume…</button>`}</li>`;
}

export function jobsOf({ type, queue, error_type: error, dependency }) {
  const named = [["type", type], ["queue", queue], ["error", error], ["dependency", dependency]].filter(([, value]) =>
    value);
  return named.map(([name, value]) => `${name} ${value}`).join(", ");
}
