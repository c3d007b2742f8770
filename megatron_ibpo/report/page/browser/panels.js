// All curves: grouped by what they tell, searched, smoothed, with the step under the mouse in each of them.

import { byId, calm, element } from "./dom.js";
import { change, state } from "./state.js";
import { curve } from "./curves.js";

const FIRST = ["evaluation/accuracy", "evaluation/greedy_accuracy", "reward", "correction_success", "loss", "entropy",
  "response_length", "clip_fraction", "logprob_diff_abs_mean", "degenerate_groups", "staleness_mean", "grad_norm"];

// Name of a group and which metrics it takes of those that no group before it has.
const GROUPS = [
  ["Overview", (name) => FIRST.includes(name)],
  ["Evaluation", (name) => name.startsWith("evaluation/")],
  ["Seconds per stage", (name) => name.startsWith("seconds") || name.endsWith("_seconds")],
  ["Spent", (name) => name.startsWith("spent_")],
  ["Corrections", (name) => /correction|rewrite|noop|reference|unmodified|beyond|skipped_pairs|leak/.test(name)],
  ["Trainer against engine", (name) => /logprob_diff|tis_|icepop|importance|rejected|routing_/.test(name)],
  ["Episodes", (name) => /^reward\/(turns|.*_calls)$|episodes|environment/.test(name)],
  ["Reward and credit", (name) => /reward|accuracy|groups_(all|none)|bonus|degenerate|phi|lambda|advantage|gradient/.test(name)],
  ["Loss and update", (name) => /loss|grad|clip|ratio|kl$|learning_rate|updates|value|critic|mask|sequences/.test(name)],
  ["Lengths and tokens", (name) => /length|tokens|truncated/.test(name)],
  ["Sampling and processes", () => true],
];
const CONSTANT = "Never changed";

let sources = [];
let series = [];
let drawnCurves = [];
let isHeld = false; // a drag goes on: what is new waits for its end
let waits = false;
let pointedAt = null; // the step under the mouse

// Take new data: `runs` of the overview and the series of each.
export function showCurves(runs, newSeries) {
  [sources, series] = [runs, newSeries];
  drawCurves();
}

export function drawCurves() {
  waits = isHeld;
  if (waits) return;
  const box = byId("curves");
  const opened = new Map([...box.querySelectorAll("details")].map((one) => [one.dataset.group, one.open]));
  drawnCurves = [];
  const metrics = linesByMetric();
  const wanted = state.metric.trim().toLowerCase().replaceAll(" ", "_");
  const span = spanOf(metrics);
  const groups = groupsOf(metrics, wanted).map(([name, members]) => {
    const details = element("details", { "data-group": name, open: wanted !== "" || (opened.get(name) ?? name === "Overview") },
      element("summary", {}, name, element("span", { class: "count" }, String(members.length))));
    const grid = element("div", { class: "grid-of-curves" });
    details.append(grid);
    const fill = () => {
      if (!details.open || grid.childElementCount) return;
      const made = members.map((metric) => curve(metric, metrics.get(metric), span, state.smoothing, TOLD));
      made.forEach(({ point }) => point(pointedAt));
      drawnCurves.push(...made);
      grid.append(...made.map(({ figure }) => figure));
    };
    details.addEventListener("toggle", fill);
    fill();
    return details;
  });
  const nothing = element("p", { class: "hint" }, metrics.size ? "No metric has this in its name." : "Nothing was measured yet.");
  if (!byId("metric")) box.append(toolbar(), element("div", { id: "panels" }));
  byId("panels").replaceChildren(...(groups.length ? groups : [nothing]));
  byId("zoom").hidden = state.range === null;
  byId("zoom").textContent = state.range ? `steps ${state.range[0]} to ${state.range[1]}: show all` : "";
}

