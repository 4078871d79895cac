// One group: what it is, how many it hurts and whom, one of them as it is, its letters, and what has happened.

import { deedsOf, isBad, nameOf, replay, say, State } from "./groups.js";
import { pause } from "./holds.js";
import { Failure } from "./letter.js";
import { names } from "./operations.js";
import { Crumb } from "./rows.js";
import { useKeys } from "./keys.js";
import {
  addressOf, Bars, call, count, cut, go, guarded, html, may, Menu, pathOf, rate, Sign, span, stamp, timeOf, trouble,
  useDesk, useEffect, useLive, useState, useTitle, when, Window, windowFor, windowOf, withoutWindow,
} from "./ui.js";

const KIND = "dead-letter", SHOWN = 8, VALUES = 5, SAME = 4, FEW = 20;
// An argument that is the same in nearly all of many letters is a fact, too.
const NEARLY = 0.9, MANY = 10;
// So many seconds after a mark it may be the cause.
const CAUSE = 3600;

// All that is told of a group, asked at once. Other groups of the list are its neighbours.
async function load(id, filters) {
  const where = { ...windowOf(filters), group: id };
  const [{ groups }, timeline, { jobs }, { marks }] = await Promise.all([
    call("GET", `${KIND}/groups`, { query: { ...where, muted: "true", limit: 1 } }),
    call("GET", `${KIND}/timeline`, { query: where }),
    call("GET", KIND, { query: { ...where, limit: SHOWN } }),
    call("GET", "marks", { query: { limit: 20 } }),
  ]);
  if (groups[0]) names.set(id, nameOf(groups[0]));
  const newest = jobs[0] && await call("GET", pathOf(KIND, jobs[0].id)).catch(() => null);
  return { id, group: groups[0], timeline, jobs, marks, newest };
}

export function Group({ id, filters }) {
  useDesk();
  const values = useArguments(id, filters);
  const { data, error, reload } = useLive(() => load(id, filters), [id, JSON.stringify(filters)]);
  const known = data?.id === id ? data : null, group = known?.group;
  useTitle(group && cut(nameOf(group), 80), "Group");
  useKeys({ p: () => group?.count && may("replay") && guarded(() => replay(group, filters)) });
  const crumb = html`<${Crumb} view="groups" ...${{ id, filters }}
    end=${html`<${Window} view="groups" ...${{ id, filters }} />`} />`;
  if (!known) return html`${crumb}${!error && html`<p class="end q">Loading…</p>`}`;
  if (!group) {
    return html`${crumb}<h1 class="h">No letter of this group</h1>
      <p class="end q">Nothing of it has died in this time.${" "}
      <button type="button" onClick=${() => go("groups", { ...filters, within: "all", since: "", until: "" },
        id)}>Show all of time</button></p>`;
  }
  return html`${crumb}<${Title} ...${{ group, filters, reload, values }} />
    <div class="desk"><div class="col"><${Numbers} ...${{ group, filters, marks: known.marks }} />
      ${group.count ? html`<${Deaths} ...${{ timeline: known.timeline, marks: known.marks, id, filters }} view="groups"
        onBar=${(since, until) => go("letters", { group: id, since, until })} />`
        : html`<p class="nothing">No job has died of it in this time; its jobs are retried.</p>`}
      ${known.newest && html`<${Newest} letter=${known.newest} />`}
      <${Letters} ...${{ group, jobs: known.jobs, filters }} /></div>
      <div class="col">${values && html`<${Hurt} known=${values} />`}
        <${Happened} group=${group} marks=${known.marks} /></div></div>`;
}

// The deaths over time: a drag zooms, and a bar leads to its letters.
export function Deaths({ timeline: { since, step_seconds: step, counts }, marks = [], view, id = "", filters, height,
  onBar }) {
  const zoom = (from, to) => go(view, { ...withoutWindow(filters), since: from, until: to }, id);
  return html`<${Bars} title="Died" unit="${span(step)} a bar" series=${[{ label: "died", colour: "died-fill",
    values: counts }]}
    marks=${marks.map(({ at, text }) => ({ time: at, text }))} ...${{ since, step, height, onBar }} onZoom=${zoom} />`;
}

