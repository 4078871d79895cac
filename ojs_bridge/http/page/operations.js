// Bulk operations. Each goes on by itself in the server; the page watches, stops and resumes them, sends the rest
// after a probe, and takes a deletion back.

import { ask, typed } from "./ask.js";
import { doneOf, verbOf } from "./deeds.js";
import {
  addressOf, call, count, cut, guarded, html, many, may, pathOf, Sign, span, told, trouble, useDesk, useEffect, useLive,
  useRef, useState, when,
} from "./ui.js";

const KIND = "operations", WATCH = 1_000;
// An operation that stopped or failed is offered to be resumed for so long; a deletion can be undone for an hour.
const RECENT = 600_000, HOUR = 3_600_000;
// The operations whose end is news.
const watched = new Set(), listeners = new Set();
// The deletions that were taken back here.
const undone = new Set();
// The probes that were begun here: their end is a question.
const probes = new Set();
const RIGHTS = { retry: "replay", purge: "delete" };
const mayDo = ({ action, changes }) => may(changes?.length ? "write" : RIGHTS[action] || "write");
// What is done when one has ended; and what groups are called, by their fingerprints, as far as they were seen.
const ends = new Set();
export const names = new Map();
let all = [], timer;

// Does this whenever an operation has ended: the lists are not what they were.
export function useEnded(work) {
  const latest = useRef(work);
  latest.current = work;
  useEffect(() => {
    const end = () => latest.current();
    ends.add(end);
    return () => ends.delete(end);
  }, []);
}

export async function begin(body) {
  const operation = await call("POST", KIND, { body: { confirm: true, ...body } });
  watched.add(operation.id);
  if (body.limit) probes.add(operation.id);
  await load();
  return operation;
}

export async function load() {
  clearTimeout(timer);
  const { operations } = await call("GET", KIND, { query: { limit: 20 } });
  const goOn = operations.filter(isOn), ended = operations.filter((one) => !goOn.includes(one) &&
    watched.delete(one.id));
  for (const { id } of goOn) watched.add(id);
  all = operations.filter(isShown);
  for (const draw of listeners) draw(all);
  if (goOn.length) timer = setTimeout(() => load().catch(trouble), WATCH);
  for (const operation of ended) news(operation);
  if (ended.length) await Promise.all([...ends].map((end) => end()));
  const probe = all.find((one) => probes.has(one.id) && isLeft(one) && !goesOn(one));
  if (!probe || document.querySelector("dialog[open]")) return;
  probes.delete(probe.id);
  askRest(probe);
}

const isLeft = (one) => !isOn(one) && one.rest > 0 && !one.rest_operation;

const isOn = ({ state }) => state === "running" || state === "stopping";
const goesOn = ({ jobs }) => Boolean(jobs && jobs.waiting + jobs.running);

// A replay that is done is shown while its jobs go on, for an hour at most.
function isShown(one) {
  const { action, state, updated_at: at, jobs } = one, age = Date.now() - Date.parse(at);
  if (isOn(one)) return true;
  if (isLeft(one)) return age < HOUR;
  if (isUndoable(one)) return age < RECENT;
  if (state === "done") return Boolean(jobs) && age < (goesOn(one) ? HOUR : RECENT);
  return age < RECENT || action === "retry";
}

function news({ action, state, matched, succeeded, failed, errors, why }) {
  const stayed = failed ? `${failed} of ${matched} failed. ${errors[0]?.error || ""}` : "";
  told(state === "failed" ? "" : doneOf(action, succeeded), [why, stayed].filter(Boolean).join(". "));
}

// Those that run, or have just ended; nothing where there are none.
// The bulk operations, or the words of `none` where there is no operation.
export function Operations({ none }) {
  const [shown, set] = useState(all);
  useDesk();
  useLive(load, []);
  useEffect(() => {
    listeners.add(set);
    return () => listeners.delete(set);
  }, []);
  if (!shown.length) return none && html`<p class="nothing">${none}</p>`;
  return html`<section class="operations" aria-label="Bulk operations">
    <ol id="operations" class="cards">
    ${shown.map((one) => html`<${Row} key=${one.id} ...${one} />`)}</ol></section>`;
}

