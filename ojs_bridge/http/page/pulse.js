// The pulse: rates beside the usual, what waits by kind, store, broker and workers. What is old is grey, with its time.

import { html } from "./base.js";
import { Sign } from "./ui.js";
import { about, age, clock, count, rate, sum, usually, when } from "./words.js";

const depthOf = ({ queues }) => sum(queues.map(({ depth }) => depth || 0));

// A rate is bad when it is clearly more than is usual.
const isHigh = (now, usual, least) => now >= least && now > 2 * (usual || 0);
const isBad = ({ deaths_per_minute: now, usual_deaths_per_minute: usual }) => isHigh(now, usual, 1);

// Whether the store was away from the first question on: nothing was told yet.
export const isBlank = ({ at, pulse: { store } }) =>
  store.status === "away" && Date.parse(at) >= Date.parse(store.since);

export function Pulse({ now }) {
  const { pulse } = now, { waits } = pulse, isAway = pulse.store.status === "away";
  const oldest = now.queues.filter(({ depth }) => depth).map(({ oldest_at: at }) => at).filter(Boolean).sort()[0];
  const { retries_per_minute: retries, usual_retries_per_minute: usualRetries } = pulse, isKnown = !isBlank(now);
  return html`<section class="pulse" aria-label="Pulse">
    <h2>Pulse${isAway && isKnown && html`, as of ${clock(now.at)}`}</h2>
    ${isKnown && html`<ul class="stale">
      <${Entry} name="Deaths" unit="/min" value=${rate(pulse.deaths_per_minute)} sign=${isBad(pulse) && "died"}
        told=${usually(pulse.usual_deaths_per_minute)} />
      <${Entry} name="Retries" unit="/min" value=${rate(retries)} told=${usually(usualRetries)}
        sign=${isHigh(retries, usualRetries, 5) && "retried"} />
      <${Entry} name="Finished" unit="/s" value=${rate(pulse.jobs_per_second)}
        told=${usually(pulse.usual_jobs_per_second)} />
    </ul>`}
    <ul class="gap"><${Entry} name="In queues" value=${count(depthOf(now))}
      told=${oldest && `the oldest for ${about(age(oldest))}`} /></ul>
    ${isKnown && html`<ul class="stale">
      <${Entry} name="Held" value=${count(waits.held)} sign=${waits.held > 0 && "held"} />
      <${Entry} name="Parked retries" value=${count(waits.retry)} />
      <${Entry} name="Scheduled" value=${count(waits.scheduled)} />
      ${waits.in_broker > 0 && html`<${Entry} name="Retries in broker" value=${count(waits.in_broker)} />`}
    </ul>`}
    <ul class="gap"><${Part} name="Store" ...${pulse.store} /><${Part} name="Broker" ...${pulse.broker} /></ul>
    ${isKnown && html`<ul class="stale"><${Workers} workers=${pulse.workers} /></ul>`}
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
  if (isBlank(now)) return html`<div class="line" role="group" aria-label="Pulse, short">
    <span><b class="died"><${Sign} name="died" /> store away</b></span><span><b>${count(depthOf(now))}</b> queued</span>
  </div>`;
  return html`<div class="line stale" role="group" aria-label="Pulse, short">
    ${away.map((name) => html`<span><b class="died"><${Sign} name="died" /> ${name} away</b></span>`)}
    ${!away.length && (bad ? html`<span><b class="died"><${Sign} name="died" />${` ${deaths}`}</b></span>`
      : html`<span>${deaths} die</span>`)}
    ${waits.held > 0 && html`<span><b class="held"><${Sign} name="held" /> ${count(waits.held)}</b> held</span>`}
    <span><b>${count(depthOf(now))}</b> queued</span><span>${count(seen)} workers</span>
  </div>`;
}
