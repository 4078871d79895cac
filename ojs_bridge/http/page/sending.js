// The replay question: a probe first or all, how fast, when to stop, with which changes, and what speaks against it.

import { call, clock, count, desk, html, rate, Sign, span, useState } from "./ui.js";

const PROBE = 10, RATE = 5, STOP = 50;
const COUNT = { type: "number", min: "1", max: "10000", step: "1" };
const PER_SECOND = { type: "number", min: "0.1", max: "10000", step: "any" };

// The parts of a question about so many letters; `firstAt` is the first death of their fault, where that is known.
// Only the letters of a filter can be probed: chosen ones have no rest.
export async function Sending({ matched, choice, deed, firstAt, queues = [], canProbe }) {
  const mark = firstAt ? (await call("GET", "marks", { query: { limit: 1 } })).marks[0] : null;
  const isUnmended = mark && mark.at < firstAt;
  const takes = (desk.now?.queues || []).filter(({ queue, out_per_second: out }) => queues.includes(queue) && out)
    .map(({ queue, out_per_second: out }) => `${queue} takes ${rate(out)} a second now`).join(", ");
  const Body = ({ values, change }) => html`
    ${isUnmended && html`<p class="note retried-note"><b class="retried"><${Sign} name="retried"
      /> Nothing was mended yet.</b>${" "}
      The newest mark is ${mark.text}, ${clock(mark.at)}, before the first death: the same code would run again.</p>`}
    ${canProbe && matched > PROBE && html`<${HowMany} ...${{ matched, values, change }} />`}
    <${Pace} ...${{ matched: sending(values, matched), takes, values, change }} />
    <${Changes} ...${{ choice, values, change }} />`;
  const yes = (values) => (isProbe(values, matched) ? `Send ${values.n}, then ask` : deed);
  const note = (values) => isProbe(values, matched) && `${values.n} are sent in ${lasts(values,
    matched)}; ${count(matched - values.n)} stay letters.`;
  return { Body, yes, note, values: { how: canProbe ? "probe" : "all", n: PROBE, which: "newest", rate: RATE,
    stop: STOP, changes: [] } };
}

const isProbe = ({ how, n }, matched) => matched > PROBE && how === "probe" && n < matched;
const sending = (values, matched) => (isProbe(values, matched) ? Number(values.n) : matched);
const lasts = (values, matched) => span(sending(values, matched) / (values.rate || RATE));

// What the answers make of a body.
export function sent(values, matched) {
  const { n, which, rate, stop, changes } = values;
  return {
    ...(isProbe(values, matched) && { limit: Number(n), newest: which === "newest" }),
    ...(rate && { rate: Number(rate) }),
    ...(stop && { stop_if_failing: Number(stop) / 100 }),
    ...(changes?.length && { changes: changesOf(changes) }),
  };
}

function HowMany({ matched, values, change }) {
  const set = (name) => (event) => change({ how: "probe", [name]: event.target.value });
  const radio = (how) => html`<input type="radio" name="how" value=${how} checked=${values.how === how}
    onChange=${() => change({ how })} />`;
  return html`<fieldset class="choice">
    <legend class="out">How many</legend>
    <label>${radio("probe")}<b>A probe, then ask</b>
      <span class="row">first <input aria-label="How many" ...${COUNT} value=${values.n} onInput=${set("n")} required />
        <select aria-label="Which" value=${values.which} onChange=${set("which")}>
          <option value="newest">newest</option><option value="oldest">oldest</option>
        </select></span></label>
    <label>${radio("all")}<b>All ${count(matched)}</b>
      <small>${span(matched / (values.rate || RATE))} at ${values.rate || RATE} a second</small></label>
  </fieldset>`;
}

function Pace({ matched, takes, values, change }) {
  const set = (name) => (event) => change({ [name]: event.target.value });
  return html`<div class="fields">
    <label for="ask-rate">At most</label>
    <div class="row"><input id="ask-rate" ...${PER_SECOND} value=${values.rate} onInput=${set("rate")} /> a second${" "}
      <span class="q s">${takes || `${count(matched)} in ${span(matched / (values.rate || RATE))}`}</span></div>
    <label for="ask-stop">Stop when</label>
    <div class="row"><input id="ask-stop" type="number" min="0" max="99" step="1" value=${values.stop}
      onInput=${set("stop")} />
      % of those that ended died again</div>
  </div>`;
}

const KINDS = { set: "set", rename: "rename", remove: "remove" };

// The changes of the arguments of all letters that are sent, with ten letters as they are and as they would be.
function Changes({ choice, values: { changes, which }, change }) {
  const [ten, setTen] = useState(null);
  const put = (next) => { setTen(null); change({ changes: next }); };
  const edit = (n, more) => put(changes.map((one, at) => (at === n ? { ...one, ...more } : one)));
  const add = () => put([...changes, { kind: "set", name: "", value: "" }]);
  const look = async () => {
    try {
      setTen(await call("POST", "operations/preview", { body: { action: "retry", ...choice,
        newest: which === "newest", changes: changesOf(changes) } }));
    } catch (error) {
      setTen({ problem: error.message });
    }
  };
  return html`<div class="fields"><span>Arguments</span><div class="row">
    ${changes.length ? "" : html`<span>as they are</span>`}
    <button type="button" class="bare" onClick=${add}>${changes.length ? "One more change" : "Change…"}</button></div>
      </div>
    ${changes.map((one, n) => html`<div class="row change">
      <select aria-label="What is done" value=${one.kind} onChange=${(event) => edit(n, { kind: event.target.value })}>
        ${Object.keys(KINDS).map((kind) => html`<option value=${kind}>${KINDS[kind]}</option>`)}</select>
      <input type="text" aria-label="Argument" placeholder="argument" required value=${one.name}
        onInput=${(event) => edit(n, { name: event.target.value })} />
      ${one.kind !== "remove" && html`<span>to</span><input type="text" aria-label="To" required value=${one.value}
        placeholder=${one.kind === "set" ? 'a value in JSON, such as "CH"' : "a name"} onInput=${(event) =>
          edit(n, { value: event.target.value })} />`}
      <button type="button" class="bare" aria-label="Without this change" onClick=${() =>
        put(changes.filter((_, at) => at !== n))}>×</button>
    </div>`)}
    ${changes.length > 0 && html`<div><button type="button" onClick=${look}>Look at ten letters</button></div>`}
    ${ten && html`<${Ten} ...${ten} />`}`;
}

function Ten({ problem, letters = [] }) {
  if (problem) return html`<p class="note died" role="alert">${problem}</p>`;
  const shown = (names, { args, kwargs }) => html`<code>${JSON.stringify({
    ...Object.fromEntries((args || []).map((one, at) => [names[at] ?? at, one])), ...kwargs })}</code>`;
  return html`<table class="ten"><thead><tr><th scope="col">as it is</th><th scope="col">as it is sent</th></tr>
    </thead><tbody>
    ${letters.map(({ parameters, before, after, notes, error }) => html`<tr><td>${shown(parameters, before)}</td>
      <td>${error ? html`<span class="died">${error}</span>` : shown(parameters, after)}
        ${notes.length > 0 && html`<div class="s">${notes.join("; ")}</div>`}</td></tr>`)}
  </tbody></table>`;
}

// A value that is no JSON is a text.
function changesOf(changes) {
  const set = {}, rename = {}, remove = [];
  for (const { kind, name, value } of changes) {
    if (kind === "set") set[name] = jsonOr(value);
    else if (kind === "rename") rename[name] = value;
    else remove.push(name);
  }
  return { set, rename, remove };
}

function jsonOr(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
