// Deaths over time as bars, and what died, grouped; a click on a group filters by it.

import { byId, make } from "./view.js";

export function drawDeaths(timeline) {
  const most = Math.max(1, ...timeline.counts);
  const bars = timeline.counts.map((count, n) => {
    const from = new Date(Date.parse(timeline.since) + n * timeline.step_seconds * 1000);
    const bar = make("i", { title: `${count} from ${from.toLocaleString()}` });
    bar.style.height = `${(100 * count) / most}%`;
    return bar;
  });
  byId("bars").replaceChildren(...bars);
  const total = timeline.counts.reduce((sum, count) => sum + count, 0);
  byId("bars").setAttribute("aria-label", `${total} deaths since ${new Date(timeline.since).toLocaleString()}`);
  byId("deaths-span").textContent = `since ${new Date(timeline.since).toLocaleDateString()}, ${most} at most a bar`;
}

export function drawGroups(stats, chosen, choose) {
  drawGroup("by-error-type", "error-types", stats.by_error_type, chosen.error_type, (v) => choose("error_type", v));
  drawGroup("by-type", "types", stats.by_type, chosen.type, (v) => choose("type", v));
  drawGroup("by-queue", "queues", stats.by_queue, chosen.queue, (v) => choose("queue", v));
  byId("letters-total").textContent = stats.total.toLocaleString();
}

function drawGroup(list, names, counts, chosen, choose) {
  const groups = Object.entries(counts).sort(([, a], [, b]) => b - a);
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
  byId(names).replaceChildren(...groups.map(([name]) => make("option", { value: name })));
}
