// All that waits until it is due: parked retries, scheduled jobs and held ones, each with a countdown, and the holds.

import { act } from "./deeds.js";
import { argumentsOf } from "./group.js";
import { Hold, loadHolds, pause } from "./holds.js";
import { brief, Waiter, waitingDeeds } from "./letter.js";
import { Bar, Choice, Filters, Pick, queryOf, Rows, Tabs, useList } from "./rows.js";
import { useKeys } from "./keys.js";
import {
  addressOf, Bars, call, count, cut, guarded, html, many, may, Menu, Sign, span, stamp, told, useDesk, useLive, useTick,
  useTitle, when,
} from "./ui.js";

const KINDS = { "": "All", held: "Held", retry: "Retries", scheduled: "Scheduled" };
const STATES = { retryable: ["retried", "retried", "Retry"], scheduled: ["q", "scheduled", "Scheduled"],
  pending: ["held", "held", "Held"] };
const SEARCH = { name: "text", label: "Text in arguments, messages or reason" };
const FIELDS = [{ name: "error_type", label: "Error type, or prefix.*" }, { name: "type",
  label: "Job type, or prefix.*" }, { name: "queue", label: "Queue" }];
const AHEAD = { "": "The next hour", P1D: "The next day", P7D: "The next week" };
export const filters = {
  text: null, error_type: null, type: null, queue: null, kind: Object.keys(KINDS), ahead: Object.keys(AHEAD),
};
export const hasOne = true;
export const View = ({ id, filters }) => (id ? html`<${Waiter} id=${id} />` : html`<${Waiting} filters=${filters} />`);

const read = ({ jobs, in_broker: short, pagination: { next_cursor: cursor, total } }) =>
  ({ rows: jobs.map(brief), cursor, short, total });

// What falls due, by kind. The filters of queue, type and kind apply to it; held jobs are not in it.
function Due({ filters: { ahead, ...rest } }) {
  const { data } = useLive(() => call("GET", "waiting/due", { query: { ...rest, within: ahead || "PT1H" } }),
    [JSON.stringify({ ahead, ...rest })]);
  if (!data) return null;
  const { since, step_seconds: step, late, by_kind: kinds } = data, known = Object.values(kinds)[0].indexOf(null);
  const series = [["retry", "retries", "retried-fill"], ["scheduled", "scheduled", "text-2"]]
    .filter(([kind]) => kinds[kind]).map(([kind, label, colour]) => ({ label, colour, values: kinds[kind] }));
  const end = when(Date.parse(since) + known * step * 1000, false);
  const nothing = known < 0 && !series.some(({ values }) => values.some(Boolean));
  const time = (AHEAD[ahead] || AHEAD[""]).toLowerCase();
  const some = known >= 0 && `Too much falls due to count all of it: what comes after ${end} is not shown.`;
  return html`<section class="charts stale" aria-label="Due">${nothing
    ? html`<p class="q s">Nothing falls due in ${time}.</p>`
    : html`<${Bars} ...${{ series, since, step }} title="Due" height=${111}
      unit=${`in ${time}, ${span(step)} a bar`} />`}
    ${(late > 0 || some) && html`<p class="q s" id="due-told">${late > 0 && `${many(late, "job")}
      should have begun before. `}${some}</p>`}</section>`;
}

