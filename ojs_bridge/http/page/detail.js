// One dead letter or parked retry, whole.

import { call, pathOf } from "./api.js";
import { byId, guarded, make, question, shown, when } from "./view.js";

export async function open(kind, id, changed) {
  const job = await call("GET", pathOf(kind, id));
  byId("detail-body").replaceChildren(...parts(job), menu(kind, job, changed));
  byId("detail").showModal();
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
    enqueued: job.metadata.created_at, died: job.metadata.discarded_at, "next retry": job.next_retry_at,
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
  const title = `attempt ${error.attempt}: ${error.type}: ${error.message}`;
  const body = [make("pre", { tabIndex: 0 }, (error.backtrace || []).join("\n"))];
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

function menu(kind, job, changed) {
  const buttons = kind === "retries"
    ? [act("Run now", () => call("POST", pathOf(kind, job.id, "run"))),
       act("Cancel for good", () => call("DELETE", pathOf(kind, job.id)), "danger")]
    : [act("Replay", () => call("POST", pathOf(kind, job.id, "retry"), { body: {} })),
       act("Delete", () => call("DELETE", pathOf(kind, job.id)), "danger")];
  const close = make("button", { type: "button", on: { click: () => byId("detail").close() } }, "Close");
  return make("menu", {}, close, ...buttons);

  function act(name, work, className = "") {
    const done = async () => {
      if (await question(`${name}?`, `${job.type} ${job.id}`, name, async () => { await work(); })) {
        byId("detail").close();
        await guarded(changed);
      }
    };
    return make("button", { type: "button", className, on: { click: done } }, name);
  }
}
