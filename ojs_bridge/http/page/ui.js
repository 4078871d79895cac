// The small parts of every view: signs, menus, dialogs, times, and what an empty or a loading view says.

import { html, useEffect, useRef, useState } from "./base.js";
import { close, guarded } from "./desk.js";
import { go, HOUR, timesOf, withoutWindow } from "./place.js";
import { stamp, when } from "./words.js";

export * from "./api.js";
export * from "./base.js";
export * from "./desk.js";
export * from "./live.js";
export * from "./place.js";
export * from "./words.js";
export { Bars, Dot, Spark } from "./chart.js";

// A shape for each outcome and state, so that colour never stands alone.
const SHAPES = {
  died: "M4 4l8 8M12 4l-8 8",
  retried: "M13 8a5 5 0 1 1-1.5-3.6M13 2.2v3h-3",
  held: "M5.5 3.5v9M10.5 3.5v9",
  succeeded: "M3 8.6l3.4 3.4L13 4.6",
  new: "M8 2.5v11M2.5 8h11M4.2 4.2l7.6 7.6M11.8 4.2l-7.6 7.6",
  came_back: "M6 4L3 7l3 3M3 7h7a3 3 0 0 1 0 6H8",
  growing: "M4 12l8-8M6 4h6v6",
  steady: "M3 8h10",
  slow: "M8 13V4M4 7.5L8 3.5l4 4M3 13.5h10",
  scheduled: "M2.5 8a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0M8 5v3.2l2 1.3",
  muted: "M2.5 8a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0M4.2 11.8l7.6-7.6",
  sent: "M3 8h10M9 4l4 4-4 4",
  mark: "M4 14V2.5h8l-2 3 2 3H4",
  silent: "M8 2.8a5.2 5.2 0 0 1 4.5 2.6M13.2 8a5.2 5.2 0 0 1-2.6 4.5M8 13.2a5.2 5.2 0 0 1-4.5-2.6" +
    "M2.8 8a5.2 5.2 0 0 1 2.6-4.5",
};

export const Sign = ({ name, colour = "" }) =>
  html`<svg class=${`sign ${colour}`} viewBox="0 0 16 16" aria-hidden="true"><path d=${SHAPES[name]} /></svg>`;

// The state of a group: its sign and its word.
const STATES = {
  new: ["died", "New"], came_back: ["died", "Came back"], growing: ["retried", "Grows"], steady: ["q", "Steady"],
  resolved: ["succeeded", "Mended"], muted: ["q", "Muted"],
};
export function Badge({ state, words = "" }) {
  const [colour, word] = STATES[state] || ["q", state];
  const sign = state === "resolved" ? "succeeded" : SHAPES[state] ? state : "steady";
  return html`<span class=${`badge ${colour}`}><${Sign} name=${sign} />${words ? `${word} ${words}` : word}</span>`;
}

export const When = ({ time }) => html`<time datetime=${time} title=${stamp(time)}>${when(time)}</time>`;

// What can be done with a row: [{text, act, href, danger}]. What cannot be undone is last, under a line.
// Where `items` is a function, they are made once the menu is open.
export function Menu({ label, items }) {
  const place = useRef(), [isOpen, setOpen] = useState(false), isLate = typeof items === "function";
  const shown = isLate ? (isOpen ? items() : []) : items;
  const chosen = (act) => () => {
    place.current.open = false;
    guarded(async () => act());
  };
  const entry = ({ text, act, href, danger }) => (href ? html`<a href=${href}>${text}</a>` : html`<button
    type="button" class=${danger ? "died" : ""} onClick=${chosen(act)}>${text}</button>`);
  return html`<details class="menu" ref=${place} onToggle=${({ target }) => setOpen(target.open)}>
    <summary aria-label=${`Actions: ${label}`}>⋯</summary>
    <div>${shown.filter(Boolean).map((item) => [item.danger && html`<hr />`, entry(item)])}</div>
  </details>`;
}

// A dialog over the page. It is shown with `open(html`<${Dialog} …>`)` of desk.js, and `close()` or Esc ends it.
export function Dialog({ id, title, children }) {
  const place = useRef();
  useEffect(() => {
    const box = place.current;
    box.showModal();
    return () => box.open && box.close();
  }, []);
  return html`<dialog id=${id} ref=${place} aria-labelledby=${`${id}-title`} onClose=${close}>
    <header><h2 id=${`${id}-title`}>${title}</h2></header>${children}
  </dialog>`;
}

// The choice of the time. A range of its own, as a drag on a chart makes it, stands beside, with its way out.
export function Window({ view, id = "", filters }) {
  const { since, until, within } = filters, rest = withoutWindow(filters);
  const choose = ({ target }) => go(view, { ...rest, within: target.value === HOUR ? "" : target.value }, id);
  const options = Object.entries(timesOf(view));
  if (since) {
    return html`<span class="nw s" data-range><b>${stamp(since)}</b> to <b>${until ? stamp(until) : "now"}</b></span>
      <button type="button" onClick=${() => go(view, rest, id)}>Last hour</button>`;
  }
  return html`<select name="within" aria-label="Time" value=${within || HOUR} onChange=${choose}>
    ${options.map(([value, words]) => html`<option value=${value}>${words}</option>`)}
  </select>`;
}

// The title of the window: what this is about, then the view.
export function useTitle(...parts) {
  const title = [...parts.filter(Boolean), "ojs-bridge"].join(" – ");
  useEffect(() => {
    document.title = title;
  }, [title]);
}
