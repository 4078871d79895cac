// The questions before something is done: the title is the deed with its number, and the way out has the focus.

import { cut, html, told, useEffect, useRef, useState } from "./ui.js";

let show = () => {};

// Asks, and resolves to what the work returned, or to nothing where it was not done. A question has a title, the
// words of both buttons, lines of text, the text of an error to `quote`, fields, and the work, which gets the values.
export const ask = (question) => new Promise((resolve) => show({ ...question, resolve, key: Math.random() }));

// Where the question of the moment stands.
export function Questions() {
  const [question, set] = useState(null);
  show = set;
  return question && html`<${Question} key=${question.key} ...${question} closed=${() => set(null)} />`;
}

function Question(question) {
  const { title, yes, no = "Cancel", isDanger, quote, lines = [], note, fields = [], Body, work, done, resolve,
    closed } = question;
  const dialog = useRef(null), [values, setValues] = useState({ reason: "", ...startOf(fields), ...question.values });
  const [problem, setProblem] = useState(""), [state, setState] = useState("open");
  const change = (more) => setValues((before) => ({ ...before, ...more }));
  useEffect(() => {
    dialog.current.showModal();
    (dialog.current.querySelector("[data-first]") || dialog.current.querySelector("[data-no]")).focus();
  }, []);

  async function submit(event) {
    event.preventDefault();
    if (state !== "open" || !event.target.reportValidity()) return;
    setState("busy");
    told("");
    try {
      const result = await work(values);
      if (done) told(done);
      resolve(result ?? true);
      dialog.current.close();
    } catch (error) {
      setProblem(error.message);
      setState("refused");
    }
  }

  // Enter in a field must neither do it nor lose what was typed.
  function keep(event) {
    if (event.key !== "Enter" || !event.target.matches("input")) return;
    event.preventDefault();
    dialog.current.querySelector("[type=submit]").focus();
  }
  const said = (text) => (typeof text === "function" ? text(values) : text);
  return html`<dialog id="question" ref=${dialog} aria-labelledby="question-title" onKeyDown=${keep}
    onClose=${() => { resolve(undefined); closed(); }}>
    <form onSubmit=${submit} autocomplete="off">
      <header><h2 id="question-title">${said(title)}?</h2><${Quote} ...${quote} /></header>
      <div class="in">
        ${problem && html`<p class="note died" role="alert">${problem}</p>`}
        ${lines.filter(Boolean).map((line) => html`<p class="told">${line}</p>`)}
        ${Body && html`<${Body} values=${values} change=${change} />`}
        <div class="fields">
          ${fields.map((field) => html`<${Field} ...${field} value=${values[field.name]} change=${change} />`)}
          <${Field} label="Why" name="reason" value=${values.reason} change=${change} maxlength="1000"
            placeholder="for the audit, optional" />
        </div>
      </div>
      <footer>
        <p class="q s">${said(note)}</p>
        <button type="button" data-no onClick=${() => dialog.current.close()}>${state === "refused" ? "Close" : no}
          </button>
        <button type="submit" class=${isDanger ? "danger" : "first"} disabled=${state !== "open"}>${said(yes)}</button>
      </footer>
    </form>
  </dialog>`;
}

// What is asked about, by the words of its error: an id says nothing to a reader.
function Quote({ message, type, where }) {
  if (!message && !type) return null;
  return html`<blockquote><b>${cut(message || type, 500)}</b>${" "}
    <span class="q">${message ? type : ""}${where ? " at " : ""}</span>${where && html`<code>${where}</code>`}
      </blockquote>`;
}

function Field({ label, name, value, change, isFirst, note, ...rest }) {
  const typed = (event) => change({ [name]: event.target.value });
  return html`<label for="ask-${name}">${label}</label>
    <div class="row"><input id="ask-${name}" name=${name} type="text" ...${rest} value=${value} onInput=${typed}
      data-first=${isFirst} />${note && html`<span class="q s">${note}</span>`}</div>`;
}

const startOf = (fields) => Object.fromEntries(fields.map(({ name, start = "" }) => [name, start]));

// The parts of a body that were typed: numbers are numbers, and times have their zone.
export function typed(values, fields = []) {
  const all = [...fields, { name: "reason" }].filter(({ name }) => String(values[name] ?? "").trim());
  return Object.fromEntries(all.map(({ name, type }) => [name, valueOf(type, values[name])]));
}

function valueOf(type, value) {
  if (type === "number") return Number(value);
  return type === "datetime-local" ? new Date(value).toISOString() : value.trim();
}
