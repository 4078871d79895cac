// Which view is shown, and the keyboard.

import { mayWrite } from "./api.js";
import { close } from "./detail.js";
import * as letters from "./letters.js";
import * as live from "./live.js";
import * as operations from "./operations.js";
import { read } from "./place.js";
import * as retries from "./retries.js";
import { byId, guarded, isNear } from "./view.js";

const views = { letters, retries };
const current = () => read().view;

function show() {
  const { filters, open } = read();
  close();
  if (current() === "letters") letters.fill(filters);
  for (const name of Object.keys(views)) byId(`${name}-view`).hidden = name !== current();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${current()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  return guarded(async () => {
    await Promise.all([views[current()].load(), operations.load()]);
    if (open) await letters.open(open);
  });
}

function move(step) {
  const rows = [...byId(current()).querySelectorAll("li")], at = rows.indexOf(document.activeElement?.closest("li"));
  rows[Math.min(Math.max(at + step, 0), rows.length - 1)]?.focus();
}

const here = () => document.activeElement?.closest("li")?.dataset.id;

const keys = {
  j: () => move(1),
  ArrowDown: () => move(1),
  k: () => move(-1),
  ArrowUp: () => move(-1),
  Enter: () => here() && current() === "letters" && guarded(() => letters.open(here())),
  x: () => document.activeElement?.closest("li")?.querySelector("input")?.click(),
  r: () => mayWrite() && current() === "letters" && guarded(() => letters.doSelected("Replay", here())),
  d: () => mayWrite() && current() === "letters" && guarded(() => letters.doSelected("Delete", here())),
  g: show,
  "/": () => byId("filters").elements.text.focus(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  const taken = event.key === "Enter" ? ", button, a, summary" : "";
  const typing = event.target.closest(`input:not([type=checkbox]), select, pre, dialog${taken}`);
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

let typed;
byId("filters").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(() => guarded(letters.load), 250);
});
byId("filters").addEventListener("reset", () => setTimeout(() => guarded(letters.load)));
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("more-filters").addEventListener("click", () => byId("filters").classList.toggle("whole"));
byId("select-all").addEventListener("change", (event) => letters.pickAll(event.target.checked));
byId("replay-selected").addEventListener("click", () => letters.doSelected("Replay"));
byId("delete-selected").addEventListener("click", () => letters.doSelected("Delete"));
byId("replay-all").addEventListener("click", () => guarded(() => letters.doAll("Replay")));
byId("delete-all").addEventListener("click", () => guarded(() => letters.doAll("Delete")));
byId("help-button").addEventListener("click", keys["?"]);
document.addEventListener("role", letters.tellChosen);
window.addEventListener("hashchange", show);
setInterval(retries.tick, 1000);
byId("letters-new").addEventListener("click", () => guarded(letters.load));
operations.whenEnded(letters.load);
live.start(() => Promise.all([views[current()].refresh(), operations.load()]), () => current() !== "letters" || letters.isFree());

window.addEventListener("scroll", () => {
  if (isNear(byId(`${current()}-end`))) guarded(views[current()].loadMore);
}, { passive: true });
show();
