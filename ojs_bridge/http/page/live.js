// Keeps the page up to date, unless the reader is in the middle of something, and tells what is not well.

import { call, tellAway } from "./api.js";
import { ago, byId, make, trouble } from "./view.js";

const PERIOD = 5_000, LONGEST = 60_000;
// The server asks the brokers for its health: that is not done at each turn.
const HEALTH = 15_000;
// The status of an answer without the store.
const AWAY = 503;
// A server that needs long for an answer is asked less often: a tenth of its time is enough.
const SHARE = 10;
const state = { paused: false, failedAt: null, updatedAt: new Date(), wait: PERIOD, timer: 0, turn: 0, askedAt: 0 };

// Calls `refresh` again and again while the page is seen and `isFree` says yes.
export function start(refresh, isFree) {
  const button = byId("live");
  button.addEventListener("click", () => {
    state.paused = !state.paused;
    button.textContent = state.paused ? "Go on" : "Pause";
    begin();
  });
  document.addEventListener("visibilitychange", begin);
  state.timer = setTimeout(turn, state.wait, state.turn);
  tellHealth();

  function begin() {
    clearTimeout(state.timer);
    state.turn += 1;
    tell();
    if (!document.hidden && !state.paused) turn(state.turn);
  }

  async function turn(number) {
    const begun = performance.now();
    tell();
    if (!document.hidden && isFree() && !document.querySelector("dialog[open]")) await attempt(begun);
    // The tab was hidden, or the button was pressed: a newer turn goes on, or none.
    if (number === state.turn) state.timer = setTimeout(turn, state.wait, number);
  }

  async function attempt(begun) {
    try {
      await refresh();
      if (state.failedAt) trouble(null);
      [state.failedAt, state.updatedAt] = [null, new Date()];
      tellStore(false);
      state.wait = Math.min(Math.max(PERIOD, SHARE * (performance.now() - begun)), LONGEST);
    } catch (error) {
      state.failedAt ||= new Date();
      state.wait = Math.min(2 * state.wait, LONGEST);
      tellStore(error.status === AWAY);
      trouble(error);
    }
    tell();
    tellHealth();
  }

  function tell() {
    byId("live-state").textContent = state.paused ? "Paused" : state.failedAt ? away() : isFree() ? "Live" : "Waits";
  }
}

const clock = (time) => time.toLocaleTimeString("sv");
const away = () => `Away since ${clock(state.failedAt)}${isStoreAway() ? "" : `, last update ${clock(state.updatedAt)}`}`;
const isStoreAway = () => Boolean(document.body.dataset.away);

// While the store is away one box says so: its line among what is not well would say it again, with another time.
function tellStore(isAway) {
  tellAway(isAway);
  if (isAway) byId("health").querySelector("[data-name=store]")?.remove();
}

// Tells how many jobs wait in the brokers, and which part of the fleet is away or dead.
async function tellHealth() {
  if (Date.now() < state.askedAt + HEALTH) return;
  state.askedAt = Date.now();
  const { checks } = await call("GET", "health").catch(({ details }) => details || {});
  if (!checks) return;
  const wrong = Object.entries(checks).filter(
    ([name, { status, note }]) => note || (["away", "degraded"].includes(status) && !(name === "store" && isStoreAway())),
  );
  byId("health").replaceChildren(...wrong.map(([name, { status, message, note, away_since: since }]) => {
    const told = since ? `away since ${clock(new Date(since))}: ${message}` : note || `${status}: ${message}`;
    return make("li", { data: { name } }, make("b", {}, name), ` ${told}`);
  }));
  const { depth, queues = [] } = checks.backlog, oldest = queues.map((queue) => queue.oldest_at).filter(Boolean).sort()[0];
  const waiting = depth === undefined ? "" : `${depth.toLocaleString()} in the queues`;
  byId("backlog").textContent = waiting && oldest ? `${waiting}, the oldest due ${ago(oldest)}` : waiting;
}

// Brings the head of a list up to date. Rows that are as they were stay where they are, and the focus with them.
// Returns false where the list has none of these jobs: nobody knows what is between them.
export function renew(list, jobs, isWhole, row) {
  const rows = new Map([...list.querySelectorAll("li")].map((li) => [li.dataset.id, li]));
  const isSame = (job) => rows.get(job.id)?.dataset.at === versionOf(job);
  const kept = jobs.filter(isSame);
  if (!isWhole && rows.size && !kept.length) return false;
  const focus = keepFocus(list);
  const known = [...rows.values()], end = isWhole ? known.length : known.indexOf(rows.get(kept.at(-1)?.id)) + 1;
  const stay = new Set(kept.map(({ id }) => id)), moved = new Set(jobs.map(({ id }) => id));
  for (const [n, li] of known.entries()) {
    if (!stay.has(li.dataset.id) && (n < end || moved.has(li.dataset.id))) li.remove();
  }
  let place = list.firstElementChild.firstElementChild;
  for (const job of jobs) {
    const li = isSame(job) ? rows.get(job.id) : row(job);
    if (li === place) place = place.nextElementSibling;
    else list.firstElementChild.insertBefore(li, place);
  }
  focus();
  return true;
}

// A text that differs when an entry has changed, or has come back.
export const versionOf = (entry) =>
  entry.next_retry_at || entry.scheduled_at || entry.metadata?.discarded_at || [entry.at, entry.outcome, entry.count].join(" ");

function keepFocus(list) {
  const at = document.activeElement, li = list.contains(at) ? at.closest("li") : null;
  if (!li) return () => {};
  const parts = (row) => [row, ...row.querySelectorAll("button, input")], part = parts(li).indexOf(at);
  return () => {
    const now = list.querySelector(`li[data-id="${CSS.escape(li.dataset.id)}"]`);
    if (now && !list.contains(document.activeElement)) parts(now)[part]?.focus({ preventScroll: true });
  };
}
