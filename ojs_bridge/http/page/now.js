// Now: whether it is bad, what it is, and what is done about it. The rail asks for it, for every page.

import { Queues, Workers } from "./fleet.js";
import { deedsOf, nameOf, State } from "./groups.js";
import { Held } from "./held.js";
import { Operations } from "./operations.js";
import {
  addressOf, Bars, count, cut, go, html, many, Menu, Spark, useDesk, useTitle,
} from "./ui.js";
import { titleOf, Verdict } from "./verdict.js";

export function View() {
  const { now } = useDesk();
  useTitle(now && titleOf(now.verdict), "Now");
  if (!now) return html`<h1 class="h">Now</h1><p class="nothing">Waits for the store.</p>`;
  const { verdict, hill, groups, queues, workers, holds, pulse, note } = now;
  return html`<${Verdict} verdict=${verdict} at=${now.at} store=${pulse.store} />
    <div class="desk now">
      <div class="col a"><${Hill} ...${hill} /><${Groups} groups=${groups} level=${verdict.level} />
        ${note && html`<p class="q s">${note}</p>`}</div>
      <section id="queues" class="qs" aria-label="Queues">
        <${Queues} queues=${queues} isAway=${pulse.store.status === "away"} /></section>
      <section class="ws stale" aria-label="Workers">
        <${Workers} workers=${workers} pulse=${pulse} at=${now.at} /></section>
      <div class="col c">
        <section class="stale" aria-label="Holds">
          <header><h2>Holds</h2><a class="s" href=${addressOf("waiting")}>What waits</a></header>
          <${Held} holds=${holds} /></section>
        <section class="stale" aria-label="Operations">
          <header><h2>Operations</h2><a class="s" href=${addressOf("audit")}>Audit</a></header>
          <${Operations} />${!now.operations.length && html`<p class="nothing">None runs.</p>`}</section>
      </div>
    </div>`;
}

// Deaths a minute in the last hour, over what is usual; a bar leads to its letters, a drag to its rates.
function Hill({ since, step_seconds: step, deaths, usual, marks }) {
  return html`<section class="charts stale" aria-label="Last hour"><${Bars} title="Deaths" unit="a minute" height=${168}
    series=${[{ label: "died", colour: "died-fill", values: deaths }]} usual=${usual} since=${since} step=${step}
    marks=${marks.map(({ at, text }) => ({ time: at, text }))}
    onBar=${(from, to) => go("letters", { since: from, until: to })}
    onZoom=${(from, to) => go("rates", { since: from, until: to })} /></section>`;
}

function Groups({ groups, level }) {
  const none = level === "away" ? "None was new, had come back or grew."
    : "Nothing is new, nothing came back, nothing grows.";
  return html`<section class="stale" aria-label="Groups">
    <header><h2>New, came back, growing</h2>
      <a class="s" href=${addressOf("groups")}>All groups</a></header>
    ${groups.length ? html`<div class="ghead" aria-hidden="true"><span></span><span>last hour</span>
      <span class="num">letters</span><span class="num">retry now</span><span></span></div>
      <ol class="groups">${groups.map((group) => html`<${Group} key=${group.fingerprint} group=${group} />`)}</ol>`
      : html`<p class="nothing">${none}</p>`}
  </section>`;
}

function Group({ group }) {
  const { fingerprint, types, deaths, retrying = 0, message, per_minute: rate = 0 } = group, name = nameOf(group);
  const href = addressOf("groups", {}, fingerprint), isBad = group.state !== "growing" || rate > 0;
  return html`<li data-row data-id=${fingerprint}>
    <div class="what"><a class="msg" href=${href} title=${cut(name, 1000)}>${cut(name, 300)}</a>
      <p class="sub"><${State} ...${group} /><span class="one">${types.join(", ")}</span></p>
      ${message !== group.pattern && html`<code class="ex one" title=${cut(message, 1000)}>
        ${cut(message, 300)}</code>`}</div>
    <div class="lo"><${Spark} counts=${deaths.counts} colour=${isBad ? "died" : "retried"}
      label=${`${many(deaths.counts.reduce((sum, one) => sum + one, 0), "death")} in the last hour`} /></div>
    <div class="num main-n"><span class=${`big ${group.count ? "died" : "zero"}`}>${count(group.count)}</span>
      <small>${rate ? `${count(Math.round(rate * 10) / 10)} a minute` : ""}</small></div>
    <div class="num lo"><span class=${`big ${retrying ? "retried" : "zero"}`}>${count(retrying)}</span></div>
    <${Menu} label=${cut(name, 80)} items=${() => [{ text: "Open", href }, ...deedsOf(group, {}, () => null)]} />
  </li>`;
}

