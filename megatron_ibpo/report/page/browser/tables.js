// Tables: what runs have different, the numbers they came to, and the results of evaluations.

import { byId, element, shown, words } from "./dom.js";

const ROWS = 40; // of a column at most
const SHORT = 14; // letters of a value that stays on one line

export function showTables(overviews, { settings, numbers }) {
  const parts = [];
  const titled = (title, ...content) => parts.push(element("h2", {}, title), ...content);
  const hint = (text) => element("p", { class: "hint" }, text);
  const evaluations = overviews.filter((one) => Object.keys(one.sets).length);
  for (const one of evaluations) titled(evaluations.length > 1 ? `Results of ${one.name}` : "Results", ...resultsOf(one));
  const runs = [...overviews.keys()].filter((run) => overviews[run].kind === "run");
  if (runs.length > 1)
    titled("Settings that differ", settings.length ? tableOfRuns(overviews, runs, settings, told) :
      hint("None: the runs have the same settings."));
  if (runs.length === 1) {
    const own = Object.entries(overviews[runs[0]].settings);
    const rows = own.map(([name, value]) => [name, ...overviews.map((_, run) => (run === runs[0] ? value : null))]);
    titled("Settings", tableOfRuns(overviews, runs, rows, told));
  }
  if (runs.length)
    titled("Last numbers", hint("of the last evaluation, and means over the last ten steps"),
      tableOfRuns(overviews, runs, numbers, (value) => shown(value, 4)));
  byId("comparison").replaceChildren(...parts);
}

function told(value) {
  return value === null ? "–" : String(value);
}

function valueCell(text) {
  return element("td", { class: text.length <= SHORT ? "short" : null }, text);
}

// Long tables are set in columns, each with its own heads.
function tableOfRuns(overviews, runs, rows, form) {
  const heads = () => runs.map((run) => element("th", {}, element("i", { class: `swatch run${run}` }), overviews[run].name));
  const count = Math.ceil(rows.length / ROWS);
  const size = Math.ceil(rows.length / count);
  const pieces = Array.from({ length: count }, (_, n) => rows.slice(n * size, (n + 1) * size));
  const box = element("div", { class: "tables" }, ...pieces.map((piece) => table(heads(), piece.map(([name, ...values]) =>
    [words(name), ...runs.map((run) => valueCell(form(values[run])))]))));
  box.style.setProperty("--column", `${240 + 110 * runs.length}px`);
  return box;
}

function resultsOf({ sets }) {
  const measured = Object.values(sets).flatMap(({ measures }) => Object.keys(measures));
  const names = [...new Set(measured)].filter((name) => !/_(low|high)$/.test(name));
  const cell = ({ measures, intervals }, name) => element("td", {}, shown(measures[name], 4), intervals[name] ?
    element("span", { class: "interval" }, ` ${shown(intervals[name][0])} to ${shown(intervals[name][1])}`) : "");
  const notes = Object.entries(sets).flatMap(([set, entry]) => entry.notes.map((note) => `${set}: ${note}`));
  const heads = Object.keys(sets).map((name) => element("th", {}, name));
  const rows = names.map((name) => [words(name), ...Object.values(sets).map((set) => cell(set, name))]);
  return [table(heads, rows),
    ...["intervals: 95 %, over problems", ...notes].map((text) => element("p", { class: "hint" }, text))];
}

// heads: cells of the first line; rows: a name and its cells each.
function table(heads, rows) {
  const body = rows.map(([name, ...cells]) => element("tr", {}, element("th", {}, name), ...cells));
  return element("div", { class: "scrolled" }, element("table", {},
    element("thead", {}, element("tr", {}, element("th"), ...heads)), element("tbody", {}, ...body)));
}
