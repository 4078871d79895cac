// The dead letters: the error's own words first, what can be done in a menu and with the chosen ones.

import { act } from "./deeds.js";
import { argumentsOf, Deaths } from "./group.js";
import { worded } from "./groups.js";
import { brief, Letter } from "./letter.js";
import { Bar, Filters, Pick, queryOf, Rows, useList } from "./rows.js";
import { useKeys } from "./keys.js";
import {
  addressOf, call, copy, count, cut, go, guarded, html, may, Menu, stamp, TIMES, useDesk, useLive, useTitle, when,
  Window, withoutWindow,
} from "./ui.js";

const KIND = "dead-letter";
const SEARCH = { name: "text", label: "Text in arguments or messages" };
export const filters = { text: null, error_type: null, type: null, queue: null, group: null };
export const times = TIMES, hasOne = true;
export const View = ({ id, filters }) => (id ? html`<${Letter} id=${id} />` : html`<${Letters} filters=${filters} />`);

const read = ({ jobs, pagination: { next_cursor: cursor } }) => ({ rows: jobs.map(brief), cursor });

// Counts and chart follow the filters. With a text there are none: it would be looked for in every letter.
async function summary({ text, ...filters }) {
  const where = queryOf(filters);
  const [all, timeline, stats] = await Promise.all([
    call("GET", `${KIND}/stats`), text ? null : call("GET", `${KIND}/timeline`, { query: where }),
    text ? null : call("GET", `${KIND}/stats`, { query: where }),
  ]);
  return { all, timeline, stats };
}

function Letters({ filters }) {
  useDesk();
  const list = useList("letters", KIND, () => queryOf(filters), filters, read), { rows, chosen, load } = list;
  const { data } = useLive(() => summary(filters), [JSON.stringify(filters)]), known = data?.stats || data?.all || {};
  const some = () => [...chosen.values()], own = (row) => (chosen.size ? some() : row ? [row] : []);
  const over = (action, rows) => guarded(async () => { if (rows.length) await act(action, { rows }); });
  const all = (action) => () =>
    act(action, { filter: queryOf(filters) }, { all: "Every dead letter there is: no filter is set." });
  const here = () => rows.find(({ id }) => id === document.activeElement?.closest("[data-row]")?.dataset.id);
  useTitle("Letters");
  const replay = () => may("replay") && over("retry", own(here()));
  useKeys({ r: replay, p: replay, d: () => may("delete") && over("purge", own(here())) });
  const fields = [
    { name: "error_type", label: "Error type, or prefix.*", options: known.by_error_type },
    { name: "type", label: "Job type, or prefix.*", options: known.by_type }, { name: "queue", label: "Queue",
      options: known.by_queue },
  ];
  const draw = (props) => html`<${Line} ...${props} over=${over} />`;
  const everything = () => go("letters", { ...filters, within: "all", since: "", until: "" });
  const isNarrow = Object.keys(withoutWindow(filters)).length > 0;
  return html`<div class="top"><h1 class="h">Letters</h1><span class="q" id="letters-here">${data && sizes(data)}</span>
      <${Menu} label="With all that match" items=${() => [
        may("replay") && { text: "Replay all that match…", act: all("retry") }, may("delete") &&
          { text: "Delete all that match…", danger: true, act: all("purge") }].filter(Boolean)} /></div>
    ${data && html`<${Warnings} retention=${data.all.retention} replayable=${data.all.replayable} rows=${rows} />`}
    <${Filters} ...${{ view: "letters", filters, fields, search: SEARCH }}>${filters.group &&
      html`<button type="button" onClick=${() => go("letters", { ...filters, group: "" })}>One group only ×</button>`}
      <${Window} view="letters" filters=${filters} /></${Filters}>
    ${data?.timeline && html`<${Deaths} timeline=${data.timeline} view="letters" filters=${filters} height=${110}
      onBar=${(since, until) => go("letters", { ...withoutWindow(filters), since, until })} />`}
    <${Rows} list=${list} draw=${draw} may=${may("replay")} className="letters" headClass="lhead" head=${HEAD}
      id="letters" aria-label="Dead letters"
      words=${isNarrow ? "No dead letter matches these filters." : filters.within === "all" ?
        "There is no dead letter." : "No job has died in this time."} showAll=${filters.within !== "all" && everything}
        />
    <${Bar} list=${list} what="letters">
      ${may("replay") && html`<button type="button" class="first" onClick=${() => over("retry", some())}>Replay…
        </button>`}
      ${may("delete") && html`<button type="button" class="danger" onClick=${() => over("purge", some())}>Delete…
        </button>`}</${Bar}>`;
}

const sizes = ({ all, stats }) => (stats && stats.total < all.total ? `${count(stats.total)} of ${count(all.total)}`
  : `${count(all.total)} in all`);

const HEAD = html`<span>died</span><span>error</span><span class="lo">job</span><span class="lo">queue</span>
  <span class="num lo">attempts</span><span></span>`;

function Line({ row, isChosen, list, may: mayPick, over }) {
  const { id, type, queue, attempt, discarded_at: at, error_type: error, message } = row,
    name = worded(error, message) || type, href = addressOf("letters", {}, id);
  const items = () => [
    { text: "Open", href }, may("replay") && { text: "Replay…", act: () => over("retry", [row]) },
    { text: "Copy id", act: () => copy(id, "the id") },
    may("delete") && { text: "Delete…", danger: true, act: () => over("purge", [row]) },
  ].filter(Boolean);
  return html`<li data-row data-id=${id}>${mayPick ? html`<${Pick} ...${{ row, isChosen, list, label: id }} />` : html`
    <span />`}
    <time class="nw q s" datetime=${at} title=${stamp(at)}>${when(at)}</time>
    <div class="what"><a class="msg" href=${href} title=${cut(message, 1000)}>${cut(name, 500)}</a>
      <span class="q s one sub">${name.includes(error) ? "" : `${error} `}
        <code>${cut(argumentsOf(row), 200)}</code></span></div>
    <span class="lo one" title=${type}>${type}</span><span class="lo q s one" title=${queue}>${queue}</span>
    <span class="num lo q">${attempt}</span>
    <${Menu} label=${cut(message || type, 80)} items=${items} /></li>`;
}

// What this page cannot send back, and what a limit of the number has deleted in the last day, or is about to delete.
function Warnings({ retention: { fullness = {}, overflow = 0, overflow_of: groups = {} }, replayable, rows }) {
  const others = [...new Set(rows.map(({ framework }) => framework))].filter((name) =>
    !replayable.includes(name)).join(" and ");
  const keep = "An export keeps them, and so does Retention(archive=…).", full = Object.entries(fullness).filter(([,
    share]) => share >= 0.9);
  const beyond = "beyond it the largest groups lose their oldest.";
  const named = Object.entries(groups).map(([name, number]) => `${count(number)} of ${name}`).join(", ");
  const told = full.map(([queue, share]) =>
    `${queue === "*" ? "" : `queue ${queue} `}${Math.round(100 * share)} %`).join(", ");
  return [
    others && `This page cannot replay the letters of ${others}: it is served without their app or broker.`,
    overflow ? `max_count has deleted ${count(overflow)} dead letters in the last day: ${named}. ${keep}`
      : full.length && `Dead letters are nearly as many as max_count (${told}): ${beyond} ${keep}`,
  ].filter(Boolean).map((text) => html`<p class="note retried-note" role="status" key=${text}>${text}</p>`);
}
