// The queues, whether each keeps up, and the workers with what they run and for how long.

import { age, count, cut, html, rate, Sign, span, useDesk, when } from "./ui.js";

const MOST = 4;

export function Queues({ queues, isAway }) {
  const asked = queues.filter(({ keeps_up: keeps }) => keeps !== null), kept = asked.filter((one) => one.keeps_up).length;
  const words = !asked.length ? "" : kept === asked.length ? "all keep up" : `${kept} of ${asked.length} keep up`;
  const told = isAway ? "live, from the broker" : words;
  return html`<header><h2>Queues</h2>${queues.length > 0 && html`<span class="s q">${told}</span>`}</header>
    ${queues.length ? html`<table class="fold"><thead><tr>
      <th scope="col">queue</th><th scope="col" class="num">wait</th><th scope="col" class="num">oldest</th>
      <th scope="col" class="num lo">in /s</th><th scope="col" class="num lo">out /s</th><th scope="col">keeps up</th>
      <th scope="col" class="num lo wk">workers</th></tr></thead>
      <tbody>${queues.map((one) => html`<${Queue} key=${`${one.framework}/${one.queue}`} ...${one} />`)}</tbody>
    </table>`
      : html`<p class="nothing">No queue is known.</p>`}`;
}

function Queue({ framework, queue, depth, oldest_at: oldest, paused, workers, ...rates }) {
  const { in_per_second: into, out_per_second: out, keeps_up: keeps } = rates;
  const grows = keeps === false && into !== null ? `: +${rate(Math.max(0, into - out))} /s` : "";
  return html`<tr>
    <th scope="row" class="wrap" title=${framework}>${cut(queue, 60)}</th>
    <td class=${`num ${depth ? "" : "zero"}`}>${depth === null ? "–" : count(depth)}</td>
    <td class="num">${oldest ? span(age(oldest)) : "–"}</td>
    <td class="num lo">${into === null ? "–" : rate(into)}</td><td class="num lo">${rate(out)}</td>
    <td class="nw"><${KeepsUp} ...${{ paused, keeps, grows }} /></td>
    <td class=${`num lo wk ${workers ? "" : "retried"}`}>${count(workers)}</td></tr>`;
}

function KeepsUp({ paused, keeps, grows }) {
  if (paused) return html`<span class="held"><${Sign} name="held" /> paused</span>`;
  if (keeps === false) return html`<span class="retried"><${Sign} name="slow" /> no${grows}</span>`;
  if (!keeps) return html`<span class="q">–</span>`;
  return html`<${Sign} name="succeeded" colour="succeeded" /> <span class="q">yes</span>`;
}

// Hosts first that are silent; then what each process runs, the longest first.
export function Workers({ workers, pulse, at }) {
  const silent = pulse.workers.filter(({ silent_since: since }) => since);
  const told = silent.length ? html`<span class="s retried">${silent.length} silent</span>`
    : html`<span class="s q">${count(workers.length)} seen</span>`;
  return html`<header><h2>Workers</h2>${told}</header>
    ${workers.length + silent.length ? html`<ul class="hosts">
      ${silent.map((host) => html`<${Silent} key=${`${host.framework}/${host.host}`} ...${host} />`)}
      ${workers.map((worker) => html`<${Worker} key=${worker.name} ...${worker} at=${at} />`)}</ul>`
      : html`<p class="nothing">No worker was seen in the last 90 s.</p>`}`;
}

const Silent = ({ host, framework, seen, silent_since: since }) => html`<li>
  <span class="one"><b>${cut(host, 60)}</b> <span class="q">${framework}</span></span>
  <span class="num retried"><${Sign} name="silent" />${` ${seen ? "in part " : ""}silent since ${
    when(since, false)}`}</span></li>`;

// The time that a job runs goes on between two answers, unless the store is away.
function Worker({ name, host, framework, running, at }) {
  const { away } = useDesk(), passed = away ? 0 : age(at);
  const types = [...new Set(running.map(({ type }) => type))];
  const words = types.slice(0, MOST).map((type) => {
    const [longest, ...others] = running.filter((one) => one.type === type).map(({ seconds }) => seconds);
    return `${cut(type, 60)} ${others.length ? `×${others.length + 1}, the longest ` : ""}${span(longest + passed)}`;
  });
  const more = types.length > MOST ? [`${types.length - MOST} more types`] : [];
  return html`<li><span class="one" title=${name}><b>${cut(host, 60)}</b> <span class="q">${framework}</span></span>
    <span class="num">${running.length ? `runs ${count(running.length)}` : html`<span class="q">idle</span>`}</span>
    ${running.length > 0 && html`<small>${[...words, ...more].join("; ")}</small>`}</li>`;
}
