// The replay question: a probe first or all, how fast, when to stop, and what speaks against it.

import { call, clock, count, html, Sign, span } from "./ui.js";

const PROBE = 10, RATE = 5, STOP = 50;
const COUNT = { type: "number", min: "1", max: "10000", step: "1" };
const PER_SECOND = { type: "number", min: "0.1", max: "10000", step: "any" };

// The parts of a question about so many letters; `firstAt` is the first death of their fault, where that is known.
// Only the letters of a filter can be probed: chosen ones have no rest.
export async function Sending({ matched, deed, firstAt, canProbe }) {
  const mark = firstAt ? (await call("GET", "marks", { query: { limit: 1 } })).marks[0] : null;
  const isUnmended = mark && mark.at < firstAt;
  const Body = ({ values, change }) => html`
    ${isUnmended && html`<p class="note retried-note"><b class="retried"><${Sign} name="retried"
      /> Nothing was mended yet.</b>${" "}
      The newest mark is ${mark.text}, ${clock(mark.at)}, before the first death: the same code would run again.</p>`}
    ${canProbe && matched > PROBE && html`<${HowMany} ...${{ matched, values, change }} />`}
    <${Pace} ...${{ matched: sending(values, matched), values, change }} />`;
  const yes = (values) => (isProbe(values, matched) ? `Send ${values.n}, then ask` : deed);
  const note = (values) => isProbe(values, matched) && `${values.n} are sent in ${lasts(values,
    matched)}; ${count(matched - values.n)} stay letters.`;
  return { Body, yes, note, values: { how: canProbe ? "probe" : "all", n: PROBE, which: "newest", rate: RATE,
    stop: STOP } };
}

const isProbe = ({ how, n }, matched) => matched > PROBE && how === "probe" && n < matched;
const sending = (values, matched) => (isProbe(values, matched) ? Number(values.n) : matched);
const lasts = (values, matched) => span(sending(values, matched) / (values.rate || RATE));

// What the answers make of a body.
export function sent(values, matched) {
  const { n, which, rate, stop } = values;
  return {
    ...(isProbe(values, matched) && { limit: Number(n), newest: which === "newest" }),
    ...(rate && { rate: Number(rate) }),
    ...(stop && { stop_if_failing: Number(stop) / 100 }),
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

function Pace({ matched, values, change }) {
  const set = (name) => (event) => change({ [name]: event.target.value });
  return html`<div class="fields">
    <label for="ask-rate">At most</label>
    <div class="row"><input id="ask-rate" ...${PER_SECOND} value=${values.rate} onInput=${set("rate")} /> a second${" "}
      <span class="q s">${count(matched)} in ${span(matched / (values.rate || RATE))}</span></div>
    <label for="ask-stop">Stop when</label>
    <div class="row"><input id="ask-stop" type="number" min="0" max="99" step="1" value=${values.stop}
      onInput=${set("stop")} />
      % of those that ended died again</div>
  </div>`;
}
