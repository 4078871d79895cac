// How the page says numbers, times and texts. Times are the reader's own; the rail says the zone, once.

// What shows nothing, or turns the text around it, such as a bidi override; it is spelt out, as on the command line.
const UNSEEN = /(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const spelt = (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`;

export const seen = (text) => text.replace(UNSEEN, spelt);
export const json = (value) => JSON.stringify(value, null, 2);

export function cut(value, length) {
  const text = String(value ?? "");
  return text.length > length ? `${text.slice(0, length)}… (${text.length.toLocaleString("en")} characters)` : text;
}

export const sum = (numbers) => numbers.reduce((all, number) => all + number, 0);
export const count = (number) => number.toLocaleString("en");
export const short = (number) => (number < 10_000 ? count(number)
  : number.toLocaleString("en", { notation: "compact" }));
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

// A rate with as many digits as say something: 38, 4.9, 0.02.
export function rate(number) {
  const digits = number >= 10 ? 0 : number >= 1 ? 1 : 2;
  return number.toLocaleString("en", { maximumFractionDigits: digits });
}

export const usually = (number) => (number === null || number === undefined ? "" : `usually ${rate(number)}`);

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// A length of time in its two largest units: "1 min 12 s".
export function span(seconds) {
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  const whole = seconds < 10 && seconds % 1 ? Number(seconds.toFixed(1)) : Math.round(seconds);
  const at = UNITS.findIndex(([, size]) => whole >= size);
  if (at < 0) return "0 s";
  const [unit, size] = UNITS[at], [next, small] = UNITS[at + 1] || [];
  const rest = next ? Math.floor((whole % size) / small) : 0;
  return `${next ? Math.floor(whole / size) : whole} ${unit}${rest ? ` ${rest} ${next}` : ""}`;
}

export const age = (time) => Math.max(0, (Date.now() - new Date(time)) / 1000);

// In one unit, as in a list: "25 min".
export function about(seconds) {
  const [unit, size] = UNITS.find(([, size]) => seconds >= size) || ["s", 1];
  return `${Math.floor(seconds / size)} ${unit}`;
}

// All of a time: "2026-11-28 03:26:40".
export const stamp = (time) => new Date(time).toLocaleString("sv");
export const clock = (time) => new Date(time).toLocaleTimeString("sv");

// A time as it is read best, on one line: today's by the clock, another day's with its day.
export function when(time, seconds = true) {
  const date = new Date(time), today = date.toDateString() === new Date().toDateString();
  const shown = date.toLocaleTimeString("sv").slice(0, seconds ? 8 : 5);
  return today ? shown : `${day(date)} ${shown.slice(0, 5)}`.replaceAll(" ", "\u00a0");
}

// In a narrow column: another day's without its time.
export const timeOrDay = (time) => when(time, false).replace(/\s\d\d:\d\d$/, "");

// "28 Nov", with its year where that is another one.
export function day(time) {
  const date = new Date(time), year = date.getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year });
}

const INSTANT = /\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g, OF_TODAY = /\b(\d\d:\d\d:\d\d) UTC\b/g;

// A sentence of the server, with its times in the reader's own. Those without a day are of today.
export const localized = (text) => text.replace(INSTANT, (time) => when(time, false)).replace(OF_TODAY, (_, time) =>
  clock(`${new Date().toISOString().slice(0, 10)}T${time}Z`));

// "UTC+1", and its name.
export function zone() {
  const minutes = -new Date().getTimezoneOffset(), hours = Math.abs(minutes) / 60;
  const short = minutes ? `UTC${minutes < 0 ? "−" : "+"}${Number(hours.toFixed(2))}` : "UTC";
  return { short, name: Intl.DateTimeFormat().resolvedOptions().timeZone };
}
