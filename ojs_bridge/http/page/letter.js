// One dead letter, or one job that waits: its error, its life, its arguments, and what can be done with it.

import { act } from "./deeds.js";
import { Edit } from "./edit.js";
import { worded } from "./groups.js";
import { Crumb } from "./rows.js";
import { useKeys } from "./keys.js";
import {
  addressOf, call, copy, count, cut, guarded, html, json, many, may, Menu, pathOf, read, Sign, span, stamp, useDesk,
  useLive, useRef, useState, useTitle, when,
} from "./ui.js";

// The most characters of a value that are shown at once.
const LONG = 5_000, TITLE = 300;
// Frames of libraries and of the interpreter.
const THEIRS = /\/(site|dist)-packages\/|\/lib\/python\d|^<frozen |^\s*File "<frozen /;
const KINDS = { retryable: "Retry", scheduled: "Scheduled", pending: "Held" };

const dueOf = (job) => job.next_retry_at || job.scheduled_at;
const lastOf = (job) => job.errors?.at(-1) || { type: "", message: "" };

// Of a job in a list only what the list and a question tell: ten thousand backtraces are too many.
export function brief(job) {
  const { type: error_type, message } = lastOf(job), { id, type, queue, attempt, max_attempts, state, args, kwargs,
    parameters, note, metadata } = job;
  const { framework, reason, discarded_at, parked_at, fingerprint } = metadata;
  return {
    id, type, queue, attempt, max_attempts, state, args, kwargs, parameters, note, framework, reason, discarded_at,
      parked_at, fingerprint,
    error_type, message, due: dueOf(job), version: dueOf(job) || discarded_at,
  };
}

// Letters open from the list, or from a group; the neighbours are those that died before and after.
export function Letter({ id }) {
  return html`<${Opened} key=${id} id=${id} path="dead-letter" view="letters" />`;
}

export function Waiter({ id }) {
  return html`<${Opened} key=${id} id=${id} path="admin/jobs" view="waiting" />`;
}

function Opened({ id, path, view }) {
  useDesk();
  const kept = useRef(null), { data, error } = useLive(() => look(kept, pathOf(path, id)), [id]);
  const { job, mark, gone: why } = data || {}, isGone = Boolean(why);
  useTitle(job && cut(worded(lastOf(job).type, lastOf(job).message) || job.type, 80), view === "letters" ?
    "Letter" : "Waiting");
  const crumb = (words) => html`<${Crumb} ...${{ view, id, filters: read().filters }}>${words}<//>`;
  const gone = isGone &&
    html`<p class="note" role="alert">${why}: it was replayed, deleted, or has run meanwhile.</p>`;
  if (!job) return error ? null : html`${crumb()}${gone || html`<p class="end q">Loading…</p>`}`;
  return html`${gone}<${view === "letters" ? Dead : Waits} ...${{ job, mark, crumb, isGone }} />`;
}

// One that has gone stays to be read as it was seen last.
async function look(kept, path) {
  try {
    const [job, { marks }] = await Promise.all([call("GET", path), call("GET", "marks", { query: { limit: 1 } })]);
    kept.current = job;
    return { job, mark: marks[0] };
  } catch (error) {
    if (error.status !== 404) throw error;
    return { job: kept.current, gone: error.message };
  }
}