function Waiting({ filters: { ahead, ...filters } }) {
  useDesk();
  const list = useList("waiting", "waiting", () => queryOf(filters, false), filters, read),
    { rows, chosen, page } = list;
  const { data: holds = [], reload } = useLive(loadHolds, []);
  const some = () => [...chosen.values()], over = (action, rows) =>
    guarded(async () => { if (rows.length) await act(action, { rows }); });
  const all = (action) => () => guarded(() => act(action, { filter: queryOf(filters, false) },
    { all: "All that waits: no filter is set." }));
  const here = () => rows.find(({ id }) => id === document.activeElement?.closest("[data-row]")?.dataset.id);
  const key = (action) => () => may("write") && over(action, chosen.size ? some() : [here()].filter(Boolean));
  useTitle("What waits");
  useKeys({ r: key("run"), m: key("move"), d: key("cancel") });
  const stop = () => guarded(async () => { if (await pause(filters.type || filters.queue ?
    { type: filters.type || "", queue: filters.queue || "" } : {})) await reload(); });
  const whole = { ...filters, ...(ahead && { ahead }) };
  const isNarrow = Object.keys(filters).length > 0;
  return html`<div class="top"><h1 class="h">What waits</h1><span class="q">${page?.total !== null &&
    page?.total !== undefined && `${count(page.total)} jobs`}</span>
      ${may("write") && html`<button type="button" id="pause" onClick=${stop}>Pause jobs…</button>
        <${Menu} label="With all that match" items=${() => [
          { text: "Run all that match…", act: all("run") }, { text: "Move all that match…", act: all("move") },
            { text: "Cancel all that match…", danger: true, act: all("cancel") }]} />`}</div>
    ${!filters.text && !filters.error_type && filters.kind !== "held" &&
      html`<${Due} filters=${{ ahead, ...filters }} />`}
    <${Filters} ...${{ view: "waiting", filters: whole, fields: FIELDS, search: SEARCH }}>
      <${Choice} view="waiting" filters=${whole} name="ahead" label="Due in" options=${AHEAD} /><//>
    <${Tabs} view="waiting" filters=${whole} name="kind" label="Kind" options=${KINDS} />
    ${holds?.length > 0 && html`<ol id="holds" class="waits" aria-label="Holds">${holds.map((hold) =>
      html`<${Hold} key=${hold.id} ...${{ hold, reload }} />`)}</ol>`}
    <${Rows} list=${list} draw=${(props) => html`<${Line} ...${props} />`} may=${may("write")} className="waits"
      headClass="whead" head=${HEAD} id="waiting" aria-label="Waiting"
      words=${isNarrow ? "Nothing that waits matches these filters." : "Nothing waits."} />
    <p class="q s">A retry that waits for less than a minute, or what <code>park_after
      </code> says, waits in the broker and is not listed here.${" "}
      <span id="waiting-short">${page?.short && inBroker(page.short)}</span></p>
    <${Bar} list=${list} what="jobs">${may("write") && html`<button type="button" class="first"
      onClick=${() => over("run", some())}>Run now…</button>
      <button type="button" onClick=${() => over("move", some())}>Move…</button><button type="button" class="danger"
        onClick=${() => over("cancel", some())}>Cancel…</button>`}</${Bar}>`;
}

function inBroker({ count: number, next_due_at: at }) {
  if (!number) return "None waits there now.";
  return `${count(number)} ${number === 1 ? "waits" : "wait"} there now, the first ${left(at)}.`;
}

const HEAD = html`<span>due</span><span>kind</span><span>job</span><span>why it waits</span><span class="num">attempt
  </span><span>queue</span><span class="xl">since</span><span></span>`;

function Line({ row, isChosen, list, may: mayWrite }) {
  const { id, type, queue, attempt, max_attempts: most, state, due, reason, message, parked_at: since } = row,
    [tone, sign, word] = STATES[state] || STATES.retryable;
  const isLast = state === "retryable" && attempt >= most, href = addressOf("waiting", {}, id);
  const items = () => [...waitingDeeds(row).slice(0, 2), { text: "Copy id", act: () => guarded(async () =>
    { await navigator.clipboard.writeText(id); told("Copied the id"); }) }, ...waitingDeeds(row).slice(2)];
  return html`<li data-row data-id=${id}>${mayWrite ?
    html`<${Pick} ...${{ row, isChosen, list, label: `${type} ${id}` }} />` : html`<span />`}
    <div class="w-due nw"><b><${Left} at=${due} /></b> <span class="q s lo">${when(due)}</span></div>
    <span class="w-kind badge ${tone}"><${Sign} name=${sign} />${word}</span>
    <div class="w-job one"><a class="msg" href=${href}>${type}</a> <code class="q s">${cut(argumentsOf(row), 200)}
      </code></div>
    <div class="w-why one s q" title=${reason}>${isLast &&
      html`<span class="died">dies if it fails: </span>`}${cut(state === "retryable" && message ? message : reason,
      300)}</div>
    <span class="num lo q">${attempt} of ${most}</span><span class="lo q s one">${queue}</span>
      <span class="xl q s nw" title=${stamp(since)}>${when(since)}</span>
    <${Menu} label=${type} items=${items} /></li>`;
}

function Left({ at }) {
  useTick();
  return html`<time datetime=${at} title=${stamp(at)}>${left(at)}</time>`;
}

function left(at) {
  const seconds = Math.round((Date.parse(at) - Date.now()) / 1000);
  const size = [86_400, 3600, 60].find((one) => seconds >= one) || 1;
  return seconds > 0 ? `in ${span(Math.floor(seconds / size) * size)}` : "due";
}
