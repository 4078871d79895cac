// Charts, drawn by uPlot: bars of counts over time, what is usual as a dotted line, and marks with their names.

import { html, useEffect, useRef, useState } from "./base.js";
import uPlot from "./vendor/uplot.js";
import { count, cut, day, seen, short, sum, when } from "./words.js";

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const FONT = "11px Inter, system-ui, sans-serif";

// `series` are [{label, colour, values}], stacked from the bottom up; `colour` is a token of desk.css, without its
// dashes. `onZoom(since, until)` is called after a drag, `onBar(since, until)` after a click; `shown` says a value.
export function Bars(props) {
  const { title, unit = "", series, usual, since, step, marks = [], height = 168, shown = count, line = false } = props;
  const place = useRef(), scheme = useScheme(), [at, setAt] = useState(null);
  const begin = Date.parse(since) / 1000, steps = series[0]?.values.length || usual?.length || 0;
  const told = JSON.stringify([series, usual, since, step, marks, height, scheme]);
  const all = { ...props, begin, steps, marks, height, shown, line, setAt };
  useEffect(() => draw(place.current, all), [told]);
  const [label, now] = summary({ series, steps, shown, line, at, begin, step });
  const named = marks.map(({ time, text }) => `${cut(text, 60)} at ${when(time, false)}`).join(", ");
  const said = [`${[title, unit].filter(Boolean).join(" ")}: ${label}`, named].filter(Boolean).join("; ");
  return html`<figure>
    <figcaption><b>${title}</b> <span class="q">${unit}</span>
      <span class="key">${now ? html`<span>${now}</span>` : html`<${Key} series=${series} usual=${usual} />`}</span>
    </figcaption>
    <div class="chart" ref=${place} role="img" aria-label=${said}></div>
  </figure>`;
}

const Key = ({ series, usual }) => [
  ...series.map(({ label, colour }) => html`<span><${Dot} colour=${colour} />${label}</span>`),
  usual && html`<span><i class="usual"></i>usual</span>`,
];

export const Dot = ({ colour }) => html`<i style=${{ background: `var(--${colour})` }}></i>`;

// What all of a chart says, and what the pointer is at.
function summary({ series, steps, shown, line, at, begin, step }) {
  const whole = line ? (values) => Math.max(...values) : sum;
  const heights = Array.from({ length: steps }, (_, n) => whole(series.map(({ values }) => values[n] || 0)));
  const most = shown(Math.max(0, ...heights));
  const label = line ? `at most ${most}` : `${shown(sum(heights))} in all, at most ${most} a bar`;
  if (at === null || at >= steps) return [label, ""];
  const parts = series.filter(({ values }) => values[at]).map((one) => `${one.label} ${shown(one.values[at])}`);
  return [label, `${when((begin + at * step) * 1000, false)}: ${parts.join(", ") || shown(0)}`];
}

function useScheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), [isDark, setDark] = useState(dark.matches);
  useEffect(() => {
    const change = ({ matches }) => setDark(matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);
  return isDark;
}

function draw(place, chart) {
  const { begin, step, steps, series, usual, height } = chart;
  const times = Array.from({ length: steps }, (_, n) => begin + n * step);
  // The largest sum is drawn first, and the smaller ones over it.
  const upTo = (n) => times.map((_, at) => sum(series.slice(0, n + 1).map(({ values }) => values[at] || 0)));
  const heights = series.map(({ values }, n) => (chart.line ? values : upTo(n))).reverse();
  const bars = uPlot.paths.bars({ size: [0.78, 40], align: 1 });
  const drawn = series.map(({ colour }) => (chart.line
    ? { stroke: colourOf(colour), width: 1.5, points: { show: false } }
    : { fill: colourOf(colour), width: 0, paths: bars, points: { show: false } })).reverse();
  const dotted = { stroke: colourOf("usual"), width: 1.5, dash: [1.5, 2.5], points: { show: false } };
  const top = (most) => Math.max((most || 0) * 1.05, chart.line ? 0.01 : 3);
  const plot = new uPlot({
    width: place.clientWidth, height, padding: [chart.marks.length ? 30 : 8, 18, 0, 0], legend: { show: false },
    scales: { x: { range: [begin, begin + steps * step] }, y: { range: (_, __, most) => [0, top(most)] } },
    axes: [axisOfTime(steps * step), axisOf(chart)],
    series: [{}, ...drawn, ...(usual ? [dotted] : [])],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 6 } },
    hooks: hooksOf(chart),
  }, [times, ...heights, ...(usual ? [usual] : [])], place);
  if (chart.onBar) listenTo(plot, chart);
  const watch = new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height }));
  watch.observe(place);
  return () => {
    watch.disconnect();
    plot.destroy();
  };
}

