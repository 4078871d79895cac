// Deaths over time as bars, and what died, grouped; a click on a group filters by it.

import { byId, make, stamp } from "./view.js";

export function drawDeaths(timeline) {
  const most = Math.max(1, ...timeline.counts);
  const at = (n) => stamp(Date.parse(timeline.since) + n * timeline.step_seconds * 1000);
  const bars = timeline.counts.map((count, n) => {
    const bar = make("i", { title: `${count} from ${at(n)} to ${at(n + 1)}` });
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  });
  byId("bars").replaceChildren(...bars);
  const total = timeline.counts.reduce((sum, count) => sum + count, 0);
  byId("bars").setAttribute("aria-label", `${total} deaths since ${at(0)}`);
  byId("deaths-span").textContent = `${total.toLocaleString()} in all, at most ${most.toLocaleString()} a bar`;
  const marks = [0, timeline.counts.length / 2, timeline.counts.length].map((n) => make("span", {}, at(n)));
  byId("bars-axis").replaceChildren(...marks);
}

// All letters, whatever the filters: their number, and the names that a filter may have.
export function drawTotal(stats) {
  byId("letters-total").textContent = stats.total.toLocaleString();
  const names = { "error-types": stats.by_error_type, types: stats.by_type, queues: stats.by_queue };
  for (const [list, counts] of Object.entries(names)) {
    byId(list).replaceChildren(...sorted(counts).map(([name]) => make("option", { value: name })));
  }
}

export function drawGroups(stats, chosen, choose) {
  drawGroup("by-error-type", stats.by_error_type, chosen.error_type, (v) => choose("error_type", v));
  drawGroup("by-type", stats.by_type, chosen.type, (v) => choose("type", v));
  drawGroup("by-queue", stats.by_queue, chosen.queue, (v) => choose("queue", v));
}

const sorted = (counts) => Object.entries(counts).sort(([, a], [, b]) => b - a);

function drawGroup(list, counts, chosen, choose) {
  const groups = sorted(counts);
  byId(list).replaceChildren(...groups.slice(0, 100).map(([name, count]) => make("li", {}, make(
    "button",
    {
      type: "button",
      title: name,
      ariaPressed: String(name === chosen),
      on: { click: () => choose(name === chosen ? "" : name) },
    },
    make("span", {}, name), make("b", {}, count.toLocaleString()),
  ))));
}
