// Where the reader is: the view, the filters and the open letter stand in the address, to be kept and shared.

const LETTERS = "letters";

export function read() {
  const [view, query] = location.hash.slice(1).split("?");
  const { open = "", ...filters } = Object.fromEntries(new URLSearchParams(query));
  return { view: view === "retries" ? view : LETTERS, filters, open };
}

export function keepFilters(filters) {
  history.replaceState(null, "", address(filters, read().open));
}

// An open letter is a step of its own, so that going back closes it.
export function keepOpen(id) {
  const now = read();
  if (now.view !== LETTERS || now.open === id) return;
  const to = address(now.filters, id);
  if (id) history.pushState(null, "", to);
  else history.replaceState(null, "", to);
}

function address(filters, open) {
  const query = new URLSearchParams({ ...filters, ...(open && { open }) }).toString();
  return `#${LETTERS}${query && `?${query}`}`;
}
