// A list of a view: filtered, paged as it is scrolled, brought up to date, and chosen from.

import { useKeys } from "./keys.js";
import { useEnded } from "./operations.js";
import {
  addressOf, call, Component, count, go, html, many, trouble, useEffect, useHold, useLive, useReducer, useRef, useState,
  windowOf, withoutWindow,
} from "./ui.js";


const PAGE = 100, HEAD = 20;
const empty = (key) => ({
  key, rows: [], cursor: null, more: true, isBusy: false, isStopped: false, hasGap: false, page: null,
    chosen: new Map(),
});

// The ids that a list has shown last: the one that is open has its neighbours there.
export const shown = {};

// What the API takes of the filters.
export const queryOf = (filters, isTimed = true) => ({ ...withoutWindow(filters), ...(isTimed ?
  windowOf(filters) : {}) });

// `read` makes {rows, cursor} of an answer; a row has an `id`, and a `version` that differs when it has changed.
export function useList(view, path, query, filters, read) {
  const key = JSON.stringify([path, filters]), kept = useRef({}), [, draw] = useReducer((n) => n + 1, 0);
  if (kept.current.key !== key) kept.current = empty(key);
  const list = kept.current, isNow = () => kept.current === list;
  const page = async (limit, cursor) => read(await call("GET", path, { query: { ...query(), limit, cursor } }));

  async function loadMore() {
    if (list.isBusy || !list.more || list.isStopped) return;
    list.isBusy = true;
    try {
      const { rows, cursor, ...rest } = await page(PAGE, list.cursor), known = new Set(list.rows.map(({ id }) => id));
      const fresh = rows.filter(({ id }) => !known.has(id));
      Object.assign(list, { rows: [...list.rows, ...fresh], cursor, more: cursor !== null, page: rest });
    } finally {
      list.isBusy = false;
    }
    draw();
  }

  // Brings the head of the list up to date. A text is not looked for again.
  async function refresh() {
    if (!list.rows.length) return again();
    if (filters.text || list.isBusy) return;
    const { rows, cursor, ...rest } = await page(HEAD, null);
    if (!isNow() || list.chosen.size) return;
    const merged = merge(list.rows, rows, cursor === null);
    if (merged) Object.assign(list, { rows: merged, page: rest }, cursor === null && { more: false });
    // More have come than the head shows. Loading again would lose the reader's place.
    else if (scrollY > 0 || document.activeElement?.closest("[data-row]")) list.hasGap = true;
    else await again();
    draw();
  }

  async function again() {
    if (list.isBusy) return;
    const before = { ...list };
    Object.assign(list, empty(key), { isBusy: false });
    await loadMore().catch((error) => {
      Object.assign(list, before);
      throw error;
    });
  }

  function choose(rows, isOn) {
    for (const row of rows) {
      if (isOn) list.chosen.set(row.id, row);
      else list.chosen.delete(row.id);
    }
    draw();
  }

  const { error, reload } = useLive(refresh, [key]);
  useHold(list.chosen.size > 0);
  useEnded(() => load());
  const end = useRef(null), near = useRef(null);
  near.current = () => end.current && isNear(end.current) && list.page && loadMore().catch(trouble);
  // A page that does not fill the window is never scrolled; rows have their height when they have been drawn.
  useEffect(() => { requestAnimationFrame(() => requestAnimationFrame(() => near.current())); });
  useEffect(() => {
    const look = () => near.current();
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  const stop = () => { list.isStopped = !list.isStopped; draw(); };
  const load = () => { list.chosen.clear(); return again().catch(trouble); };
  shown[view] = list.rows.map(({ id }) => id);
  return { ...list, error, reload, load, choose, stop, end, filters };
}

// Rows that are as they were stay the same object, and their elements with them. Nothing, where the list has none of
// these rows: nobody knows what is between them.
function merge(known, head, isWhole) {
  const by = new Map(known.map((row) => [row.id, row]));
  const isSame = (row) => by.get(row.id)?.version === row.version;
  const last = [...head].reverse().find(isSame);
  if (!isWhole && !last) return null;
  const ids = new Set(head.map(({ id }) => id)), after = isWhole ? [] : known.slice(known.indexOf(by.get(last.id)) + 1);
  return [...head.map((row) => (isSame(row) ? by.get(row.id) : row)), ...after.filter(({ id }) => !ids.has(id))];
}

const isNear = (element) => element.getBoundingClientRect().top < innerHeight + 600;

// A row that is drawn again only when it has changed: there may be thousands.
export class Row extends Component {
  shouldComponentUpdate({ row, isChosen, may }) {
    return row !== this.props.row || isChosen !== this.props.isChosen || may !== this.props.may;
  }

  render({ draw, ...rest }) {
    return draw(rest);
  }
}

export const Pick = ({ row, isChosen, list, label }) => html`<input class="pick" type="checkbox"
  aria-label="Choose ${label}"
  checked=${isChosen} onChange=${({ target }) => list.choose([row], target.checked)} />`;

// The rows, their head, and what is at their end: how many there are, or why there are none.
export function Rows({ list, draw, may, className, headClass, head, words, showAll, ...rest }) {
  const { rows, hasGap, error, page, chosen } = list;
  const all = rows.length > 0 && chosen.size === rows.length;
  return html`${hasGap && html`<button type="button" class="fresh" onClick=${list.load}>Many new ones: load again
    </button>`}
    ${rows.length > 0 && html`<div class=${headClass}>${may
      ? html`<input type="checkbox" aria-label="Choose all" checked=${all} onChange=${() => list.choose(rows, !all)} />`
      : html`<span />`}${head}</div>`}
    <ol class=${className} ...${rest}>${rows.map((row) => html`<${Row} key=${row.id} ...${{ row, draw, list, may }}
      isChosen=${chosen.has(row.id)} />`)}</ol>
    <p class="end q" ref=${list.end}>${page ? html`<${End} ...${{ list, words, showAll }} />` : error ?
      "" : "Loading…"}</p>`;
}

function End({ list: { rows, more, isStopped, stop, filters }, words, showAll }) {
  if (more && filters.text) {
    return html`${count(rows.length)} found so far ${" "}
      <button type="button" onClick=${stop}>${isStopped ? "Search on" : "Stop"}</button>`;
  }
  if (more) return "";
  if (rows.length) return `${count(rows.length)} in all`;
  return html`${words} ${showAll && html`${" "}<button type="button" onClick=${showAll}>Show all of time</button>`}`;
}

// What can be done with the chosen rows: nothing is there until one is.
export function Bar({ list, what, children }) {
  const { chosen, choose } = list;
  return chosen.size > 0 && html`<div class="bar" role="toolbar" aria-label="With the chosen ${what}">
    <b id="selected">${count(chosen.size)} selected</b>${children}
    <button type="button" class="bare" aria-label="Choose none" onClick=${() => choose([...chosen.values()], false)}>×
      </button></div>`;
}

// The search and the filters of a view; what is typed stands in the address a moment later.
export function Filters({ view, filters, fields, search, children }) {
  const [isWhole, setWhole] = useState(false), timer = useRef(0), form = useRef(null), latest = useRef(null);
  // Another filter may have been chosen since something was typed.
  latest.current = filters;
  const keep = () => {
    const given = Object.fromEntries([...new FormData(form.current)].filter(([, value]) => value));
    go(view, { ...rest(latest.current, fields, search), ...given }, "", true);
  };
  const typed = ({ target }) => {
    if (!target.matches("input")) return;
    clearTimeout(timer.current);
    timer.current = setTimeout(keep, 250);
  };
  useEffect(() => () => clearTimeout(timer.current), []);
  const isSet = [search, ...fields].some(({ name }) => filters[name]);
  return html`<form ref=${form} class="tools filters ${isWhole || isSet ? "whole" : ""}" role="search"
    autocomplete="off" onInput=${typed}
    onSubmit=${(event) => event.preventDefault()}>
    <${Text} ...${search} type="search" value=${filters[search.name]} />
    <button type="button" class="more-filters m-only" aria-expanded=${isWhole} onClick=${() =>
      setWhole(!isWhole)}>Filters</button>
    ${fields.map((field) => html`<${Text} key=${field.name} ...${field} value=${filters[field.name]} />`)}
    ${isSet && html`<button type="button" class="bare" onClick=${() => go(view, rest(filters, fields, search), "",
      true)}>Clear</button>`}
    <span class="space"></span>${children}</form>`;
}

function Text({ name, label, value = "", options, type = "text", placeholder = label }) {
  const id = `known-${name}`, [text, setText] = useState(value), kept = useRef(value);
  // The address has changed: what was typed before it does not count any more.
  if (kept.current !== value) [kept.current] = [value, setText(value)];
  return html`<input name=${name} type=${type} aria-label=${label} placeholder=${placeholder} value=${text}
      onInput=${({ target }) => setText(target.value)} list=${options && id} class=${type === "search" ? "" : "lo"} />
    ${options && html`<datalist id=${id}>${Object.entries(options).map(([one, n]) => html`
      <option value=${one} label=${`${one}: ${count(n)}`} />`)}</datalist>`}`;
}

const rest = (filters, fields, search) => {
  const own = new Set([search, ...fields].map(({ name }) => name));
  return Object.fromEntries(Object.entries(filters).filter(([name]) => !own.has(name)));
};

// A select of the address, such as an order.
export function Choice({ view, filters, name, label, options }) {
  const put = ({ target }) => go(view, { ...filters, [name]: target.value }, "", true);
  return html`<select aria-label=${label} value=${filters[name] || ""} onChange=${put}>
    ${Object.entries(options).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select>`;
}

export function Tabs({ view, filters, name, label, options }) {
  return html`<div class="tabs" role="group" aria-label=${label}>${Object.entries(options).map(([value, text]) => html`
    <button type="button" key=${value} aria-pressed=${(filters[name] || "") === value}
      onClick=${() => go(view, { ...filters, [name]: value }, "", true)}>${text}</button>`)}</div>`;
}

const NAMES = { groups: "Groups", letters: "Letters", waiting: "Waiting" };

// The way back to the list, and to the neighbours there of the one that is open.
export function Crumb({ view, id, filters, end, children }) {
  const near = shown[view] || [], at = near.indexOf(id), next = (by) => at >= 0 && near[at + by];
  const step = (by) => () => next(by) && go(view, filters, next(by), true);
  useKeys({ j: step(1), k: step(-1) });
  const button = (by, label, sign, key) => at >= 0 && html`<button type="button" aria-label=${label}
    disabled=${!next(by)} onClick=${step(by)}>${sign} <kbd>${key}</kbd></button>`;
  return html`<div class="crumb"><a href=${addressOf(view, filters)}>${NAMES[view]}</a>${children}
    ${at >= 0 && html`<span>${at + 1} of ${near.length}</span>`}<span class="space"></span>
    ${end}${button(-1, "Previous", "↑", "k")}${button(1, "Next", "↓", "j")}</div>`;
}
