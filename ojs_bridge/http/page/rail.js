// The rail: where one is, and the pulse, on every page. On a phone the pulse is one line under the name.

import { call } from "./api.js";
import { html, useEffect } from "./base.js";
import { set, useDesk } from "./desk.js";
import { showKeys } from "./keys.js";
import { freeze, useLive, useTick } from "./live.js";
import { addressOf, windowFor } from "./place.js";
import { Line, Pulse } from "./pulse.js";
import { clock, count, zone } from "./words.js";

const NAMES = { now: "Now", groups: "Groups", letters: "Letters", waiting: "Waiting", rates: "Rates", audit: "Audit" };
const DOTS = { bad: "%23c8402f", away: "%23855500", slow: "%23855500", well: "%231f9a7e" };

async function ask() {
  const now = await call("GET", "admin/now"), { store } = now.pulse, away = store.status === "away";
  set({ now, away: away ? { since: new Date(store.since || now.at), message: store.message || "" } : null });
  return now;
}

export function Rail({ view, filters }) {
  useLive(ask, []);
  const { now, role, away } = useDesk(), level = now?.verdict.level;
  useEffect(() => {
    if (!level) return;
    document.querySelector("link[rel=icon]").href = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' " +
      `viewBox='0 0 16 16'><circle cx='8' cy='8' r='6' fill='${DOTS[level]}'/></svg>`;
  }, [level]);
  return html`<header class="rail">
    <a class="skip" href="#main" onClick=${skip}>To the content</a>
    <div class="brand"><b>ojs-bridge</b><span class="m-only"><${Clock} /></span></div>
    <nav aria-label="Views"><ul>${Object.entries(NAMES).map(([name, words]) => html`<li>
      <a href=${addressOf(name, windowFor(name, filters))} aria-current=${name === view ? "page" : undefined}>${words}
        <${Beside} view=${name} now=${now} isAway=${Boolean(away)} /></a>
    </li>`)}</ul></nav>
    ${now && html`<${Line} now=${now} /><${Pulse} now=${now} />`}
    <${Foot} role=${role} />
  </header>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

// The number beside a view's name.
function Beside({ view, now, isAway }) {
  if (!now || !["groups", "letters", "waiting"].includes(view)) return null;
  if (isAway) return html`<span>–</span>`;
  const { waits, dead_letters: letters } = now.pulse, { retry, scheduled, held } = waits;
  const bad = now.groups.filter(({ state }) => state !== "growing").length;
  if (view === "letters") return html`<span>${count(letters)}</span>`;
  if (view === "waiting") return html`<span>${count(retry + scheduled + held)}</span>`;
  return bad > 0 && html`<span><span class="died">${bad} bad</span></span>`;
}

const Foot = ({ role }) => html`<div class="foot">
  <div><${Clock} /><${Freeze} /></div>
  <div><span>${role || "open"}</span>
    <button type="button" id="help-button" aria-label="Keys" onClick=${showKeys}>?</button></div>
</div>`;

function Freeze() {
  const { isFrozen } = useDesk();
  return html`<button type="button" id="live" onClick=${freeze}>${isFrozen ? "Go on" : "Freeze"}</button>`;
}

// What time it is, in which zone; or since when the page stands still, and why.
function Clock() {
  const { isFrozen, isHeld, failedAt, updatedAt } = useDesk(), { short, name } = zone();
  useTick();
  const as = updatedAt ? `, as of ${clock(updatedAt)}` : "", now = clock(new Date());
  const words = failedAt ? `away since ${clock(failedAt)}` : isFrozen ? `frozen${as}` : isHeld ? `waits${as}` : now;
  return html`<span><time class="live-state">${words}</time> <span title=${name}>${short}</span></span>`;
}
