// The form that changes a dead letter before it is replayed: a field for each argument, or JSON where it must be.

import { ask, typed } from "./ask.js";
import { call, cut, guarded, html, json, many, pathOf, useRef, useState } from "./ui.js";

const isObject = (value) => value !== null && typeof value === "object";
const WRONG = { args: 'This is no list such as [1, "a"].', kwargs: 'This is no object such as {"a": 1}.' };
const HIDDEN = "Some values are hidden: all stays as it is, unless you type all of it.";
const TOO_LONG = "Some numbers are too long to show: all stays as it is, unless you type all of it.";

export function Edit({ job, may, changed }) {
  const simple = isSimple(job), [isJson, setJson] = useState(!simple), [values, setValues] = useState({}),
    [problems, setProblems] = useState({});
  const fields = [...(isJson ? jsonFields(job) : simpleFields(job)), { name: "queue", label: "queue", first: job.queue,
    part: "queue", isText: true }];
  const form = useRef(null), valueOf = (field) => values[field.name] ?? field.first;
  const differing = fields.filter((field) => valueOf(field) !== field.first), number = differing.length;
  const deed = number > 0 && `Replay with ${many(number, "change")}`;
  const put = (field, value) => {
    setValues({ ...values, [field.name]: value });
    setProblems({ ...problems, [field.name]: problems[field.name] && problemOf(field, value) });
  };
  const turn = () => { setJson(!isJson); setValues({}); setProblems({}); };

  async function submit(event) {
    event.preventDefault();
    const wrong = Object.fromEntries(differing.map((field) => [field.name, problemOf(field,
      valueOf(field))]).filter(([, problem]) => problem));
    setProblems(wrong);
    const [first] = Object.keys(wrong);
    if (first) return form.current.elements[first].focus();
    const override = overrideOf(fields, differing, valueOf);
    const lines = differing.map((field) => `${field.label}: ${cut(valueOf(field), 500)}`);
    const work = (given) => call("POST", pathOf("dead-letter", job.id, "retry"), { body: bodyOf(override,
      typed(given)) });
    const yes = deed || "Replay 1 dead letter";
    const { type, message } = job.errors.at(-1) || {};
    return guarded(() => ask({ title: yes, yes, no: "Do not replay", quote: { message: message || type,
      type: job.type }, lines, work, done: "Replayed 1 dead letter" }));
  }

  return html`<section id="edit" aria-label="Arguments"><header><h2>${may ? "Edit and replay" : "Arguments"}</h2>
      <span class="s q">${number > 0 && `${number} changed`} ${simple && html`<button type="button" class="bare"
        onClick=${turn}>${isJson ? "as fields" : "as JSON"}</button>`}</span></header>
    <form ref=${form} class="example" novalidate onSubmit=${submit}><div class="edit">
      ${fields.map((field) => html`<${Field} key=${field.name} field=${field} value=${valueOf(field)}
        problem=${problems[field.name]} may=${may} put=${(value) => put(field, value)} />`)}
    </div>${may && html`<div class="edit"><button type="submit" class="to ${number ? "first" : ""}">${deed ||
      "Replay as it is"}</button></div>`}</form>
      </section>`;
}

function Field({ field: { name, label, first, why, isLong }, value, problem, may, put }) {
  const id = `change-${name}`, props = {
    id, name, value, placeholder: why, spellcheck: false, autocomplete: "off", readonly: !may, class: value === first ?
      "to" : "to changed",
    "aria-invalid": Boolean(problem), "aria-describedby": problem ? `${id}-problem` : undefined,
      onInput: ({ target }) => put(target.value),
  };
  return html`<label for=${id}>${label}
    </label>${isLong ? html`<textarea ...${props} rows=${Math.min(12, value.split("\n").length + 1)} />` : html`
    <input type="text" ...${props} />`}
    ${value !== first && html`<p class="s q to">was <code>${cut(first || "as it is", 80)}
      </code> <button type="button" class="bare" onClick=${() => put(first)}>put back</button></p>`}
    ${problem && html`<p class="s died to" id="${id}-problem" role="alert">${problem}</p>`}`;
}

// A field for each argument where each is a short value by itself, and nothing is hidden.
function isSimple(job) {
  if (whyEmpty(job, "args") || whyEmpty(job, "kwargs")) return false;
  const all = [...job.args, ...Object.values(job.kwargs)];
  return all.length > 0 && all.length <= 20 && all.every((value) => !isObject(value) && String(value).length <= 200 &&
    !String(value).includes("\n"));
}

function simpleFields(job) {
  const one = (part, key, label, value) =>
    ({ name: `${part}.${key}`, part, key, label, isText: typeof value === "string", first: typeof value === "string" ?
    value : JSON.stringify(value) });
  return [
    ...job.args.map((value, n) => one("args", n, job.parameters[n] || `args[${n}]`, value)),
    ...Object.entries(job.kwargs).map(([name, value]) => one("kwargs", name, name, value)),
  ];
}

const LABELS = { args: "Arguments, a list in JSON", kwargs: "Named arguments, an object in JSON" };

function jsonFields(job) {
  return Object.keys(LABELS).map((name) => {
    const why = whyEmpty(job, name);
    return { name, part: name, label: LABELS[name], isLong: true, why, first: why ? "" : json(job[name]) };
  });
}

// Why a field cannot begin with what the job has.
function whyEmpty(job, name) {
  if (job[name] === null) return job.note || "not kept";
  if (job.hidden.includes(name)) return HIDDEN;
  return isExact(job[name]) ? "" : TOO_LONG;
}

function isExact(value) {
  if (typeof value === "number") return !Number.isInteger(value) || Number.isSafeInteger(value);
  return !isObject(value) || Object.values(value).every(isExact);
}

function problemOf({ name, part, isText }, text) {
  if (part === "queue") return text.trim() ? "" : "A queue has a name.";
  if (isText) return "";
  try {
    const value = JSON.parse(text);
    if (name !== part) return "";
    return (part === "args" ? Array.isArray(value) : isObject(value) && !Array.isArray(value)) ? "" : WRONG[part];
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

// Only what differs goes to the server, as it was typed: a number may have more digits than this language keeps.
function overrideOf(fields, differing, valueOf) {
  const text = (field) =>
    (field.isText ? JSON.stringify(field.part === "queue" ? valueOf(field).trim() : valueOf(field)) : valueOf(field));
  return [...new Set(differing.map(({ part }) => part))].map((part) => {
    const own = fields.filter((field) => field.part === part);
    if (own[0].key === undefined) return `"${part}": ${text(own[0])}`;
    const all = own.map((field) =>
      (part === "args" ? text(field) : `${JSON.stringify(field.key)}: ${text(field)}`)).join(", ");
    return `"${part}": ${part === "args" ? `[${all}]` : `{${all}}`}`;
  });
}

const bodyOf = (override, { reason }) => `{"override": {${override.join(", ")}}${reason ?
  `, "reason": ${JSON.stringify(reason)}` : ""}}`;
