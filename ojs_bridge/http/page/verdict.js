// The verdict: one sentence in the largest type, why, what to do, and what else is known, a line each.

import { pause } from "./holds.js";
import { isBlank } from "./pulse.js";
import { addressOf, clock, count, cut, guarded, html, localized, may, rate, Sign, useDesk } from "./ui.js";

const LEVELS = {
  well: ["succeeded", "succeeded", ""], slow: ["slow", "retried", "slow"], bad: ["died", "died", "bad"],
  away: ["died", "died", "bad"],
};
// A line's sign, colour and word, and what its number counts.
const KINDS = {
  bleeds: ["died", "died", "Dies", "a minute"], contained: ["held", "held", "Held", "held"],
  on_its_way: ["growing", "retried", "Grows", "retry"], slow: ["slow", "retried", "Slow", "wait"],
  away: ["died", "died", "Away", ""], ended: ["died", "q", "Ended", "died"],
};

export function titleOf({ level, sentence, about }) {
  if (level === "well") return "Well";
  if (level === "away") return sentence.split(" since ")[0].replace(/\.$/, "");
  return about?.type && about.kind === "bleeds" && about.count
    ? `${rate(about.count)} a minute die: ${cut(about.type, 60)}` : level === "bad" ? "Bad" : "Slow";
}

export function Verdict({ now }) {
  useDesk();
  const { level, sentence, why, lines, about } = now.verdict, [sign, colour, ground] = LEVELS[level];
  const [reason, said] = level === "away" ? why.split("It says: ") : [why];
  return html`<section class=${`verdict ${ground}`} aria-label="Verdict" data-level=${level}>
    <h1><${Sign} name=${sign} colour=${colour} />${cut(localized(sentence), 400)}</h1>
    ${why && html`<p class="why">${cut(localized(reason), 600)} <${AsOf} now=${now} /></p>`}
    ${said && html`<details class="s"><summary>What its driver says</summary><code class="wrap">${cut(said, 600)}</code>
      </details>`}
    <${Ways} about=${about || lines[0]} level=${level} />
    ${lines.length > 0 && html`<ul class="also" aria-label="Also">
      ${lines.map((line) => html`<${Line} ...${line} />`)}</ul>`}
  </section>`;
}

// What of the page is old, while the store is away.
const AsOf = ({ now }) => now.pulse.store.status === "away" && (isBlank(now) ? "Nothing else is known yet."
  : `What is grey is of ${clock(now.at)}${now.pulse.broker.status === "ok" ? "; the queues are live." : "."}`);

// The first steps: to the cause, and to a stop.
function Ways({ about, level }) {
  if (level === "well" || !about) return null;
  const { fingerprint, type, dependency, kind } = about;
  const mayPause = type && kind === "bleeds" && may("write");
  if (!fingerprint && !mayPause) return null;
  return html`<div class="do">
    ${fingerprint && html`<a class="button first" href=${addressOf("groups", {}, fingerprint)}>Open the group</a>`}
    ${mayPause && html`<${Pause} start=${{ type }} words=${cut(type, 60)} />`}
    ${mayPause && dependency && html`<${Pause} start=${{ dependency }} words=${`all of ${cut(dependency, 40)}`} />`}
  </div>`;
}

const Pause = ({ start, words }) =>
  html`<button type="button" onClick=${() => guarded(() => pause(start))}>Pause ${words}…</button>`;

// Where a line leads: to its group, to what is held, else to the rates of what it is about.
function hrefOf({ kind, type, fingerprint, queue, dependency }) {
  if (fingerprint) return addressOf("groups", {}, fingerprint);
  if (kind === "contained") return addressOf("waiting", { kind: "held" });
  if (queue || type) return addressOf("rates", queue ? { queue } : { type });
  return dependency ? addressOf("waiting") : "";
}

function Line(line) {
  const { kind, count: number } = line, href = hrefOf(line);
  const [sign, colour, word, what] = KINDS[kind] || KINDS.slow;
  const shown = number > 0 && (number < 10 ? rate(number) : count(Math.round(number)));
  const told = shown && html`<b>${shown}</b> ${what}`;
  return html`<li><b class=${colour}><${Sign} name=${sign} />${word}</b><span><${Text} ...${line} /></span>
    ${told && (href ? html`<a href=${href}>${told}</a>` : html`<span class="nw">${told}</span>`)}</li>`;
}

// A sentence, in which what it is about is bold.
function Text({ text, type, queue, dependency }) {
  const words = cut(localized(text), 400), name = [dependency, type, queue].find((one) => one && words.includes(one));
  const at = name ? words.indexOf(name) : 0;
  return name ? html`${words.slice(0, at)}<b>${name}</b>${words.slice(at + name.length)}` : words;
}
