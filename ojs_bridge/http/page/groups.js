// The groups of dead letters whose errors are alike.

import { call, mayWrite, pathOf } from "./api.js";
import { listOf } from "./list.js";
import * as operations from "./operations.js";
import { addressOf } from "./place.js";
import { ago, cut, guarded, make, question, stamp, when } from "./view.js";

const KIND = "dead-letter/groups";
const MUTE = { yes: "Mute the group", no: "Leave it in the list", isDanger: false, done: "Muted a group" };
const groups = new Map();

const list = listOf({
  name: "groups",
  kind: KIND,
  row,
  pageOf: ({ groups: found, next_cursor: cursor }) => ({
    jobs: found.map(entryOf), pagination: { next_cursor: cursor, has_more: cursor !== null },
  }),
  words: { none: "There is no group.", unmatched: "No group matches these filters." },
});

export const { load, loadMore, fill, isFree, refresh } = list;
// The link has the window as it was chosen, which the list of the letters shows.
export function open(id) {
  const { order, muted, ...where } = list.typed();
  location.assign(addressOf("letters", { ...where, group: id }));
}
export const keys = { r: (id) => id && act("Replay", id), d: (id) => id && act("Delete", id) };

function entryOf(group) {
  groups.set(group.fingerprint, group);
  return { ...group, id: group.fingerprint, at: group.last_at, outcome: group.muted?.at };
}

// The letters of a group, as the filters of this view choose them.
function filterOf(id) {
  const { order, muted, ...where } = list.filter();
  return { ...where, group: id };
}

function row(group) {
  const { id, error_type: type, pattern, frame, message, count, last_at: last, first_at: first, muted } = group;
  const touched = [...group.types, ...group.queues].join(", ");
  const click = (event) => event.target.closest("button") || guarded(() => open(id));
  return make(
    "li", { on: { click } },
    when(last), make("span", { className: "quiet", title: stamp(first) }, `first ${ago(first)}`),
    make("b", {}, count.toLocaleString()), sparkline(group),
    make("span", { className: "what", title: cut(message, 1000) }, make("code", {}, type), ` ${pattern}`, frame ? make("span", { className: "quiet" }, ` at ${frame}`) : ""),
    make("span", { className: "quiet", title: touched }, muted ? `muted by ${muted.by} until ${stamp(muted.until)}` : touched),
    make("span", {}, button("Replay", id), " ", button("Delete", id), " ", muteButton(id, muted)),
  );
}

function sparkline({ deaths: { since, step_seconds: step, counts } }) {
  const most = Math.max(1, ...counts), until = Date.parse(since) + counts.length * step * 1000;
  const bars = counts.map((count) => {
    const bar = make("i");
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  });
  const label = `Deaths from ${stamp(since)} to ${stamp(until)}, at most ${most} a bar`;
  return make("span", { className: "bars", role: "img", ariaLabel: label, title: label }, ...bars);
}

function button(verb, id) {
  const className = verb === "Delete" ? "danger" : "";
  return make("button", { type: "button", className, disabled: !mayWrite(), data: { write: "" }, on: { click: () => guarded(() => act(verb, id)) } }, `${verb}…`);
}

// Replays or deletes the letters of a group, after telling how many they are now.
async function act(verb, id) {
  const { error_type: type, pattern } = groups.get(id);
  await operations.askForAll(verb, filterOf(id), "", `${type}: ${pattern}`);
}

function muteButton(id, muted) {
  const { error_type: type, pattern } = groups.get(id), path = pathOf(KIND, id, "mute");
  const click = () => guarded(async () => {
    if (muted) await call("DELETE", path);
    else if (!await question(`${type}: ${pattern}\nFor seven days, or until it has twice as many deaths. Its letters stay as they are.`, MUTE, (body) => call("POST", path, { body }))) return;
    await load();
  });
  return make("button", { type: "button", disabled: !mayWrite(), data: { write: "" }, on: { click } }, muted ? "Unmute" : "Mute…");
}
