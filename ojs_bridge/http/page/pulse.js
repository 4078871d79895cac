// The pulse: rates beside the usual, what waits by kind, store, broker and workers. What is old is grey, with its time.

import { html } from "./base.js";
import { Sign } from "./ui.js";
import { age, clock, count, rate, span, usually, when } from "./words.js";

const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
const depthOf = ({ queues }) => sum(queues.map(({ depth }) => depth || 0));

// A rate of deaths is bad when it is clearly more than is usual.
const isBad = ({ deaths_per_minute: now, usual_deaths_per_minute: usual }) => now >= 1 && now > 2 * (usual || 0);

export function Pulse({ now }) {
  const { pulse } = now, { waits } = pulse, isAway = pulse.store.status === "away";
  const oldest = now.queues.map(({ oldest_at: at }) => at).filter(Boolean).sort()[0];
  return html`<section class="pulse" aria-label="Pulse"><h2>Pulse${isAway && html`, as of ${clock(now.at)}`}</h2>
    <ul class="stale">
      <${Entry} name="Deaths" unit="/min" value=${rate(pulse.deaths_per_minute)} sign=${isBad(pulse) && "died"}
        told=${usually(pulse.usual_deaths_per_minute)} />
      <${Entry} name="Finished" unit="/s" value=${rate(pulse.jobs_per_second)}
        told=${usually(pulse.usual_jobs_per_second)} />
    </ul>
    <ul class="gap"><${Entry} name="In queues" value=${count(depthOf(now))}
      told=${oldest && `the oldest for ${span(age(oldest))}`} /></ul>
    <ul class="stale">
      <${Entry} name="Held" value=${count(waits.held)} sign=${waits.held > 0 && "held"} />
      <${Entry} name="Parked retries" value=${count(waits.retry)} />
      <${Entry} name="Scheduled" value=${count(waits.scheduled)} />
      ${waits.in_broker > 0 && html`<${Entry} name="Retries in broker" value=${count(waits.in_broker)} />`}
    </ul>
    <ul class="gap"><${Part} name="Store" ...${pulse.store} /><${Part} name="Broker" ...${pulse.broker} />
      <${Workers} workers=${pulse.workers} /></ul>
  </section>`;
}

const Entry = ({ name, value, unit, told, sign }) => html`<li class=${sign === "died" ? "bad" : ""}><span>${name}</span>
  <b>${sign ? html`<span class=${sign}><${Sign} name=${sign} /> ${value}</span>` : value}${unit && ` ${unit}`}</b>
  ${told && html`<small>${told}</small>`}</li>`;

const PARTS = {
  ok: ["succeeded", "succeeded"], degraded: ["slow", "retried"], away: ["died", "died"], unknown: ["steady", "q"],
};

function Part({ name, status, since }) {
  const [sign, colour] = PARTS[status] || PARTS.unknown;
  return html`<li class=${status === "away" ? "bad" : ""}><span>${name}</span>
    <b class=${colour}><${Sign} name=${sign} /> ${status === "degraded" ? "slow" : status}</b>
    ${status === "away" && since && html`<small>since ${clock(since)}</small>`}</li>`;
}

function Workers({ workers }) {
  const silent = workers.filter(({ silent_since: since }) => since), seen = sum(workers.map((one) => one.seen));
  const of = (name) => sum(workers.filter(({ framework }) => framework === name).map((one) => one.seen));
  const by = [...new Set(workers.map(({ framework }) => framework))].map((name) => `${of(name)} ${name}`);
  const told = silent.length ? `${silent[0].host} silent since ${when(silent[0].silent_since, false)}`
    : by.length > 1 && by.join(", ");
  return html`<li><span>Workers</span>
    <b class=${silent.length || !seen ? "retried" : ""}>
      ${silent.length > 0 && html`<${Sign} name="silent" />`}${` ${count(seen)}`}</b>
    ${told && html`<small>${told}</small>`}</li>`;
}

// All of it on a phone, in one line.
export function Line({ now }) {
  const { pulse } = now, { waits } = pulse, bad = isBad(pulse), seen = sum(pulse.workers.map((one) => one.seen));
  const away = ["store", "broker"].filter((name) => pulse[name].status === "away");
  const deaths = `${rate(pulse.deaths_per_minute)}/min`;
  return html`<div class="line stale" role="group" aria-label="Pulse, short">
    ${away.map((name) => html`<span><b class="died"><${Sign} name="died" /> ${name} away</b></span>`)}
    ${!away.length && (bad ? html`<span><b class="died"><${Sign} name="died" />${` ${deaths}`}</b></span>`
      : html`<span>${deaths} die</span>`)}
    ${waits.held > 0 && html`<span><b class="held"><${Sign} name="held" /> ${count(waits.held)}</b> held</span>`}
    <span><b>${count(depthOf(now))}</b> queued</span><span>${count(seen)} workers</span>
  </div>`;
}
