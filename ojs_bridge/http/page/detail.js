// One dead letter, whole.

import { call, pathOf } from "./api.js";
import { keepOpen } from "./place.js";
import { byId, deed, guarded, make, question, shown, when } from "./view.js";

export const KIND = "dead-letter";

export async function open(id, changed) {
  const job = await call("GET", pathOf(KIND, id)).catch((error) => {
    keepOpen("");
    throw error;
  });
  byId("detail-body").replaceChildren(...parts(job), ...changes(job, changed), menu(job, changed));
  keepOpen(id);
  if (!byId("detail").open) byId("detail").showModal();
}

export const close = () => byId("detail").close();
byId("detail").addEventListener("close", () => keepOpen(""));

// A job in a few lines, to be sure that it is the one.
export function summary(job) {
  const last = job.errors?.at(-1);
  return [job.type, last && `${last.type}: ${last.message}`, job.id].filter(Boolean).join("\n");
}

function parts(job) {
  return [
    make("h2", { id: "detail-title" }, job.type),
    make("p", {}, job.metadata.reason),
    facts(job),
    make("h3", {}, "Arguments"),
    job.args === null ? make("p", { className: "quiet" }, job.note || "not kept") : argumentsOf(job),
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
  };
  const known = Object.entries(told).filter(([, value]) => value !== undefined && value !== null);
  return make("dl", {}, ...known.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, String(value))]));
}

function argumentsOf(job) {
  const named = job.args.map((value, n) => [(job.parameters || [])[n], value]);
  const all = named.every(([name]) => name) ? Object.fromEntries(named) : job.args;
  const meta = Object.keys(job.meta).length ? { meta: job.meta } : {};
  return shown({ args: all, kwargs: job.kwargs, ...meta });
}

function entry(error, n) {
  const replay = error.replay ? `replay ${error.replay}, ` : "";
  const title = `${replay}attempt ${error.attempt}: ${error.type}: ${error.message}`;
  const body = [make("pre", { tabIndex: 0 }, [error.backtrace ?? []].flat().join("\n"))];
  if (Object.keys(error.details || {}).length) body.unshift(shown(error.details));
  return make(
    "details", { open: n === 0 }, make("summary", {}, when(error.occurred_at), ` ${title}`), ...body,
  );
}

function schedule(job) {
  if (!job.policy) return [];
  const rows = job.schedule.map((seconds, n) =>
    make("tr", {}, make("td", {}, `retry ${n + 1}`), make("td", {}, `after ${seconds} s`)));
  return [make("h3", {}, "Policy and its schedule"), shown(job.policy), make("table", {}, ...rows)];
}

const REPLACED = { queue: "Queue", args: "Arguments, a list in JSON", kwargs: "Named arguments, an object in JSON" };

// What is left empty stays as it is: what is shown may be redacted, and must not be sent back as that.
function changes(job, changed) {
  const fields = Object.entries(REPLACED).map(([name, placeholder]) =>
    make(name === "queue" ? "input" : "textarea", { name, placeholder, ariaLabel: placeholder }));
  const button = make("button", {}, "Replay with these");
  const form = make("form", { noValidate: true, on: { submit: replay } }, ...fields, button);
  return [make("details", { id: "changes" }, make("summary", {}, "Replay with changes"), form)];

  function replay(event) {
    event.preventDefault();
    const given = fields.filter((field) => field.value.trim());
    const override = Object.fromEntries(given.map((field) => [field.name, valueOf(field)]));
    if (!form.reportValidity()) return;
    const told = Object.entries(override).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
    const work = () => call("POST", pathOf(KIND, job.id, "retry"), { body: { override } });
    ask("Replay", [summary(job), ...told].join("\n"), work, changed);
  }
}

function valueOf(field) {
  field.setCustomValidity("");
  if (field.name === "queue") return field.value.trim();
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.setCustomValidity(`This is not JSON: ${error.message}`);
    return null;
  }
}

async function ask(verb, text, work, changed) {
  if (await question(text, deed(verb, 1), async () => { await work(); })) {
    close();
    await guarded(changed);
  }
}

function menu(job, changed) {
  const buttons = [
    act("Replay", () => call("POST", pathOf(KIND, job.id, "retry"), { body: {} })),
    act("Delete", () => call("DELETE", pathOf(KIND, job.id)), "danger"),
  ];
  return make("menu", {}, make("button", { type: "button", on: { click: close } }, "Close"), ...buttons);

  function act(name, work, className = "") {
    const click = () => ask(name, summary(job), work, changed);
    return make("button", { type: "button", className, on: { click } }, name);
  }
}