function Dead({ job, mark, crumb, isGone }) {
  const { errors, metadata } = job, last = lastOf(job), row = brief(job);
  const replay = () => guarded(() => act("retry", { rows: [row] }));
  const remove = () => guarded(() => act("purge", { rows: [row] }));
  const mayReplay = may("replay") && !isGone, mayDelete = may("delete") && !isGone;
  useKeys({ r: () => mayReplay && replay(), d: () => mayDelete && remove() });
  const began = errors[0]?.occurred_at, took = began && (Date.parse(job.discarded_at) - Date.parse(began)) / 1000;
  const group = metadata.fingerprint;
  return html`${crumb(group &&
    html`<span>›</span><a href=${addressOf("groups", {}, group)}>${cut(worded(last.type, last.message), 60)}</a>`)}
    <div class="title"><div><span class="badge died">
      <${Sign} name="died" />Died ${when(job.discarded_at)} after ${many(job.attempt, "attempt")}${took > 0 ?
      ` in ${span(took)}` : ""}</span></div>
      <h1>${cut(worded(last.type, last.message) || job.type, TITLE)}</h1><${Facts} job=${job} />
      <div class="do">
        ${mayReplay && html`<button type="button" onClick=${replay}>Replay as it is <kbd>r</kbd></button>`}
        <${Menu} label="this letter" items=${() => [
          { text: "Copy id", act: () => copy(job.id, "the id") },
          { text: "Copy as JSON", act: () => copy(json(job), "the letter") },
          mayDelete && { text: "Delete letter…", danger: true, act: remove }].filter(Boolean)} />
        ${mayReplay && mark && mark.at < job.discarded_at && html`<span class="s q">
          The same code would run again: no mark since it died.</span>`}</div></div>
    <div class="desk"><div class="col"><section aria-label="Error"><header><h2>Error</h2><span class="s q">${last.type}
      </span></header><${Failure} error=${last} /></section>
      <${Life} job=${job} /></div>
      <div class="col"><${Edit} job=${job} may=${mayReplay && may("write")} /><${Policy} job=${job} /></div></div>`;
}

function Waits({ job, crumb, isGone }) {
  const items = isGone ? [] : waitingDeeds(brief(job));
  return html`${crumb()}<div class="title"><div>
    <span class="badge ${job.state === "pending" ? "held" : "retried"}">${KINDS[job.state] ||
    job.state}, due ${when(dueOf(job))}</span></div>
      <h1>${job.type}</h1><${Facts} job=${job} />
      <div class="do">${items.map((one) => html`<button type="button" key=${one.text} class=${one.danger ?
        "danger" : ""} onClick=${one.act}>${one.text}</button>`)}
        <span class="s q">${cut(job.metadata.reason, TITLE)}</span></div></div>
    <div class="desk"><div class="col">${job.errors.length > 0 && html`<section aria-label="Error"><header><h2>Error
      </h2></header><${Failure} error=${lastOf(job)} withMessage /></section>`}<${Life} job=${job} /></div>
      <div class="col"><section aria-label="Arguments"><header><h2>Arguments</h2></header><${Arguments} job=${job} />
        </section><${Policy} job=${job} /></div></div>`;
}

// What can be done with a job that waits.
export function waitingDeeds(row) {
  if (!may("write")) return [];
  const one = (text, action, danger) => ({ text, danger, act: () => guarded(() => act(action, { rows: [row] })) });
  return [one("Run now", "run"), one("Move…", "move"), one("Cancel…", "cancel", true)];
}

function Facts({ job: { id, type, queue, attempt, max_attempts: most, metadata } }) {
  const replays = metadata["ojs.replay_count"];
  return html`<p class="facts"><span><b>${type}</b></span><span>queue ${queue}</span><span>${metadata.framework}</span>
    <span>attempt ${attempt} of ${most}</span>
    ${replays > 0 && html`<span>replayed ${many(replays, "time")}</span>`}<code id="job-id"
      title=${id}>${id.length > 40 ? `${id.slice(0, 40)}…` : id}</code></p>`;
}

// A long text in a box that scrolls; a very long one has its rest behind a button.
function Long({ text, className = "" }) {
  const [isWhole, setWhole] = useState(false), box = useRef(null);
  const all = () => { setWhole(true); box.current.focus(); };
  return html`<pre ref=${box} class="long ${className}" tabindex="0">${isWhole ? text : text.slice(0, LONG)}</pre>
    ${text.length > LONG && !isWhole &&
      html`<button type="button" onClick=${all}>Show all ${count(text.length)} characters</button>`}`;
}

// An error: its words, the frames of one's own code, and behind a line those of libraries.
export function Failure({ error, job, args, withMessage }) {
  const frames = [error.backtrace ?? []].flat(), own = frames.filter((line) => !THEIRS.test(line)),
    theirs = frames.filter((line) => THEIRS.test(line));
  const message = String(error.message ?? "");
  const isLong = message.length > TITLE || message.trim().includes("\n") || withMessage || args;
  return html`<div class="example">
    ${isLong && html`<${Long} className="err" text=${args || withMessage ? `${error.type}: ${message}` : message} />`}
    ${own.length > 0 && html`<${Long} className="here" text=${own.join("\n")} />`}
    ${theirs.length > 0 && html`<details><summary>${many(theirs.length, "frame")} of libraries</summary>
      <${Long} className="there" text=${theirs.join("\n")} /></details>`}
    ${Object.keys(error.details || {}).length > 0 && html`<${Long} text=${json(error.details)} />`}
    ${args && html`<${Long} text=${argumentsText(job)} />`}
    ${!isLong && !frames.length && html`<p class="q s none">No backtrace was kept.</p>`}</div>`;
}

