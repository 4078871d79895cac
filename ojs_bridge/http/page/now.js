// Now: whether it is bad, what it is, and what is done about it. The rail asks for it, for every page.

import { Queues, Workers } from "./fleet.js";
import { deedsOf, nameOf, State } from "./groups.js";
import { Hold } from "./holds.js";
import { Operations } from "./operations.js";
import { isBlank } from "./pulse.js";
import {
  addressOf, Bars, count, cut, go, html, many, Menu, rate, Spark, sum, useDesk, useTitle, when,
} from "./ui.js";
import { titleOf, Verdict } from "./verdict.js";

// So many groups are shown at least, if there are steady ones.
const ROWS = 8;

export function View() {
  const { now, away } = useDesk();
  useTitle(now && titleOf(now.verdict), "Now");
  if (!now) return html`<h1 class="h">Now</h1><p class="nothing">Waits for the store.</p>`;
  const { verdict, hill, queues, workers, holds, operations, pulse, note } = now, isKnown = !isBlank(now);
  return html`<${Verdict} now=${now} />
    <div class="desk now">
      <div class="side">
        ${isKnown && html`<div class="col a"><${Hill} ...${hill} />
          <${Groups} live=${verdict.level !== "away"} groups=${now.groups} steady=${now.steady} />
          ${note && html`<p class="q s">${note}</p>`}</div>`}
        <section id="queues" class="qs" aria-label="Queues">
          <${Queues} queues=${queues} isAway=${pulse.store.status === "away"} isKnown=${isKnown} /></section>
      </div>
      ${isKnown && html`<div class="side">
        <div class="col c">
          <section class="stale" aria-label="Holds">
            <header><h2>Holds</h2><a class="s" href=${addressOf("waiting")}>What waits</a></header>
            ${holds.length ? html`<ul class="cards">${holds.map((hold) => html`
              <${Hold} key=${hold.id} hold=${hold} />`)}</ul>`
              : html`<p class="nothing">Nothing is held.</p>`}</section>
          <section class="stale" aria-label="Operations">
            <header><h2>Operations</h2><a class="s" href=${addressOf("audit")}>Audit</a></header>
            <${Operations} none=${away ? "None is known while the store is away."
              : !operations.length && "None runs."} /></section>
        </div>
        <section class="ws stale" aria-label="Workers">
          <${Workers} workers=${workers} pulse=${pulse} at=${now.at} /></section>
      </div>`}
    </div>`;
}

// Deaths and retries a minute in the last hour, over what is usual; a bar of deaths leads to its letters, a drag to
// the rates.
function Hill({ since, step_seconds: step, deaths, usual, retries, usual_retries: usualRetries, marks }) {
  const to = (view) => (from, until) => go(view, { since: from, until });
  const chart = { unit: "a minute", since, step, onZoom: to("rates"),
    marks: marks.map(({ at, text }) => ({ time: at, text })) };
  return html`<section class="charts pair stale" aria-label="Last hour">
    <${Bars} title="Deaths" ...${chart} series=${[{ label: "died", colour: "died-fill", values: deaths }]}
      usual=${usual} onBar=${to("letters")} />
    <${Bars} title="Retries" ...${chart} series=${[{ label: "retried", colour: "retried-fill", values: retries }]}
      usual=${usualRetries} /></section>`;
}

function Groups({ live, groups, steady }) {
  const rows = [...groups, ...steady.slice(0, Math.max(0, ROWS - groups.length))];
  const none = live ? "Nothing is new, nothing came back, nothing grows."
    : "None was new, had come back or grew.";
  return html`<section class="stale" aria-label="Groups">
    <header><h2>Groups of the last hour</h2><a class="s" href=${addressOf("groups")}>All groups</a></header>
    ${!groups.length && html`<p class="nothing">${none}</p>`}
    ${rows.length > 0 && html`<div class="ghead" aria-hidden="true"><span></span><span>last hour</span>
      <span class="num">letters</span><span class="num">retry now</span><span></span></div>
      <ol class="groups">${rows.map((group) => html`<${Group} key=${group.fingerprint} group=${group} />`)}</ol>`}
  </section>`;
}

function Group({ group }) {
  const { fingerprint, types, deaths, retrying = 0, message, per_minute: speed = 0, state, state_since: since } = group;
  const name = nameOf(group), href = addressOf("groups", {}, fingerprint), isSteady = state === "steady";
  const colour = isSteady ? "" : "died";
  return html`<li data-row data-id=${fingerprint}>
    <div class="what"><a class="msg" href=${href} title=${cut(name, 1000)}>${cut(name, 300)}</a>
      <p class="sub"><${State} ...${group} /><span class="one">${types.join(", ")}</span>
        ${since && !isSteady && html`<span class="q lo nw">since ${when(since, false)}</span>`}</p>
      ${message !== group.pattern && !isSteady && html`<code class="ex one" title=${cut(message, 1000)}>
        ${cut(message, 300)}</code>`}</div>
    <div class="lo"><${Spark} counts=${deaths.counts} colour=${isSteady ? "died-2" : "died"}
      label=${`${many(sum(deaths.counts), "death")} in the last hour`} /></div>
    <div class="num main-n"><span class=${`big ${group.count ? colour : "zero"}`}>${count(group.count)}</span>
      <small>${speed > 0 && `${rate(speed)} /min`}</small></div>
    <div class="num lo"><span class=${`big ${retrying ? "retried" : "zero"}`}>${count(retrying)}</span></div>
    <${Menu} label=${cut(name, 80)} items=${() => [{ text: "Open", href }, ...deedsOf(group, {}, () => null)]} />
  </li>`;
}
