// Where the reader is: the view, the filters and the open letter stand in the address, to be kept and shared.

const VIEWS = ["letters", "groups", "waiting", "rates", "audit"];

// `wrong` says what the address has that no view takes: what is left out of a filter would widen it.
export function read() {
  const [, view, query] = location.hash.match(/^#?([^?]*)\??(.*)$/s), asked = new URLSearchParams(query);
  const { open = "", ...filters } = Object.fromEntries(asked);
  return { view: VIEWS.includes(view) ? view : VIEWS[0], filters, open, wrong: wrongIn(view, asked) };
}

function wrongIn(view, asked) {
  if (view && !VIEWS.includes(view)) return `there is no view "${view}"`;
  const names = [...asked.keys()], twice = names.find((name, n) => names.indexOf(name) < n);
  if (twice) return `"${twice}" stands there twice`;
  const before = [...new URLSearchParams(location.search).keys()].find((name) => document.getElementsByName(name).length);
  return before ? `"${before}" must stand after the #` : "";
}

// Sets the filters of a form as an address has them; returns what it cannot take.
export function fill(form, filters) {
  for (const field of form.querySelectorAll("[name]")) {
    field.value = filters[field.name] ?? field.dataset.usual ?? "";
  }
  const wrong = Object.keys(filters).find((name) => form.elements[name]?.value !== filters[name]);
  if (wrong) return `the filter "${wrong}" cannot be "${filters[wrong]}" here`;
  return filters.within && filters.since ? '"within" and "since" do not go together' : "";
}

// Nothing is shown or changed by a part of an address.
export const refusal = (wrong) => new Error(`This address is not understood, and nothing is shown: ${wrong}.`);

export function keepFilters(filters) {
  const { view, open } = read();
  history.replaceState(null, "", addressOf(view, filters, open));
}

// An open letter is a step of its own, so that going back closes it.
export function keepOpen(id) {
  const now = read();
  if (now.open === id) return;
  const to = addressOf(now.view, now.filters, id);
  if (id) history.pushState(null, "", to);
  else history.replaceState(null, "", to);
}

export function addressOf(view, filters, open) {
  const query = new URLSearchParams({ ...filters, ...(open && { open }) }).toString();
  return `#${view}${query && `?${query}`}`;
}
