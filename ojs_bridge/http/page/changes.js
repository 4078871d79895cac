// The form that changes a dead letter before it is replayed.

import { json, make } from "./view.js";

const isList = Array.isArray;
const isObject = (value) => value !== null && typeof value === "object" && !isList(value);

const FIELDS = {
  queue: { label: "Queue" },
  args: { label: "Arguments, a list in JSON", is: isList, wrong: 'This is no list such as [1, "a"].' },
  kwargs: { label: "Named arguments, an object in JSON", is: isObject, wrong: 'This is no object such as {"a": 1}.' },
};

// The form, and what it changes: only the fields that differ, each with its text as it was typed.
export function formOf(job, { typed, submitted }) {
  const fields = Object.keys(FIELDS).map((name) => field(job, name));
  const box = make(
    "details", { id: "changes" }, make("summary", {}, "Replay with changes"),
    make("form", { noValidate: true, on: { submit, input: typed } }, ...fields.map(({ place }) => place)),
  );
  return { box, changed, areRight };

  function submit(event) {
    event.preventDefault();
    submitted();
  }

  function changed() {
    return fields.filter(({ differs }) => differs()).map(({ name, text }) => [name, text()]);
  }

  function areRight() {
    const wrong = fields.filter(({ check }) => !check());
    if (wrong.length) box.open = true;
    wrong[0]?.focus();
    return !wrong.length;
  }
}

function field(job, name) {
  const { label, is, wrong } = FIELDS[name], id = `change-${name}`, why = whyEmpty(job, name);
  const first = why ? "" : name === "queue" ? job.queue : json(job[name]);
  const input = make(is ? "textarea" : "input", {
    id, value: first, placeholder: why, spellcheck: false, autocomplete: "off", on: { input: check },
  });
  const problem = make("p", { id: `${id}-problem`, className: "danger", role: "alert", hidden: true });
  input.setAttribute("aria-describedby", problem.id);
  const place = make("div", {}, make("label", { htmlFor: id }, label), input, problem);
  const differs = () => input.value !== first;
  return { name, place, differs, check, focus: () => input.focus(), text: () => textOf(input, is) };

  function check() {
    const found = differs() ? problemOf(input.value, is, wrong) : "";
    problem.textContent = found;
    problem.hidden = !found;
    input.setAttribute("aria-invalid", String(Boolean(found)));
    return !found;
  }
}

// What is typed goes to the server as it is: a number may have more digits than this language keeps.
const textOf = (input, is) => (is ? input.value : JSON.stringify(input.value.trim()));

function problemOf(text, is, wrong) {
  if (!is) return text.trim() ? "" : "A queue has a name.";
  try {
    return is(JSON.parse(text)) ? "" : wrong;
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

// Why a field cannot begin with what the job has.
function whyEmpty(job, name) {
  if (name === "queue") return "";
  if (job[name] === null) return job.note || "not kept";
  if (job.hidden.includes(name)) return "Some values are hidden: all stays as it is, unless you type all of it.";
  return isExact(job[name]) ? "" : "Some numbers are too long to show: all stays as it is, unless you type all of it.";
}

function isExact(value) {
  if (typeof value === "number") return !Number.isInteger(value) || Number.isSafeInteger(value);
  return value === null || typeof value !== "object" || Object.values(value).every(isExact);
}
