// The page: the rail, the view that the address names, what is to be told, and the dialog that is open.

import { html, render, useEffect } from "./base.js";
import { Questions } from "./ask.js";
import * as audit from "./audit.js";
import { trouble, useDesk } from "./desk.js";
import * as groups from "./groups.js";
import { listen } from "./keys.js";
import * as letters from "./letters.js";
import { start } from "./live.js";
import * as now from "./now.js";
import { Operations } from "./operations.js";
import { addressOf, offer, usePlace } from "./place.js";
import { Rail } from "./rail.js";
import * as rates from "./rates.js";
import * as waiting from "./waiting.js";
import { clock } from "./words.js";

// A view exports `View`, which is given {id, filters}, and what its address may have: `filters`, `times`, `hasOne`.
const VIEWS = { now, groups, letters, waiting, rates, audit };
for (const [name, view] of Object.entries(VIEWS)) offer(name, view);

function App() {
  const { view, id, filters, wrong } = usePlace(), { dialog } = useDesk();
  const { View } = VIEWS[view];
  useEffect(() => trouble(null), [view, id]);
  return html`
    <${Rail} view=${view} filters=${filters} />
    <main id="main" tabindex="-1">
      <${Told} isNow=${view === "now"} />
      ${view !== "now" && html`<${Operations} />`}
      ${wrong ? html`<${NotUnderstood} view=${view} wrong=${wrong} />`
        : html`<${View} key=${`${view}/${id}`} id=${id} filters=${filters} />`}
    </main>
    ${dialog}<${Questions} />`;
}

const NotUnderstood = ({ view, wrong }) => html`<div class="note bad">
  <h1 class="h">Not understood</h1>
  <p id="trouble" role="alert">This address is not understood, and nothing is shown: ${wrong}.</p>
  <p class="do"><a class="button" href=${addressOf(view)}>Clear</a></p>
</div>`;

// What a token may not do, by its role.
const LIMITS = { reader: "This token can only read.",
  replayer: "This token can read, and replay dead letters as they are." };

// What went wrong, in one box; what was done, in one line.
function Told({ isNow }) {
  const { told, undone, wrong, away, updatedAt, role } = useDesk();
  const trouble = [undone, wrong].filter(Boolean).join(" ");
  const seenAt = updatedAt ? `What is grey is of ${clock(updatedAt)}.` : "";
  return html`
    <p id="told" role="status" class="s" hidden=${!told}>${told}</p>
    ${trouble && html`<p id="trouble" role="alert" class="note bad">${trouble}</p>`}
    ${away && !isNow && html`<p id="away" role="alert" class="note bad">
      <b>The store is away since ${clock(away.since)}.</b>${` ${seenAt} Nothing can be changed until it answers.`}</p>`}
    ${LIMITS[role] && html`<p id=${role} class="q s">${LIMITS[role]}</p>`}`;
}

listen();
addEventListener("unhandledrejection", ({ reason }) => trouble(reason));
render(html`<${App} />`, document.getElementById("app"));
start();