const axisLook = () => ({
  stroke: colourOf("text-2"), font: FONT, grid: { stroke: colourOf("grid"), width: 1 }, ticks: { show: false },
});

const minute = (date) => date.toLocaleTimeString("sv").slice(0, 5);

function axisOfTime(length) {
  const isLong = length > 90_000;
  const say = (seconds) => (isLong ? day : minute)(new Date(seconds * 1000));
  const incrs = isLong ? [86400, 172800, 604800] : [300, 900, 1800, 3600, 7200, 14400, 21600];
  const values = (_, splits) => splits.map(say);
  return { ...axisLook(), grid: { show: false }, size: 22, space: 56, gap: 4, incrs, values };
}

const axisOf = ({ shown }) => ({
  ...axisLook(), size: 46, space: 34, gap: 6,
  values: (_, splits) => splits.map((value) => (value === null ? "" : (shown === count ? short : shown)(value))),
});

function hooksOf({ marks, steps, setAt, onZoom }) {
  return {
    setCursor: [({ cursor: { left, idx } }) =>
      setAt(left >= 0 && Number.isInteger(idx) ? Math.min(idx, steps - 1) : null)],
    setSelect: [(plot) => {
      const { left, width } = plot.select;
      if (!onZoom || width < 6) return;
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      onZoom(isoOf(plot.posToVal(left, "x")), isoOf(plot.posToVal(left + width, "x")));
    }],
    draw: [(plot) => drawMarks(plot, marks)],
  };
}

const isoOf = (seconds) => new Date(Math.round(seconds) * 1000).toISOString();

// A dashed line for each mark, its name at the side that has room, in one of two rows. Where there is no room in both,
// the newer names stay.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio, taken = [[], []];
  ctx.save();
  ctx.font = `600 ${11 * ratio}px Inter, system-ui, sans-serif`;
  for (const { time, text } of marks.slice(-6).reverse()) {
    const x = plot.valToPos(Date.parse(time) / 1000, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colourOf("text");
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - 22 * ratio);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.fillStyle = colourOf("text");
    ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
    const words = `${cut(seen(text), 24).replace(/ \(.*/, "")} ${when(time, false)}`;
    const isLeft = ctx.textAlign === "right", wide = ctx.measureText(words).width + 10 * ratio;
    const [from, to] = isLeft ? [x - wide, x] : [x, x + wide];
    const row = taken.findIndex((names) => names.every(([begin, end]) => to < begin || from > end));
    taken[row]?.push([from, to]);
    if (row >= 0) ctx.fillText(words, x + (isLeft ? -5 : 5) * ratio, bbox.top - (row ? 6 : 19) * ratio);
  }
  ctx.restore();
}

function listenTo(plot, { begin, step, steps, onBar }) {
  plot.over.classList.add("leads");
  let from = 0;
  plot.over.addEventListener("mousedown", ({ clientX }) => { from = clientX; });
  plot.over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - from) > 5) return;
    const left = event.clientX - plot.over.getBoundingClientRect().left;
    const n = Math.max(0, Math.min(steps - 1, Math.floor((plot.posToVal(left, "x") - begin) / step)));
    onBar(isoOf(begin + n * step), isoOf(begin + (n + 1) * step));
  });
}

// A small chart of a row.
export function Spark({ counts, label, colour = "died" }) {
  const most = Math.max(1, ...counts), share = 100 / (counts.length || 1);
  const high = (one) => Math.max(1.5, (25 * one) / most);
  return html`<svg class="spark" role="img" aria-label=${label}>
    <rect class="f-usual" x="0" width="100%" y="27" height="1" />
    ${counts.map((one, n) => one > 0 && html`<rect class=${`f-${colour}`} x=${`${n * share}%`}
      width=${`${share * 0.8}%`} y=${27 - high(one)} height=${high(one)} />`)}
  </svg>`;
}