function Title({ group, filters, reload, values }) {
  const { types, queues, frame, error_type: type, count: letters, state_since: since } = group, [one] = types;
  return html`<div class="title"><div>
    <${State} ...${group} />${since && html`<span class="q s"> since ${when(since, false)}</span>`}</div>
    <h1>${cut(nameOf(group), 300)}</h1>
    <p class="facts"><span><b>${types.join(", ")}</b></span><span>queue ${queues.join(", ")}</span><span>${type}
      </span>${frame && html`<code>${frame}</code>`}</p>
    ${letters > 1 && html`<${Fact} known=${values} />`}
    <div class="do">
      ${may("replay") && letters > 0 && html`<button type="button" class="first" onClick=${() =>
        guarded(() => replay(group, filters))}>Probe replay… <kbd>p</kbd></button>`}
      ${may("write") && html`<button type="button" onClick=${() => guarded(() => pause({ type: one }))}>Pause ${one}…
        </button>`}
      ${may("write") && group.state !== "resolved" && html`<button type="button" onClick=${() =>
        guarded(() => say("resolve", [group], reload))}>Resolve in a mark…</button>`}
      <${Menu} label="this group" items=${() => deedsOf(group, filters, reload)} /></div></div>`;
}

function Numbers({ group, filters, marks }) {
  const { count: letters, per_minute: deadly = 0, retrying = 0, first_at: first } = group;
  const bad = isBad(group) ? "died" : "";
  const told = [
    [`letters, ${timeOf(filters)}`, letters && bad, count(letters), letters ? `the last ${when(group.last_at)}` : ""],
    ["die a minute", deadly && bad, rate(deadly), ""],
    ["retry now", retrying && "retried", count(retrying), ""],
    [`first ${wordFor(group)}`, "", when(first, false), afterMark(first, marks)],
  ];
  return html`<dl class="stats">${told.map(([name, tone, value, note]) => html`<div><dt>${name}</dt>
    <dd class=${tone || (value === "0" ? "zero" : "")}>${value}<small>${note}</small></dd></div>`)}</dl>`;
}

// Without a letter a group has failures, and no death that is known.
const wordFor = (group) => (group.count ? "death" : "failure");

// How long after the mark before it something began, where that is near enough to be the cause.
function afterMark(time, marks) {
  const after = marks.map(({ at, text }) => [(Date.parse(time) - Date.parse(at)) / 1000, text])
    .filter(([seconds]) => seconds >= 0 && seconds < CAUSE).sort(([a], [b]) => a - b);
  return after.length > 0 && `${span(after[0][0])} after ${cut(after[0][1], 40)}`;
}

function Newest({ letter }) {
  return html`<section aria-label="One of them, as it is"><header><h2>The newest, as it is</h2>
    <span class="s q">letter <a href=${addressOf("letters", {}, letter.id)} title=${letter.id}>
      <code>${letter.id.slice(0, 8)}</code></a>, ${when(letter.discarded_at)}</span></header>
    <${Failure} job=${letter} error=${letter.errors.at(-1)} args /></section>`;
}

function Letters({ group, jobs, filters }) {
  const href = addressOf("letters", { ...windowFor("letters", filters), group: group.fingerprint });
  return jobs.length > 0 && html`<section class="last" aria-label="Letters"><header><h2>Letters</h2><span class="s">
    <a href=${href}>All ${count(group.count)}</a></span></header>
    <table class="fold"><thead><tr><th scope="col">died</th><th scope="col">letter</th><th scope="col">arguments</th>
      <th scope="col" class="num lo">attempts</th></tr></thead>
    <tbody>${jobs.map((job) => html`<tr key=${job.id} data-row><td class="nw">${when(job.discarded_at)}</td>
      <td><a href=${addressOf("letters", {}, job.id)} title=${job.id}><code>${job.id.slice(0, 8)}</code></a></td>
      <td class="one"><code>${cut(argumentsOf(job), 200)}</code></td><td class="num lo">${job.attempt}</td></tr>`)}
        </tbody></table></section>`;
}

// The arguments of a job in a line, by their names where they are known.
export function argumentsOf({ args, kwargs, parameters = [], note }) {
  if (args === null) return note || "not kept";
  const named = args.map((value, n) => [parameters[n], value]);
  return [...named, ...Object.entries(kwargs || {})].map(([name, value]) =>
    `${name ? `${name} ` : ""}${JSON.stringify(value)}`).join("  ");
}

