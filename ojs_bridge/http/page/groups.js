// The groups of errors that are alike: the error's own words first, what can be done in a menu.

import { ask, typed } from "./ask.js";
import { Group } from "./group.js";
import { act } from "./deeds.js";
import { useKeys } from "./keys.js";
import { names } from "./operations.js";
import { Bar, Choice, Filters, Pick, queryOf, Rows, Tabs, useList } from "./rows.js";
import {
  addressOf, Badge, call, copy, count, cut, go, guarded, html, many, may, Menu, pathOf, rate, Spark, stamp, timeOf,
  timeOrDay, TIMES, useDesk, useTitle, when, Window, windowFor, windowOf,
} from "./ui.js";

const KIND = "dead-letter/groups";
const STATES = { "": "All", "new,came_back,growing": "Live", resolved: "Mended", muted: "Muted" };
const ALONE = ["new", "came_back", "growing", "steady"];
const ORDERS = { "": "Worst first", last: "Last seen first", count: "Most letters first" };
const SEARCH = { name: "error_type", label: "Error type, or prefix.*" };
const FIELDS = [{ name: "type", label: "Job type, or prefix.*" }, { name: "queue", label: "Queue" }];

export const filters = { error_type: null, type: null, queue: null, state: [...Object.keys(STATES), ...ALONE],
  order: Object.keys(ORDERS) };
export const times = TIMES, hasOne = true;
export const View = ({ id, filters }) => (id ? html`<${Group} ...${{ id, filters }} />` : html`
  <${Groups} filters=${filters} />`);

const day = (time) => new Date(time).toLocaleDateString("en-GB", { day: "numeric", month: "short" });

// The state of a group in its own words: in which mark it was mended, until when it is muted.
export function State({ state, resolved, muted }) {
  const words = state === "resolved" ? resolved?.mark && `in ${resolved.mark}` : state === "muted" && muted &&
    `until ${day(muted.until)}`;
  return html`<${Badge} state=${state} words=${words || ""} />`;
}

export const isBad = ({ state }) => state === "new" || state === "came_back";
// What a group is called: the first line of its error, with the type where that says little, as 'vat_id' does.
export const nameOf = ({ pattern, error_type: type }) => worded(type, pattern);
export function worded(type, message) {
  const [line] = message.trim().split("\n", 1);
  return !line ? type : line.includes(" ") ? line : `${type}: ${line}`;
}
export const quoteOf = ({ message, error_type: type, frame, types }) => ({ message: worded(type, message),
  type: types.join(", "), where: frame });
const whereOf = ({ fingerprint }, filters) => ({ ...windowOf(filters), group: fingerprint });
const wordsFor = (group) => ({ quote: quoteOf(group), firstAt: group.first_at, queues: group.queues });

export const replay = (group, filters) => act("retry", { filter: whereOf(group, filters) }, wordsFor(group));
export const remove = (group, filters) => act("purge", { filter: whereOf(group, filters) }, wordsFor(group));

// What can be said of groups: that they do not matter now, or that they are mended.
const SAYINGS = {
  mute: {
    verb: "Mute", done: "Muted", no: "Leave it in the list",
    line: "For seven days, or until it has twice as many deaths. Its letters stay as they are.",
    fields: [{ label: "Until", name: "until", type: "datetime-local", note: "empty: for seven days" }],
  },
  resolve: {
    verb: "Resolve", done: "Resolved", no: "It is not mended",
    line: "It comes back as soon as it dies again, and is told of then.",
    fields: [{ label: "Mended in", name: "mark", placeholder: "a mark such as v42, optional" }],
  },
};

// The groups are told one by one: a server mutes and resolves one at a time.
async function each(groups, method, name, body) {
  for (const { fingerprint } of groups) await call(method, pathOf(KIND, fingerprint, name), body && { body });
}

export async function say(name, groups, reload) {
  const { verb, done, no, line, fields } = SAYINGS[name], isOne = groups.length === 1;
  const words = isOne ? "the group" : many(groups.length, "group"), yes = `${verb} ${words}`;
  const lines = [!isOne && groups.map(nameOf).join("\n"), line];
  const work = (values) => each(groups, "POST", name, typed(values, fields));
  if (await ask({ title: yes, yes, no, lines, fields, work, quote: isOne ? quoteOf(groups[0]) : {},
    done: `${done} ${words}` })) await reload();
}

async function back(group, name, reload) {
  await each([group], "DELETE", name);
  await reload();
}

// What can be done with one group; the destructive one is the last.
export function deedsOf(group, filters, reload) {
  const hasLetters = group.count > 0;
  const link = () => new URL(addressOf("groups", windowFor("groups", filters), group.fingerprint), location.href).href;
  return [
    may("replay") && hasLetters && { text: "Probe replay…", act: () => replay(group, filters) },
    may("write") && (group.state === "resolved"
      ? { text: "Not mended after all", act: () => back(group, "resolve", reload) }
      : { text: "Resolve in a mark…", act: () => say("resolve", [group], reload) }),
    may("write") && (group.muted ? { text: "Unmute", act: () => back(group, "mute", reload) }
      : { text: "Mute…", act: () => say("mute", [group], reload) }),
    { text: "Copy link", act: () => copy(link(), "the link") },
    may("delete") && hasLetters && { text: "Delete letters…", danger: true, act: () => remove(group, filters) },
  ].filter(Boolean);
}

