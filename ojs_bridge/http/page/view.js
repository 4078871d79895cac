// Small helpers that make elements; text is only ever set as text.

// The most characters of a value that are shown at once.
const LONG = 5_000;

// What shows nothing, or turns the text around it, such as a bidi override; it is spelt out, as on the command line.
const UNSEEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const spelt = (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`;

export const byId = (id) => document.getElementById(id);

export const seen = (text) => text.replace(UNSEEN, spelt);

export function make(name, options = {}, ...children) {
  const { on = {}, data = {}, ...rest } = options;
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(rest)) {
    if (key === "title" || key === "textContent") element[key] = seen(value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  Object.assign(element.dataset, data);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  const there = children.filter((child) => child !== null && child !== undefined);
  element.append(...there.map((child) => (typeof child === "string" ? seen(child) : child)));
  return element;
}

// The reader's own time, in an order that is the same everywhere.
export const stamp = (time) => new Date(time).toLocaleString("sv").slice(0, 16);

export function when(text) {
  return make("time", { className: "ago", dateTime: text, title: new Date(text).toLocaleString("sv") }, ago(text));
}

export const ago = (text) => `${age(text)} ago`;

export function age(text) {
  const seconds = Math.max(0, (Date.now() - new Date(text)) / 1000);
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) || [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

export const json = (value) => JSON.stringify(value, null, 2);

export function cut(value, length) {
  const text = String(value ?? "");
  return text.length > length ? `${text.slice(0, length)}… (${text.length.toLocaleString()} characters)` : text;
}

// A long text in a box that scrolls; a very long one has its rest behind a button.
export function shown(text) {
  const box = make("pre", { tabIndex: 0 }, text.slice(0, LONG));
  if (text.length <= LONG) return [box];
  const all = `Show all ${text.length.toLocaleString()} characters`;
  const rest = make("button", { type: "button", on: { click: showAll } }, all);
  return [box, rest];

  function showAll() {
    box.textContent = seen(text);
    rest.remove();
    box.focus();
  }
}

export const isNear = (element) => element.getBoundingClientRect().top < innerHeight + 600;

// What the last replay or deletion could not do: the list that is loaded after it must not hide that.
let undone = "";

export function trouble(error) {
  const place = byId("trouble");
  place.textContent = [undone, error?.message].filter(Boolean).join(" ");
  place.hidden = !place.textContent;
}

let newest = 0;

// Does what the reader has asked for, and then hides the last message. What the page does by itself must not hide it,
// and neither must what the reader had asked for before.
export async function guarded(work) {
  const turn = (newest += 1);
  try {
    await work();
    if (turn === newest) trouble(null);
  } catch (error) {
    trouble(error);
  }
}

const LETTERS = ["1 dead letter", "dead letters"], JOBS = ["the job", "jobs"];
const keep = (count) => (count === 1 ? "Keep it" : "Keep them");
const DEEDS = {
  Replay: { what: LETTERS, no: () => "Do not replay", done: (what) => `Replayed ${what}` },
  Delete: { what: LETTERS, no: keep, isDanger: true, done: (what) => `Deleted ${what}` },
  Run: {
    what: JOBS, after: " now", no: (count) => (count === 1 ? "Let it wait" : "Let them wait"),
    done: (what) => `Made ${what} due`,
  },
  Move: {
    what: JOBS, asksTime: true, no: (count) => (count === 1 ? "Leave it" : "Leave them"),
    done: (what) => `Moved ${what}`,
  },
  Cancel: {
    what: JOBS, no: keep, isDanger: true, told: "What is cancelled never runs again.",
    done: (what) => `Cancelled ${what}`,
  },
};

// The words of a question: the deed with its number, the way out, and the news of it.
export function deed(verb, count) {
  const { what: [one, many], after = "", no, isDanger = false, asksTime = false, told = "", done } = DEEDS[verb];
  const what = count === 1 ? one : `${count.toLocaleString()} ${many}`;
  return { yes: `${verb} ${what}${after}`, no: no(count), isDanger, asksTime, told, done: done(what) };
}

// Tells what was done, and what could not be done.
export function tell(done, failed = "") {
  undone = failed;
  byId("told").textContent = done && !failed ? `${done} at ${new Date().toLocaleTimeString("sv")}.` : "";
  trouble(null);
}

// Enter in a field must neither do it nor lose what was typed.
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !event.target.matches("input")) return;
  event.preventDefault();
  byId("question-yes").focus();
});

// Asks before something is done, and shows why it cannot be; resolves to whether it was done. The work is given the
// reason for the audit, as a part of a body, the time of a move, and what was typed in the fields of its own.
export async function question(text, { yes, no, isDanger, asksTime, told, done, fields = [] }, work) {
  const own = fields.map(({ label, ...field }) => make("label", {}, label, make("input", { autocomplete: "off", ...field })));
  byId("question-fields").replaceChildren(...own);
  const at = byId("question-at");
  at.parentElement.hidden = !asksTime;
  // An hour from now, in the reader's own time.
  at.value = new Date(Date.now() + 3_600_000).toLocaleString("sv").slice(0, 16).replace(" ", "T");
  const dialog = byId("question"), button = byId("question-yes");
  byId("question-title").textContent = `${yes}?`;
  byId("question-text").textContent = seen([text, told].filter(Boolean).join("\n"));
  byId("question-no").textContent = no;
  button.textContent = yes;
  button.classList.toggle("danger", isDanger);
  button.disabled = false;
  byId("question-reason").value = "";
  dialog.returnValue = "";
  dialog.showModal();
  (own[0]?.querySelector("input") || byId("question-no")).focus();
  return new Promise((resolve) => {
    const act = async (event) => {
      event.preventDefault();
      if (!at.form.reportValidity()) return;
      button.disabled = true;
      byId("question-no").textContent = "Close";
      tell("");
      try {
        const reason = byId("question-reason").value.trim();
        await work({ ...(reason && { reason }), ...(asksTime && { at: valueOf(at) }), ...typedIn(own) });
        if (done) tell(done);
        resolve(true);
      } catch (error) {
        tell("", error.message);
        byId("question-text").textContent = error.message;
        return;
      }
      dialog.close();
    };
    button.addEventListener("click", act);
    dialog.addEventListener("close", () => {
      button.removeEventListener("click", act);
      resolve(false);
    }, { once: true });
  });
}

function typedIn(labels) {
  const filled = labels.map((label) => label.querySelector("input")).filter(({ value }) => value.trim());
  return Object.fromEntries(filled.map((input) => [input.name, valueOf(input)]));
}

function valueOf({ type, value }) {
  if (type === "number") return Number(value);
  return type === "datetime-local" ? new Date(value).toISOString() : value.trim();
}
