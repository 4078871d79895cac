// The keyboard. A row is [data-row], with its box (.pick) and its menu; what has a key of its own is [data-key].

import { html, useEffect, useRef, useState } from "./base.js";
import { close, desk, open } from "./desk.js";
import { addressOf } from "./place.js";
import { Dialog } from "./ui.js";

const OFF = "ojs-bridge-keys-off";
const VIEWS = { n: "now", g: "groups", l: "letters", w: "waiting" };
const STEPS = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 };
const TYPING = "input:not([type=checkbox], [type=radio]), textarea, select, pre";

// Keys of one letter can be switched off: they would be pressed by a voice that dictates (WCAG 2.1.4).
const kept = { get: () => localStorage.getItem(OFF), set: (value) => localStorage.setItem(OFF, value) };
const isOff = () => kept.get() === "yes";

// Keys of a view, which are asked first: {p: work}.
const own = new Set();
export function useKeys(keys) {
  const latest = useRef();
  latest.current = keys;
  useEffect(() => {
    own.add(latest);
    return () => own.delete(latest);
  }, []);
}

export function listen() {
  document.addEventListener("keydown", pressed);
  document.addEventListener("toggle", ({ target }) => target.open && target.matches(".menu") && shut(target), true);
  document.addEventListener("click", ({ target }) => shut(target.closest?.(".menu")));
}

function shut(but) {
  for (const menu of document.querySelectorAll(".menu[open]")) if (menu !== but) menu.open = false;
}

function pressed(event) {
  const { target, key } = event;
  if (key === "Escape") left(target);
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (target.matches(TYPING) || (isOff() && key !== "?")) return;
  const row = target.closest("[data-row]");
  if (does(key, row)) event.preventDefault();
}

// Esc leaves a field, and shuts a menu.
function left(target) {
  if (target.matches(TYPING)) target.blur();
  const menu = document.querySelector(".menu[open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
}

function does(key, row) {
  const work = [...own].map(({ current }) => current[key]).find(Boolean);
  if (work) work(row);
  else if (VIEWS[key]) location.hash = addressOf(VIEWS[key]);
  else if (key === "?") open(html`<${Keys} />`);
  else if (key === "/") document.querySelector("main input[type=search]")?.focus();
  else if (STEPS[key]) return move(STEPS[key], row);
  else if (key === "x" && row) row.querySelector(".pick")?.click();
  else if (key === "." && row) opened(row.querySelector(".menu"));
  else return press(key, row);
  return true;
}

function move(step, row) {
  const rows = [...document.querySelectorAll("main [data-row]")];
  const next = rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(row) + step))];
  next?.querySelector("a, button, input")?.focus();
  return Boolean(next);
}

function opened(menu) {
  if (!menu) return;
  menu.open = !menu.open;
  if (menu.open) setTimeout(() => menu.querySelector("div > *")?.focus());
}

// What has this key: in this row, else in what belongs to the view as a whole, such as the bar of the chosen rows.
function press(key, row) {
  if (!/^[a-z]$/.test(key)) return false;
  const of = (place) => [...(place?.querySelectorAll(`[data-key=${key}]:not(:disabled)`) || [])];
  const [found] = [...of(document.querySelector("main .bar")), ...of(row), ...of(document.querySelector("main"))
    .filter((one) => !one.closest("[data-row]"))];
  found?.click();
  return Boolean(found);
}

const TOLD = [
  [["n", "g", "l", "w"], "Now, Groups, Letters, Waiting"], [["/"], "search; Esc leaves it"],
  [["j", "k"], "next, previous"],
  [["Enter"], "open"], [["x"], "choose"], [["."], "the actions of the row"], [["p"], "probe"],
  [["r"], "replay, or run now"], [["m"], "move"], [["d"], "delete, or cancel"], [["?"], "all keys"],
];

function Keys() {
  const [off, setOff] = useState(isOff());
  const change = ({ target }) => {
    kept.set(target.checked ? "no" : "yes");
    setOff(!target.checked);
  };
  return html`<${Dialog} id="keys" title="Keys">
    <div class="in">
      <dl>${TOLD.map(([keys, words]) => html`<dt>${keys.map((key) => html`<kbd>${key}</kbd> `)}</dt>
        <dd>${words}</dd>`)}</dl>
      <label class="row"><input type="checkbox" checked=${!off} onChange=${change} /> Keys of one letter are on</label>
    </div>
    <footer><p></p><button type="button" onClick=${close}>Close</button></footer>
  <//>`;
}

export const showKeys = () => desk.dialog || open(html`<${Keys} />`);
