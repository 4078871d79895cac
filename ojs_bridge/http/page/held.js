// The holds that are on, as cards of Now: what is held, why, and until when.

import { jobsOf, resume } from "./holds.js";
import { count, cut, guarded, html, localized, may, Sign, stamp, useDesk, when } from "./ui.js";

export function Held({ holds }) {
  useDesk();
  return html`<ul class="cards">${holds.length ? holds.map((hold) => html`<${Card} key=${hold.id} hold=${hold} />`)
    : html`<li><p class="q">Nothing is held.</p></li>`}</ul>`;
}

function Card({ hold }) {
  const { dependency, by, why, reason, until, held, probe_at: probe, since, limit_rate: limit } = hold;
  const isBreaker = hold.id.startsWith("breaker:"), word = isBreaker ? "breaker open" : limit ? "limited" : "paused";
  const whose = [by ? `By ${by}` : cut(reason, 200), why && `“${cut(why, 200)}”`, `since ${when(since, false)}`];
  const said = isBreaker ? localized(reason) : whose.filter(Boolean).join(", ");
  const again = () => guarded(() => resume(hold));
  const next = probe && Date.parse(probe) > Date.now() ? `The next probe is at ${when(probe)}.` : "";
  return html`<li data-id=${hold.id}>
    <div class="l"><b class="held"><${Sign} name="held" /></b>
      <b class="wrap">${cut(isBreaker ? dependency : jobsOf(hold), 80)}</b>
      <span class="held s nw">${word}</span><b class="nw">${count(held)} held</b></div>
    <p class="s wrap">${said}${until && `, until ${stamp(until).slice(0, 16)}`}. ${next}</p>
    ${may("write") && html`<div class="acts"><button type="button" onClick=${again}>Resume…</button></div>`}
  </li>`;
}
