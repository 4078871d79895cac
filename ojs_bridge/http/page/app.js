// Which view is shown, and the keyboard.

import { mayWrite } from "./api.js";
import * as audit from "./audit.js";
import { close } from "./detail.js";
import * as groups from "./groups.js";
import * as letters from "./letters.js";
import * as live from "./live.js";
import * as operations from "./operations.js";
import { read } from "./place.js";
import * as rates from "./rates.js";
import { byId, guarded, isNear, trouble } from "./view.js";
import * as waiting from "./waiting.js";

const views = { letters, groups, waiting, rates, audit };
const current = () => read().view;

function show() {
  const { filters, open, wrong } = read(), unopened = open && !views[current()].open ? 'nothing here can be "open"' : "";
  close();
  views[current()].fill(filters, wrong || unopened);
  for (const name of Object.keys(views)) byId(`${name}-view`).hidden = name !== current();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  return guarded(async () => {
    await Promise.all([views[current()].load(), operations.load()]);
    if (open) await views[current()].open?.(open);
  });
}

function move(step) {
  const rows = [...byId(current()).querySelectorAll("li")], at = rows.indexOf(document.activeElement?.closest("li"));
  rows[Math.min(Math.max(at + step, 0), rows.length - 1)]?.focus();
}

const here = () => document.activeElement?.closest("li")?.dataset.id;

// A key of the view that writes: what it does to the selected ones, or to the one that has the focus.
function act(key) {
  const work = views[current()].keys?.[key];
  if (work && mayWrite()) guarded(() => work(here()));
}

function open() {
  const work = views[current()].open;
  if (work && here()) guarded(() => work(here()));
}

const keys = {
  j: () => move(1),
  ArrowDown: () => move(1),
  k: () => move(-1),
  ArrowUp: () => move(-1),
  Enter: open,
  x: () => document.activeElement?.closest("li")?.querySelector("input")?.click(),
  r: () => act("r"),
  m: () => act("m"),
  d: () => act("d"),
  g: show,
  "/": () => byId(`${current()}-filters`)?.querySelector("[type=search]").focus(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const taken = event.key === "Enter" ? ", button, a, summary" : "";
  const typing = event.target.closest(`input:not([type=checkbox]), select, pre, dialog${taken}`);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

for (const button of document.querySelectorAll(".more-filters")) {
  button.addEventListener("click", () => button.form.classList.toggle("whole"));
}
document.addEventListener("role", () => {
  for (const button of document.querySelectorAll("button[data-write]")) button.disabled = !mayWrite();
});
byId("help-button").addEventListener("click", keys["?"]);
window.addEventListener("hashchange", show);
setInterval(waiting.tick, 1000);
operations.whenEnded(() => views[current()].load());
live.start(
  () => Promise.all([views[current()].refresh(), operations.load()]),
  () => views[current()].isFree(),
);

window.addEventListener("scroll", () => {
  if (isNear(byId(`${current()}-end`))) views[current()].loadMore().catch(trouble);
}, { passive: true });
show();
