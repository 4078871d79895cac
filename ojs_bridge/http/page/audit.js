// Who did what: the records of operator actions, with undo where a deletion can still be taken back.

import { ask, typed } from "./ask.js";
import { Filters, Rows, useList } from "./rows.js";
import {
  call, count, cut, go, guarded, html, localized, may, pathOf, Sign, stamp, TIMES, useDesk, useTitle, When, Window,
  windowOf, withoutWindow,
} from "./ui.js";

export const times = TIMES;
export const filters = { who: null, action: null };

const SEARCH = { name: "who", label: "Name, or prefix*" }, FIELDS = [{ name: "action", label: "Action, or prefix.*" }];
const OUTCOMES = { done: ["succeeded", "succeeded"], failed: ["died", "died"], begun: ["scheduled", "q"] };
const queryOf = (filters) => ({ ...withoutWindow(filters), ...windowOf(filters) });

const read = ({ records, next_cursor: cursor }) => ({
  rows: records.map((record) => ({ ...record, version: JSON.stringify(record) })), cursor,
});

export function View({ filters }) {
  useDesk();
  useTitle("Audit");
  const list = useList("audit", "audit", () => queryOf(filters), filters, read);
  const isNarrow = Object.keys(withoutWindow(filters)).length > 0;
  const words = isNarrow ? "No record matches these filters."
    : filters.within === "all" ? "Nothing is on record." : "Nothing was done in this time.";
  const all = () => go("audit", { ...withoutWindow(filters), within: "all" });
  return html`<div class="top"><h1 class="h">Audit</h1><span class="q">who did what</span></div>
    <${Filters} view="audit" filters=${filters} fields=${FIELDS} search=${SEARCH}>
      <button type="button" onClick=${() => guarded(() => save(filters))}>Save as CSV</button>
      <${Window} view="audit" filters=${filters} /><//>
    <${Rows} list=${list} draw=${draw} may=${false} className="audit" headClass="out" head="" id="audit"
      aria-label="Audit" words=${words} showAll=${filters.within !== "all" && all} />`;
}

function draw({ row: record, list }) {
  const { at, who, via, address, action, subject, reason, outcome, count: number, error } = record;
  const [sign, colour] = OUTCOMES[outcome] || ["steady", "q"], on = localized(told(subject));
  return html`<li data-row data-id=${record.id} tabindex="-1">
    <${When} time=${at} />
    <span class="wrap" title=${`${via} ${address}`}><b>${cut(who, 60)}</b></span>
    <span class="wrap">${action}</span>
    <span class="wrap" title=${cut(on, 1000)}>${cut(on, 200)}${reason && html` <i>“${cut(reason, 300)}”</i>`}
      ${error && html`<small class="died">${cut(error, 300)}</small>`}</span>
    <span class=${`nw ${colour}`}><${Sign} name=${sign} />${` ${[number !== null && count(number), outcome]
      .filter(Boolean).join(" ")}`}</span>
    <${Undo} record=${record} list=${list} />
  </li>`;
}

// A deletion keeps its letters for an hour.
function Undo({ record, list }) {
  const { id, count: number, subject: { undo_until: until } } = record;
  if (!until || Date.parse(until) < Date.now() || !may("delete")) return html`<span></span>`;
  const fields = [], title = "Bring the letters back";
  const lines = [`${count(number || 0)} letters come back, until ${stamp(until)} they can.`];
  const work = (values) => call("POST", pathOf("audit", id, "undo"), { body: typed(values, fields) });
  const click = () => guarded(async () => {
    const words = { title, yes: "Undo the deletion", no: "Leave them deleted", lines, done: "Brought back" };
    if (await ask({ ...words, fields, work })) await list.load();
  });
  return html`<button type="button" onClick=${click}>Undo…</button>`;
}

// A subject in a few words: some ids, and whatever else there is. What has a text of its own needs no id.
function told({ ids = [], id_count: all = ids.length, filter, undo_until: _, mark, ...rest }) {
  const shown = ids.slice(0, IDS), more = all > shown.length ? [`and ${count(all - shown.length)} more`] : [];
  if (mark && !rest.text) shown.push(mark);
  const chosen = Object.entries(filter || {}).map(([name, value]) => `${name} ${value}`);
  const others = Object.entries(rest).map(([name, value]) => `${name} ${[value].flat().join(", ")}`);
  return [...shown, ...more, ...chosen, ...others].join(", ");
}

const IDS = 3;
const COLUMNS = ["at", "who", "via", "address", "action", "subject", "reason", "outcome", "count", "error", "id"];
const PAGE = 100, MOST = 10_000;

// A program that opens the file must not take a text for a formula.
function cell(value) {
  const text = value === null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  return `"${/^[=+@\t\r-]/.test(text) ? "'" : ""}${text.replaceAll('"', '""')}"`;
}

// The records of these filters as a file.
async function save(filters) {
  const rows = [];
  for (let cursor = ""; cursor !== null && rows.length < MOST;) {
    const page = await call("GET", "audit", { query: { ...queryOf(filters), limit: PAGE, cursor } });
    rows.push(...page.records);
    cursor = page.next_cursor;
  }
  const lines = [COLUMNS, ...rows.map((record) => COLUMNS.map((name) => record[name]))];
  const link = document.createElement("a");
  const text = lines.map((line) => `${line.map(cell).join(",")}\r\n`).join("");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "audit.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1_000);
}