const read = ({ groups, next_cursor: cursor }) => ({
  rows: groups.map((group) => names.set(group.fingerprint, nameOf(group)) && ({ ...group, id: group.fingerprint,
    version: JSON.stringify(group) })), cursor,
});

function Groups({ filters }) {
  useDesk();
  const list = useList("groups", KIND, () => query(filters), filters, read), { rows, chosen, reload, load } = list;
  const groups = [...chosen.values()];
  const draw = ({ row, isChosen, may: mayWrite }) =>
    html`<${Line} ...${{ group: row, isChosen, mayWrite, list, filters }} />`;
  const all = () => go("groups", { ...filters, within: "all", since: "", until: "" });
  const over = (name) => () => guarded(() => say(name, groups, load));
  const key = (right, work) => (row) => {
    const group = rows.find(({ id }) => id === row?.dataset.id);
    if (group?.count && may(right)) guarded(() => work(group, filters));
  };
  useTitle(counted(rows), "Groups");
  useKeys({ p: key("replay", replay), r: key("replay", replay), d: key("delete", remove) });
  return html`<div class="top"><h1 class="h">Groups</h1><span class="q">${counted(rows)}</span></div>
    <${Filters} ...${{ view: "groups", filters, fields: FIELDS, search: SEARCH }}>
      <${Tabs} view="groups" filters=${filters} name="state" label="Which groups" options=${STATES} />
      <${Window} view="groups" filters=${filters} />
      <${Choice} view="groups" filters=${filters} name="order" label="Order" options=${ORDERS} /></${Filters}>
    <${Rows} list=${list} draw=${draw} may=${may("write")} className="groups wide" headClass="ghead wide"
      head=${headFor(filters)} id="groups" aria-label="Groups"
      words=${nothing(filters)} showAll=${filters.within !== "all" && all} />
    <${Bar} list=${list} what="groups">
      ${may("write") && html`
        <button type="button" class="first" onClick=${over("resolve")}>Resolve in a mark…</button>
        <button type="button" onClick=${over("mute")}>Mute…</button>`}</${Bar}>`;
}

const query = ({ order = "worst", ...filters }) => ({ ...queryOf(filters), order });

const ORDER = ["new", "came_back", "growing", "steady", "resolved", "muted"];
const SAID = { came_back: "came back", growing: "grows", resolved: "mended" };
const counted = (rows) => ORDER.map((state) => [state, rows.filter((group) => group.state === state).length])
  .filter(([, n]) => n).map(([state, n]) => `${n} ${SAID[state] || state}`).join(", ");

const nothing = ({ within, since, order, ...narrow }) => (Object.keys(narrow).length ? "No group matches these filters."
  : within === "all" ? "There is no group: nothing has died, and nothing retries." : "No job has died in this time.");

const headFor = (filters) => html`<span></span><span></span><span class="xl">where</span>
  <span class="lo">${timeOf(filters)}</span><span class="num">letters</span><span class="num lo">a minute</span>
  <span class="num lo">retry now</span><span class="num lo">last</span><span></span>`;

function Line({ group, isChosen, mayWrite, list, filters }) {
  const { fingerprint, message, error_type: type, frame, types, deaths, first_at: first, last_at: last, retrying = 0,
    per_minute: deadly = 0 } = group;
  const name = nameOf(group), href = addressOf("groups", windowFor("groups", filters), fingerprint);
  const example = worded(type, message) === name && !message.includes("\n") && frame ? `at ${frame}` : message;
  const bad = isBad(group) ? "died" : "";
  return html`<li data-row data-id=${fingerprint}>
    ${mayWrite ? html`<${Pick} ...${{ row: group, isChosen, list, label: cut(name, 80) }} />` : html`<span />`}
    <div class="kind"><${State} ...${group} /><span class="q s one" title=${types.join(", ")}>${types.join(", ")}
      </span></div>
    <div class="what"><a class="msg" href=${href} title=${cut(name, 1000)}>${cut(name, 500)}</a>
      <code class="ex one" title=${cut(message, 1000)}>${cut(example, 500)}</code></div>
    <div class="xl s q one"><code>${frame}</code><small>${type}</small></div>
    <div class="lo"><${Spark} counts=${deaths.counts} colour=${bad ? "died" : "died-2"} label=${label(deaths,
      retrying)} /></div>
    <div class="num main-n"><span class="big ${group.count ? bad : "zero"}">${count(group.count)}</span>
      <small class="m-only">${deadly ? `${rate(deadly)} a minute` : retrying ? `${count(retrying)} retry` : ""}</small>
        </div>
    <div class="num lo"><span class="big ${deadly ? bad : "zero"}">${rate(deadly)}</span></div>
    <div class="num lo"><span class="big ${retrying ? "retried" : "zero"}">${count(retrying)}</span></div>
    <div class="num lo q s" title=${stamp(last)}>${when(last)}<small title=${stamp(first)}>first ${timeOrDay(first)}
      </small></div>
    <${Menu} label=${cut(name, 80)} items=${() => [{ text: "Open", href }, ...deedsOf(group, filters, list.reload)]} />
  </li>`;
}

function label({ since, step_seconds: step, counts }, retrying) {
  const until = Date.parse(since) + counts.length * step * 1000, deaths = counts.reduce((sum, n) => sum + n, 0);
  return `${many(deaths, "death")} from ${stamp(since)} to ${stamp(until)}, ${count(retrying)} retrying`;
}