function Row(operation) {
  const { id, action, state, succeeded, total, matched, why, jobs, rest } = operation, isRunning = isOn(operation);
  const number = `${count(succeeded)}${total === null ? "" : ` of ${count(total)}`}`;
  const post = (name) => () => guarded(async () => { await call("POST", pathOf(KIND, id, name), { body: {} });
    await load(); });
  const stop = () => guarded(async () => { await call("DELETE", pathOf(KIND, id)); await load(); });
  return html`<li title=${id}>
    <div class="l"><span><${What} ...${operation} />: <b>${state}</b> ${number}${jobs ? " sent" : ""}</span>
      <span class="acts">
        ${mayDo(operation) && state === "running" && html`<button type="button" onClick=${stop}>Stop</button>`}
        ${mayDo(operation) && !isRunning && state !== "done" &&
          html`<button type="button" onClick=${post("resume")}>Resume</button>`}
        ${mayDo(operation) && isLeft(operation) && html`<button type="button" class="first"
          onClick=${() => askRest(operation)}>Send the other ${count(rest)}…</button>`}
        ${mayDo(operation) && isUndoable(operation) && html`<button type="button" onClick=${undo(id)}>Undo</button>`}
      </span></div>
    ${isRunning ? html`<progress aria-label="Progress of ${id}" max=${total || 1} value=${total ? matched : undefined}
      />` : why && html`<span class="q s">${why}</span>`}
    <${Became} id=${id} jobs=${jobs} />
  </li>`;
}

// What became of the jobs of a replay, with the letters of those that died again.
function Became({ id, jobs }) {
  const [letters, setLetters] = useState(null);
  if (!jobs?.sent) return null;
  const { succeeded, running, waiting, discarded, died_again: died } = jobs;
  const told = [[succeeded, "succeeded"], [running, "running or waiting for a retry"], [waiting, "not begun"],
    [discarded, "discarded"]];
  const words = told.filter(([n]) => n).map(([n, what]) => `${count(n)} ${what}`).join(", ");
  const open = () => guarded(async () =>
    setLetters(letters ? null : (await call("GET", pathOf(KIND, id, "dead-letters"))).jobs));
  return html`<div class="row"><span class="q s">${words}</span>
    ${died > 0 && html`<button type="button" class="bare died" aria-expanded=${Boolean(letters)}
      onClick=${open}>${count(died)} died again</button>`}
    ${letters?.map((job) =>
      html`<a class="s" href=${addressOf("letters", {}, job.id)} title=${job.id}>${job.error_type} ${job.type}</a>`)}
      </div>`;
}

// A deletion that has not been taken back yet, as far as this page knows.
const isUndoable = ({ id, action, state, succeeded, forever }) =>
  action === "purge" && !isOn({ state }) && succeeded > 0 && !forever && !undone.has(id);

const undo = (id) => () => guarded(async () => {
  const { restored, stayed, errors } = await call("POST", pathOf(KIND, id, "undo"), { body: {} });
  undone.add(id);
  const left = stayed ? `${many(stayed, "dead letter")} could not be brought back. ${errors[0]?.error || ""}` : "";
  told(`Brought ${many(restored, "dead letter")} back`, left);
  await Promise.all([load(), ...[...ends].map((end) => end())]);
});

// What it is about, in words: a group by its error, and never by its hash.
function What({ action, kind, ids, limit, newest }) {
  const { until, group, since, ...filters } = kind, given = Object.entries(filters).map(([name, value]) =>
    `${name} ${value}`);
  const link = group && html`<a href=${addressOf("groups", { since, until }, group)}>${cut(names.get(group) ||
    "one group", 80)}</a>`;
  const words = [...given, since && `since ${when(since, false)}`].filter(Boolean).join(", ");
  if (limit) return html`Probe of the ${newest ? "newest" : "oldest"} ${limit}${link && " of "}${link}${words &&
    `, ${words}`}`;
  if (ids !== null) return `${verbOf(action)} ${ids} selected`;
  return html`${verbOf(action)} ${link || words || "all"}${link && words && `, ${words}`}`;
}

// After a probe: what became of it, and whether the rest should go, as the probe went. It ends nothing to say no.
function askRest({ id, kind, rest, rate, stop_if_failing: stop, jobs }) {
  const open = jobs.running + jobs.waiting, died = jobs.died_again, isWell = !open && !died && jobs.succeeded > 0;
  const Body = () => html`<div class="tried">
      <div><b>${count(jobs.sent)}</b><span class="q s">sent</span></div>
      <div class="succeeded"><b><${Sign} name="succeeded" /> ${count(jobs.succeeded)}</b><span class="s">succeeded
        </span></div>
      <div><b class=${died ? "died" : "zero"}>${count(died)}</b><span class="q s">died again${open ?
        `, ${count(open)} not ended` : ""}</span></div>
    </div><p class="s q">${rate ? `At most ${rate} a second: ${span(rest / rate)}. ` : ""}${stop === null ?
      "" : `It stops when ${Math.round(100 * stop)} % of those that ended died again.`}</p>`;
  const send = `Send the other ${count(rest)}`;
  return ask({
    title: isWell ? `The probe went well. ${send}` : send, yes: `Send ${count(rest)}`, no: "Not now", Body,
      note: "Until then they stay letters.",
    quote: { message: names.get(kind.group) },
    work: async (values) => {
      watched.add((await call("POST", pathOf(KIND, id, "rest"), { body: typed(values) })).id);
      await load();
    },
  });
}
