// Who did what: the records of operator actions.

import { listOf } from "./list.js";
import { cut, make, when } from "./view.js";

const list = listOf({
  name: "audit",
  kind: "audit",
  row,
  pageOf: ({ records, next_cursor: cursor }) => ({
    jobs: records, pagination: { next_cursor: cursor, has_more: cursor !== null },
  }),
  words: { none: "Nothing is on record.", unmatched: "No record matches these filters." },
});

export const { load, loadMore, fill, isFree, refresh } = list;

function row(record) {
  const { at, who, via, address, action, subject, reason, outcome, count, error } = record;
  const number = count === null ? "" : `${count.toLocaleString()} `;
  const on = told(subject);
  return make(
    "li", {},
    when(at), make("span", { className: "kind", title: `${via} ${address}` }, who),
    make("span", { className: "kind" }, action),
    make("span", { className: "what", title: on }, cut(on, 200), reason && make("i", {}, ` ${reason}`)),
    make("span", { className: outcome === "failed" ? "danger" : "quiet", title: error }, `${number}${outcome}`),
  );
}

// A subject in a few words: ids, and whatever else there is.
function told({ ids = [], id_count: count = 0, filter, ...rest }) {
  const more = count > ids.length ? [`and ${count - ids.length} more`] : [];
  const filters = Object.entries(filter || {}).map(([name, value]) => `${name} ${value}`);
  const others = Object.entries(rest).map(([name, value]) => `${name} ${[value].flat().join(", ")}`);
  return [...ids, ...more, ...filters, ...others].join(", ");
}
