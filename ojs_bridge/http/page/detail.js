// One dead letter or waiting job, whole.

import { call, mayWrite, pathOf } from "./api.js";
import { formOf } from "./changes.js";
import { keepOpen } from "./place.js";
import { byId, cut, deed, guarded, json, make, question, shown, when } from "./view.js";

// The most characters of an error in a title or a question.
const TITLE = 500;

// `buttons` makes the buttons of an entry that is no dead letter.
export async function open(kind, id, changed, buttons) {
  const job = await call("GET", pathOf(kind, id)).catch((error) => {
    keepOpen("");
    throw error;
  });
  byId("detail-body").replaceChildren(...parts(job), ...(buttons ? [menu(buttons(job))] : ending(kind, job, changed)));
  keepOpen(id);
  if (!byId("detail").open) byId("detail").showModal();
}

export const close = () => byId("detail").close();
byId("detail").addEventListener("close", () => keepOpen(""));

// A job in a few lines, to be sure that it is the one.
export function summary(job) {
  const last = job.errors?.at(-1);
  return [job.type, last && cut(`${last.type}: ${last.message}`, TITLE), job.id].filter(Boolean).join("\n");
}

function parts(job) {
  return [
    make("h2", { id: "detail-title" }, job.type),
    make("p", {}, cut(job.metadata.reason, TITLE)),
    facts(job),
    make("h3", {}, "Arguments"),
    ...argumentsOf(job),
    make("h3", {}, `History (${job.errors.length})`),
    ...[...job.errors].reverse().map(entry),
    ...schedule(job),
  ];
}

function facts(job) {
  const told = {
    id: job.id, queue: job.queue, attempts: `${job.attempt} of ${job.max_attempts}`, cause: job.metadata.cause,
    framework: job.metadata.framework, replays: job.metadata["ojs.replay_count"],
    enqueued: job.metadata.created_at, died: job.metadata.discarded_at,
    state: job.state, parked: job.metadata.parked_at, due: job.next_retry_at || job.scheduled_at,
  };
  const known = Object.entries(told).filter(([, value]) => value !== undefined && value !== null);
  return make("dl", {}, ...known.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}

function argumentsOf(job) {
  if (job.args === null) return [make("p", { className: "quiet" }, job.note || "not kept")];
  const names = job.parameters.slice(0, job.args.length).join(", ");
  const parts = [[names ? `args: ${names}` : "args", job.args]];
  for (const name of ["kwargs", "meta"]) if (Object.keys(job[name] || {}).length) parts.push([name, job[name]]);
  return parts.flatMap(([name, value]) => [make("p", { className: "quiet" }, name), ...shown(json(value))]);
}

function entry(error, n) {
  const replay = error.replay ? `replay ${error.replay}, ` : "";
  const title = `${replay}attempt ${error.attempt}: ${error.type}: ${error.message}`;
  const body = shown([error.backtrace ?? []].flat().join("\n"));
  if (Object.keys(error.details || {}).length) body.unshift(...shown(json(error.details)));
  if (title.length > TITLE) body.unshift(...shown(String(error.message)));
  return make(
    "details", { open: n === 0 }, make("summary", {}, when(error.occurred_at), ` ${cut(title, TITLE)}`), ...body,
  );
}

function schedule(job) {
  if (!job.policy || !job.schedule) return [];
  const rows = job.schedule.map((seconds, n) =>
    make("tr", {}, make("td", {}, `retry ${n + 1}`), make("td", {}, `after ${seconds} s`)));
  return [make("h3", {}, "Policy and its schedule"), ...shown(json(job.policy)), make("table", {}, ...rows)];
}

async function ask(verb, text, work, changed) {
  if (await question(text, deed(verb, 1), work)) {
    close();
    await guarded(changed);
  }
}

function menu(buttons) {
  return make("menu", {}, make("button", { type: "button", on: { click: close } }, "Close"), ...buttons);
}

function ending(kind, job, changed) {
  const form = formOf(job, { typed, submitted: replay });
  const disabled = !mayWrite();
  const again = make("button", { type: "button", disabled, data: { write: "" }, on: { click: replay } }, "Replay");
  const remove = () => ask("Delete", summary(job), (body) => call("DELETE", pathOf(kind, job.id), { body }), changed);
  const buttons = [
    again, make("button", { type: "button", className: "danger", disabled, data: { write: "" }, on: { click: remove } }, "Delete"),
  ];
  const why = make("p", { className: "quiet" }, "This token can only read.");
  return [disabled ? why : form.box, menu(buttons)];

  function typed() {
    again.textContent = form.changed().length ? "Replay as changed" : "Replay";
  }

  function replay() {
    if (!form.areRight()) return;
    const changes = form.changed();
    const told = changes.map(([name, text]) => `${name}: ${cut(text, 500)}`);
    const override = `{${changes.map(([name, text]) => `"${name}": ${text}`).join(", ")}}`;
    const bodyOf = ({ reason }) => `{"override": ${override}${reason ? `, "reason": ${JSON.stringify(reason)}` : ""}}`;
    const work = (why) => call("POST", pathOf(kind, job.id, "retry"), { body: bodyOf(why) });
    ask("Replay", [summary(job), ...told].join("\n"), work, changed);
  }
}
