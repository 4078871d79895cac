// Where the reader is: the view, the one thing that is open, the filters and the time stand in the address.

import { useEffect, useReducer } from "./base.js";

export const HOUR = "3600";
export const TIMES = {
  [HOUR]: "Last hour", 10800: "Last 3 hours", 86400: "Last day", 604800: "Last week", 2592000: "Last 30 days",
  all: "All of time",
};
const WINDOW = ["within", "since", "until"];
const views = {};

// A view tells its filters: a name, and the values it may have, or null for any. `times` are the windows it offers.
export function offer(name, { filters = {}, times = null, hasOne = false }) {
  const window = times ? { within: Object.keys(times), since: null, until: null } : {};
  views[name] = { filters: { ...filters, ...window }, times, hasOne };
}

// `wrong` says what the address has that no view takes: what is left out of a filter would widen it.
export function read() {
  const [, path, query] = location.hash.match(/^#?([^?]*)\??(.*)$/s), asked = new URLSearchParams(query);
  const [view = "", ...rest] = path.split("/");
  const { open, ...filters } = Object.fromEntries(asked);
  const id = decoded(rest.join("/")) || open || "";
  const known = Object.hasOwn(views, view) ? view : Object.keys(views)[0];
  return { view: known, id, filters, wrong: wrongIn(view, id, filters, [...asked.keys()]) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function wrongIn(view, id, filters, names) {
  if (view && !Object.hasOwn(views, view)) return `there is no view "${view}"`;
  const { filters: taken, hasOne } = views[view] || Object.values(views)[0];
  const twice = names.find((name, n) => names.indexOf(name) < n);
  if (twice) return `"${twice}" stands there twice`;
  if (id && !hasOne) return 'nothing here can be "open"';
  const all = new Set(["open", ...Object.values(views).flatMap((one) => Object.keys(one.filters))]);
  const before = [...new URLSearchParams(location.search).keys()].find((name) => all.has(name));
  if (before) return `"${before}" must stand after the #`;
  const bad = Object.entries(filters).find(([name, value]) => !isTaken(taken, name, value));
  if (bad) return `the filter "${bad[0]}" cannot be "${bad[1]}" here`;
  if (filters.within && filters.since) return '"within" and "since" do not go together';
  return filters.until && !filters.since ? '"until" goes with "since"' : "";
}

function isTaken(taken, name, value) {
  if (!Object.hasOwn(taken, name)) return false;
  if (name === "since" || name === "until") return !Number.isNaN(Date.parse(value));
  return taken[name] === null || taken[name].includes(value);
}

export function addressOf(view, filters = {}, id = "") {
  const given = Object.entries(filters).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#${view}${id && `/${encodeURIComponent(id)}`}${query && `?${query}`}`;
}

// Goes there: a step of its own, so that going back leaves it. `replace` makes it the same step, as typing does.
export function go(view, filters, id = "", replace = false) {
  const to = addressOf(view, filters, id);
  if (to === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", to);
  dispatchEvent(new Event("hashchange"));
}

export function usePlace() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    addEventListener("hashchange", again);
    addEventListener("popstate", again);
    return () => {
      removeEventListener("hashchange", again);
      removeEventListener("popstate", again);
    };
  }, []);
  return read();
}

// The time that filters choose, for the API: the last hour, unless they say another.
export function windowOf({ within = HOUR, since, until }) {
  if (since) return { since, ...(until && { until }) };
  return within === "all" ? {} : { since: new Date(Date.now() - within * 1000).toISOString() };
}

// The filters without their time, and only their time, to go along from view to view.
export const withoutWindow = (filters) => Object.fromEntries(
  Object.entries(filters).filter(([name]) => !WINDOW.includes(name)),
);
export function windowFor(view, filters) {
  const taken = views[view]?.filters || {};
  return Object.fromEntries(WINDOW.filter((name) => filters[name] && isTaken(taken, name, filters[name]))
    .map((name) => [name, filters[name]]));
}
// That time in words: "last hour".
export const timeOf = ({ within = HOUR, since }) => (since ? "in this time" : TIMES[within].toLowerCase());
export const timesOf = (view) => views[view].times;