function argumentsText(job) {
  if (job.args === null) return job.note || "The arguments were not kept.";
  const named = [...job.args.map((value, n) => [job.parameters[n] || `args[${n}]`, value]),
    ...Object.entries(job.kwargs || {})];
  return named.map(([name, value]) => `${name}  ${JSON.stringify(value)}`).join("\n") || "no arguments";
}

export function Arguments({ job }) {
  if (job.args === null) return html`<p class="note q">${job.note || "not kept"}</p>`;
  const names = job.parameters.slice(0, job.args.length).join(", "), all = [[names ? `args: ${names}` : "args",
    job.args]];
  for (const name of ["kwargs", "meta"]) if (Object.keys(job[name] || {}).length) all.push([name, job[name]]);
  return all.map(([name, value]) => html`<p class="q s" key=${name}>${name}</p><${Long} text=${json(value)} />`);
}

// Each attempt that failed, with what was between them; the newest is the last.
function Life({ job }) {
  const { errors, metadata: { created_at: sent, parked_at: parked, reason }, max_attempts: most, state } = job;
  const end = reason ? `${cut(reason, TITLE)}: it died` : "it died";
  return html`<section aria-label="Its life"><header><h2>Its life</h2><span class="s q">${many(errors.length,
    "failed attempt")}, ${most} at most</span></header>
    <ol class="life">
      ${sent && html`<li><span class="dot q"><${Sign} name="sent" /></span><div><b>Sent</b></div>
        <time class="q nw" title=${stamp(sent)}>${when(sent)}</time></li>`}
      ${errors.map((error, n) => html`<${Attempt} key=${n} error=${error} next=${errors[n + 1]} last=${lastOf(job)}
        end=${n === errors.length - 1 && state === "discarded" && end} />`)}
      ${parked && html`<li><span class="dot q"><${Sign} name="scheduled" /></span><div><b>Parked</b>
        <p class="wait">due ${stamp(dueOf(job))}</p></div><time class="q nw" title=${stamp(parked)}>${when(parked)}
        </time></li>`}
    </ol></section>`;
}

function Attempt({ error, next, last, end }) {
  const at = error.occurred_at, wait = at && next?.occurred_at &&
    (Date.parse(next.occurred_at) - Date.parse(at)) / 1000, tone = end ? "died" : "retried";
  const isSame = error === last || JSON.stringify(textOf(error)) === JSON.stringify(textOf(last));
  return html`<li><span class="dot ${tone}"><${Sign} name=${tone} /></span>
    <div><b>${error.replay ? `Replay ${error.replay}, attempt` : "Attempt"} ${error.attempt} failed</b>
      <p class="wait">${[!end && isSame && "with the same error", wait > 0 && `the next one failed ${span(wait)} later`,
        end].filter(Boolean).join("; ")}</p>
      ${!isSame && html`<details><summary>${cut(`${error.type}: ${error.message}`, TITLE)}</summary>
          <${Failure} error=${error} /></details>`}</div>
    <time class="q nw" title=${at && stamp(at)}>${at ? when(at) : ""}</time></li>`;
}

const textOf = ({ type, message, backtrace, details }) => [type, message, backtrace, details];

function Policy({ job: { policy, schedule } }) {
  if (!policy) return null;
  const told = schedule?.length ? `${many(schedule.length, "retry", "retries")}: after ${schedule.map((seconds) =>
    span(seconds)).join(", ")}` : "No retry.";
  return html`<section aria-label="Policy"><header><h2>Policy</h2></header><p class="s">${told}</p>
    <details><summary class="s q">the whole policy</summary><${Long} text=${json(policy)} /></details></section>`;
}