// Which customers, in which country. It is counted once, and not at each turn: it takes ten thousand letters.
function useArguments(id, filters) {
  const [known, setKnown] = useState(null);
  useEffect(() => {
    const query = { ...windowOf(filters), group: id };
    call("GET", `${KIND}/by-argument`, { query }).then(setKnown).catch(trouble);
  }, [id, JSON.stringify(filters)]);
  return known;
}

// An argument that is the same in all, or in nearly all, explains the most. Its line is there before it is known.
function Fact({ known }) {
  if (!known) return html`<p class="fact q">Counts their arguments…</p>`;
  const { arguments: all, counted, of } = known, same = all.filter((one) => one.one_value).slice(0, SAME);
  const most = all.find(({ values: [{ count: n }] }) => counted >= MANY && n >= NEARLY * counted);
  const facts = (same.length ? same : most ? [most] : []).map(({ name, values: [{ value }] }, n) => html`${n > 0 &&
    " and "}<code>${called(name)} = ${cut(told(value), 80)}</code>`);
  if (!facts.length) return all.length > 0 && html`<p class="fact q">No argument is the same in all.</p>`;
  const which = counted < of ? `of the newest ${count(counted)}` : count(counted);
  return html`<p class="fact">${same.length ? `All ${which}` : `${count(most.values[0].count)} of ${which}`} have${" "}
    ${facts}.</p>`;
}

function Hurt({ known }) {
  const [name, setName] = useState(""), { arguments: all, counted, of } = known;
  const others = all.filter((one) => !one.one_value), shown = others.find((one) => one.name === name) || others[0];
  if (!shown) return null;
  const put = ({ target }) => setName(target.value), most = shown.values[0].count;
  return html`<section aria-label="Whom it hurts"><header><h2>Whom it hurts</h2>${others.length > 1
    ? html`<label class="s q">by${" "}<select aria-label="Argument" value=${shown.name} onChange=${put}>
        ${others.map((one) => html`<option value=${one.name}>${called(one.name)}</option>`)}</select></label>`
    : html`<span class="s q">by ${called(shown.name)}</span>`}</header>
    ${counted < of && html`<p class="q s">Counted: the newest ${count(counted)} of ${count(of)}.</p>`}
    ${most * FEW < counted ? html`<p class="nothing">No value stands out: none has more than ${count(most)}.</p>`
      : html`<ol>${shown.values.slice(0, VALUES).map(({ value, count: n }) => html`<li class="share" key=${told(value)}>
      <code class="one" title=${told(value)}>${cut(told(value), 80)}</code>
      <svg class="meter" height="8" aria-hidden="true"><rect class="t" width="100%" height="8" rx="2" />
        <rect class="f-ink" width="${(100 * n) / counted}%" height="8" rx="2" /></svg>
      <span class="num">${count(n)}</span></li>`)}
      ${shown.values.length > VALUES && html`<li class="share s q">and other values</li>`}</ol>`}</section>`;
}

const called = (name) => (/^\d+$/.test(name) ? `args[${name}]` : name);
const told = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// What explains it: marks, the first death, and who mended or muted it.
function Happened({ group, marks }) {
  const { first_at: first, last_at: last, resolved, muted } = group, begin = Date.parse(first) - 86_400_000;
  const word = wordFor(group), tone = word === "death" ? "died" : "retried";
  const all = [
    ...marks.filter(({ at }) => Date.parse(at) > begin).map(({ at, text, by }) => [at, "mark",
      `Mark ${text}${by ? ` by ${by}` : ""}`]),
    [first, tone, `First ${word}`], ...(last === first ? [] : [[last, tone, `Last ${word}`]]),
    ...(resolved ? [[resolved.at, "succeeded",
      `Resolved${resolved.mark ? ` in ${resolved.mark}` : ""} by ${resolved.by}`]] : []),
    ...(muted ? [[muted.at, "muted", `Muted by ${muted.by} until ${stamp(muted.until)}`]] : []),
  ].sort(([a], [b]) => Date.parse(b) - Date.parse(a));
  return html`<section aria-label="What happened"><header><h2>What happened</h2></header><ol class="happened">
    ${all.map(([at, tone, words]) => html`<li key=${at + words}><time datetime=${at} title=${stamp(at)}>${when(at,
      false)}</time>
      <span class=${tone}><${Sign} name=${tone} /> ${words}</span></li>`)}
        </ol></section>`;
}
