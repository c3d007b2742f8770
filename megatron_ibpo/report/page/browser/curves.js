// One curve: a metric of several runs over the steps.

import { drawn, element, shown, words } from "./dom.js";
import { curveAsCsv, saveButton } from "./download.js";

const [WIDTH, HEIGHT, RIGHT, TOP, BOTTOM] = [380, 180, 10, 8, 20];
const [LEAST_LEFT, LETTER] = [30, 6]; // units of the figure: the axis' labels need this much each
const SMALLEST_DRAG = 6; // pixels: less is a click

// Exponential mean in which the first values do not count twice; `smoothing` is what stays of a value after a step.
function smoothed(points, smoothing) {
  let [sum, weight, before] = [0, 0, null];
  return points.map(([step, value]) => {
    const kept = before === null ? 0 : smoothing ** (step - before);
    [sum, weight, before] = [sum * kept + value * (1 - smoothing), weight * kept + (1 - smoothing), step];
    return [step, sum / weight];
  });
}

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count = 5) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const first = Math.ceil(low / size - 1e-9);
  return Array.from({ length: Math.floor(high / size + 1e-9) - first + 1 }, (_, n) => (first + n) * size);
}

function extent(lines) {
  const values = lines.flatMap(({ points, band }) => [...points.map(([, y]) => y), ...band.flatMap(([, a, b]) => [a, b])]);
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (low > 0 && low < 0.6 * high) low = 0;
  if (high - low <= 1e-12 * Math.abs(high)) [low, high] = [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const space = 0.04 * (high - low);
  return [low === 0 ? 0 : low - space, high + space];
}

function path(points) {
  return points.map(([x, y], n) => `${n ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
}

// The figure of a metric.
//
// lines: [{ run, name, points: [[step, value]], steps: [[first, last]], band: [[step, low, high]] }]; span: [first, last] step of all curves.
// told: { pointed(step), held(whether a button is down), picked(step), zoomed([first, last]), reset() }.
// The result has `figure` and `point(step or null)`, which shows the values at a step, or the last ones.
export function curve(metric, lines, span, smoothing, told) {
  const [first, last] = span[0] === span[1] ? [span[0] - 1, span[1] + 1] : span;
  const [low, high] = extent(lines);
  const left = Math.max(LEAST_LEFT, 8 + LETTER * Math.max(...ticks(low, high).map((value) => shown(value).length)));
  const x = (step) => left + ((step - first) / (last - first)) * (WIDTH - left - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const label = drawn("title", {});
  label.textContent = `${words(metric)} by step`;
  svg.append(label);
  drawAxes(svg, left, x, y, [first, last], [low, high]);
  for (const { run, points, band } of lines) {
    if (band.length > 1)
      svg.append(drawn("path", { class: `band run${run}`, d:
        path([...band.map(([s, a]) => [x(s), y(a)]), ...band.toReversed().map(([s, , b]) => [x(s), y(b)])]) + "Z" }));
    const strong = smoothing > 0 ? smoothed(points, smoothing) : points;
    if (smoothing > 0) svg.append(drawn("path", { class: `faint run${run}`, d: path(points.map(([s, v]) => [x(s), y(v)])) }));
    svg.append(drawn("path", { class: `line run${run}`, d: path(strong.map(([s, v]) => [x(s), y(v)])) }));
    if (points.length < 30)
      for (const [s, v] of strong) svg.append(drawn("circle", { class: `run${run}`, cx: x(s), cy: y(v), r: 2 }));
  }
  const mark = drawn("line", { class: "mark", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const chosen = drawn("rect", { class: "chosen", y: TOP, height: HEIGHT - BOTTOM - TOP, visibility: "hidden" });
  svg.append(chosen, mark);
  const values = element("span", { class: "values" });
  const figure = element("figure", { "data-metric": metric },
    element("figcaption", {}, element("b", {}, words(metric)), values,
      saveButton("CSV", `save ${words(metric)} as drawn`, () => curveAsCsv(metric, lines))), svg);

  function point(step) {
    mark.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) mark.setAttribute(end, x(step));
    values.replaceChildren(...lines.map(({ run, name, points }) => {
      const [at, value] = step === null ? points.at(-1) : nearest(points, step);
      const title = `${name}, step ${at}`;
      return element("span", { title }, element("i", { class: `swatch run${run}` }), step === null ? "" : `${at}: `, shown(value, 4));
    }));
  }

  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width * WIDTH - left) / (WIDTH - left - RIGHT);
    return Math.round(first + Math.max(0, Math.min(1, place)) * (last - first));
  };
  let began = null;
  svg.addEventListener("pointerdown", (event) => {
    began = { at: event.clientX, step: stepAt(event) };
    told.held(true);
  });
  svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    told.pointed(step);
    const drags = began !== null && Math.abs(event.clientX - began.at) >= SMALLEST_DRAG;
    chosen.setAttribute("visibility", drags ? "visible" : "hidden");
    if (!drags) return;
    const [from, to] = [Math.min(began.step, step), Math.max(began.step, step)];
    chosen.setAttribute("x", x(from));
    chosen.setAttribute("width", x(to) - x(from));
  });
  svg.addEventListener("pointerup", (event) => {
    if (began === null) return;
    const [from, to] = [began.step, stepAt(event)].toSorted((a, b) => a - b);
    const drags = Math.abs(event.clientX - began.at) >= SMALLEST_DRAG;
    began = null;
    told.held(false);
    if (drags && to > from) told.zoomed([from, to]);
    else if (!drags) told.picked(to);
  });
  svg.addEventListener("pointerleave", () => {
    began = null;
    told.held(false);
    told.pointed(null);
  });
  svg.addEventListener("dblclick", () => told.reset());
  return { figure, point };
}

function drawAxes(svg, left, x, y, [first, last], [low, high]) {
  for (const value of ticks(low, high)) {
    svg.append(drawn("line", { class: "grid", x1: left, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    const text = drawn("text", { x: left - 5, y: y(value) + 3, "text-anchor": "end" });
    text.textContent = shown(value, 3);
    svg.append(text);
  }
  for (const step of ticks(first, last, 5).filter(Number.isInteger)) {
    const text = drawn("text", { x: x(step), y: HEIGHT - 5, "text-anchor": x(step) > WIDTH - 20 ? "end" : "middle" });
    text.textContent = shown(step);
    svg.append(text);
  }
}

function nearest(points, step) {
  let [from, to] = [0, points.length - 1];
  while (to - from > 1) {
    const middle = (from + to) >> 1;
    if (points[middle][0] <= step) from = middle;
    else to = middle;
  }
  return step - points[from][0] <= points[to][0] - step ? points[from] : points[to];
}
