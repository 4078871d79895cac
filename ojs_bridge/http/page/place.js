// Where the reader is: the view, the filters and the open letter stand in the address, to be kept and shared.

const VIEWS = ["letters", "groups", "retries", "rates", "audit"];

export function read() {
  const [view, query] = location.hash.slice(1).split("?");
  const { open = "", ...filters } = Object.fromEntries(new URLSearchParams(query));
  return { view: VIEWS.includes(view) ? view : VIEWS[0], filters, open };
}

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