const TOLD = {
  pointed: (step) => {
    pointedAt = step;
    drawnCurves.forEach(({ point }) => point(step));
  },
  held: (held) => {
    isHeld = held;
    if (!isHeld && waits) drawCurves();
  },
  picked: (step) => pick(step),
  zoomed: (range) => change({ range }),
  reset: () => change({ range: null }),
};

// A click leads to the samples of the nearest recorded step.
function pick(step) {
  const shownRuns = [state.run, ...sources.keys()].filter((run) => sources[run]?.kind === "run" && sources[run].sections.length);
  if (!shownRuns.length) return;
  const keys = sources[shownRuns[0]].sections.map(({ key }) => key);
  const key = keys.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
  change({ tab: "samples", run: shownRuns[0], key, group: 0, response: 0 });
}

function toolbar() {
  const search = element("input", { id: "metric", type: "search", placeholder: "search metrics", "aria-label": "search metrics",
    input: calm(120, () => change({ metric: search.value })) });
  search.value = state.metric;
  const slider = element("input", { id: "smoothing", type: "range", min: 0, max: 0.98, step: 0.02,
    input: calm(60, () => change({ smoothing: Number(slider.value) })) });
  slider.value = state.smoothing;
  return element("div", { class: "toolbar" }, search, element("label", {}, "smoothing ", slider),
    element("button", { id: "zoom", type: "button", click: () => change({ range: null }) }),
    element("span", { class: "hint" }, "drag over a curve to zoom, click for the samples of that step"));
}

// Metric → its lines, one for each run that is shown and has it.
function linesByMetric() {
  const metrics = new Map();
  series.forEach((kinds, run) => {
    if (state.hidden.includes(run)) return;
    for (const [kind, rows] of Object.entries(kinds)) {
      for (const [name, values] of Object.entries(rows.metrics)) {
        if (kind === "evaluation" && /_(low|high)$/.test(name)) continue;
        const key = kind === "evaluation" ? `evaluation/${name}` : name;
        const line = lineOf(run, rows, values, intervalOf(rows, name));
        if (line.points.length) metrics.set(key, [...(metrics.get(key) ?? []), line]);
      }
    }
  });
  return metrics;
}

function lineOf(run, rows, values, [low, high]) {
  const within = (n) => state.range === null || (rows.last[n] >= state.range[0] && rows.first[n] <= state.range[1]);
  const known = [...values.mean.keys()].filter((n) => values.mean[n] !== null && within(n));
  const at = (n) => (rows.first[n] + rows.last[n]) / 2;
  [low, high] = [low ?? values.low, high ?? values.high];
  const band = low && high ? known.filter((n) => low[n] !== null && high[n] !== null).map((n) => [at(n), low[n], high[n]]) : [];
  return { run, name: sources[run].name, points: known.map((n) => [at(n), values.mean[n]]),
    steps: known.map((n) => [rows.first[n], rows.last[n]]), band };
}

// The interval that was measured with a metric, as of accuracy_low to accuracy_high.
function intervalOf(rows, name) {
  return [rows.metrics[`${name}_low`]?.mean, rows.metrics[`${name}_high`]?.mean];
}

function spanOf(metrics) {
  if (state.range !== null) return state.range;
  let last = 1;
  for (const lines of metrics.values()) for (const { points } of lines) last = Math.max(last, points.at(-1)[0]);
  return [0, last];
}

function groupsOf(metrics, wanted) {
  const names = [...metrics.keys()].filter((name) => name.toLowerCase().includes(wanted));
  const groups = new Map(GROUPS.map(([group]) => [group, []]));
  groups.set(CONSTANT, []);
  for (const name of names) {
    const values = metrics.get(name).flatMap(({ points }) => points.map(([, value]) => value));
    const constant = values.length > 2 && values.every((value) => value === values[0]);
    groups.get(constant ? CONSTANT : GROUPS.find(([, takes]) => takes(name))[0]).push(name);
  }
  groups.get("Overview").sort((a, b) => FIRST.indexOf(a) - FIRST.indexOf(b));
  return [...groups].filter(([, members]) => members.length);
}
