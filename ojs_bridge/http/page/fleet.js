// The queues, whether each keeps up, and the hosts with what they run and for how long.

import { about, age, count, cut, html, many, rate, Sign, span, sum, useDesk, when } from "./ui.js";

const MOST = 4;

// Those first that do not keep up. While the store is away from the begin on, only depths are known.
export function Queues({ queues, isAway, isKnown }) {
  const isBehind = ({ keeps_up: keeps }) => keeps === false, late = queues.filter(isBehind).length;
  const words = late ? `${late} of ${queues.length} behind` : queues.every((one) => one.keeps_up) && "all keep up";
  const rows = [...queues].sort((a, b) => isBehind(b) - isBehind(a));
  return html`<header><h2>Queues</h2>${queues.length > 0 && html`<span class="s q">
      ${isAway ? "live, from the broker" : words}</span>`}</header>
    ${queues.length ? html`<table class="fold"><thead><tr>
      <th scope="col">queue</th><th scope="col" class="num">wait</th><th scope="col" class="num">oldest</th>
      ${isKnown && html`<th scope="col" class="num lo">in /s</th><th scope="col" class="num lo">out /s</th>
        <th scope="col">keeps up</th><th scope="col" class="num lo wk">workers</th>`}</tr></thead>
      <tbody>${rows.map((one) => html`<${Queue} key=${`${one.framework}/${one.queue}`} ...${one}
        isKnown=${isKnown} />`)}</tbody></table>`
      : html`<p class="nothing">No queue is known.</p>`}`;
}

function Queue({ framework, queue, depth, oldest_at: oldest, paused, workers, isKnown, ...rates }) {
  const { in_per_second: into, out_per_second: out, keeps_up: keeps } = rates;
  const grows = keeps === false && into > out ? `: +${rate(into - out)} /s` : "";
  return html`<tr>
    <th scope="row" class="wrap" title=${framework}>${cut(queue, 60)}</th>
    <td class=${`num ${depth ? "" : "zero"}`}>${depth === null ? "–" : count(depth)}</td>
    <td class="num">${oldest && depth ? about(age(oldest)) : "–"}</td>
    ${isKnown && html`<td class="num lo">${into === null ? "–" : rate(into)}</td><td class="num lo">${rate(out)}</td>
      <td class="nw"><${KeepsUp} ...${{ paused, keeps, grows }} /></td>
      <td class=${`num lo wk ${workers ? "" : "retried"}`}>${count(workers)}</td>`}</tr>`;
}

function KeepsUp({ paused, keeps, grows }) {
  if (paused) return html`<span class="held"><${Sign} name="held" /> paused</span>`;
  if (keeps === false) return html`<span class="retried"><${Sign} name="slow" /> no${grows}</span>`;
  if (!keeps) return html`<span class="q">–</span>`;
  return html`<${Sign} name="succeeded" colour="succeeded" /> <span class="q">yes</span>`;
}

// Hosts first that are silent; then what the others run; those that run nothing are one line.
export function Workers({ workers, pulse, at }) {
  const silent = pulse.workers.filter(({ silent_since: since }) => since), hosts = hostsOf(workers);
  const idle = hosts.filter(({ runs }) => !runs), busy = hosts.filter(({ runs }) => runs);
  const places = new Set(hosts.map(({ host }) => host)).size;
  const told = silent.length ? html`<span class="s retried">${silent.length} silent</span>`
    : html`<span class="s q">${count(workers.length)} on ${many(places, "host")}</span>`;
  // A host of two frameworks may be idle in one.
  const idlers = new Set(idle.map(({ host, framework }) => (busy.some((one) => one.host === host)
    ? `${host} ${framework}` : host)));
  return html`<header><h2>Workers</h2>${told}</header>
    ${hosts.length + silent.length ? html`<ul class="hosts">
      ${silent.map((host) => html`<${Silent} key=${`${host.framework}/${host.host}`} ...${host} />`)}
      ${busy.map((host) => html`<${Host} key=${`${host.framework}/${host.host}`} ...${host} at=${at} />`)}
      ${idlers.size > 0 && html`<li><span class="wrap">${cut([...idlers].join(", "), 300)}</span>
        <span class="num q">idle</span></li>`}</ul>`
      : html`<p class="nothing">No worker was seen in the last 90 s.</p>`}`;
}

// The processes of a framework on a host, as one.
function hostsOf(workers) {
  const found = Map.groupBy(workers, ({ framework, host }) => JSON.stringify([host, framework]));
  return [...found.values()].map((some) => ({ host: some[0].host, framework: some[0].framework, processes: some.length,
    runs: sum(some.map(({ runs }) => runs)), running: some.flatMap(({ running }) => running) }))
    .sort((a, b) => a.host.localeCompare(b.host));
}

const Silent = ({ host, framework, seen, silent_since: since }) => html`<li>
  <span class="one"><b>${cut(host, 60)}</b> <span class="q">${framework}</span></span>
  <span class="num retried"><${Sign} name="silent" />${` ${seen ? "in part " : ""}silent since ${
    when(since, false)}`}</span></li>`;

// The time that a job runs goes on between two answers, unless the store is away.
function Host({ host, framework, processes, runs, running, at }) {
  const { away } = useDesk(), passed = away ? 0 : age(at);
  const types = Object.entries(Object.groupBy(running, ({ type }) => type)).map(([type, jobs]) =>
    [type, jobs.length, Math.max(...jobs.map(({ seconds }) => seconds))]).sort(([, , a], [, , b]) => b - a);
  const words = types.slice(0, MOST).map(([type, n, longest]) =>
    `${cut(type, 60)} ${n > 1 ? `×${n}, up to ` : ""}${span(longest + passed).replaceAll(" ", "\u00a0")}`);
  const more = types.length > MOST ? [`${types.length - MOST} more types`] : [];
  return html`<li><span class="one"><b>${cut(host, 60)}</b>
      <span class="q"> ${framework}${processes > 1 && `, ${processes} processes`}</span></span>
    <span class="num">runs ${count(runs)}</span><small>${[...words, ...more].join("; ")}</small></li>`;
}
