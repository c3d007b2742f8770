// The page: what runs there are, which view is open, what is new, and the keys.

import { byId, calm, element } from "./dom.js";
import { ask, isLive } from "./transport.js";
import { change, onChange, state } from "./state.js";
import { drawCurves, showCurves } from "./panels.js";
import { ABOUTS, VERDICTS, move, moveSection, refresh, updateSamples } from "./samples.js";
import { COLOURS } from "./tokens.js";
import { showAlarms } from "./alarms.js";
import { showStudy } from "./study.js";
import { showTables } from "./tables.js";

const LOOK_EVERY = 2000; // milliseconds
const TABS = { study: "Study", curves: "Curves", samples: "Samples", comparison: "Settings and numbers" };
const KEYS_SHOWN = [["j  k", "next and previous response"], ["←  →", "step, or set of an evaluation"],
  ["v", "verdict"], ["f", "what about it"], ["c", "colour of tokens"], ["g", "whole group or one response"],
  ["/", "search"], ["1  2  3", "curves, samples, settings"], ["?", "this list"]];

let overview = { version: null, runs: [] };
let readings = 0; // of curves, so that an answer that comes late is not shown over a newer one

async function look() {
  const reply = await ask("runs", { version: overview.version });
  if (reply.version === overview.version) return;
  overview = reply;
  if (reply.study) state.tab = "study";
  else if (reply.runs.every((run) => run.kind === "evaluation") && state.tab === "curves") state.tab = "comparison";
  drawHeader();
  drawTabs();
  showStudy(overview.study);
  showAlarms(overview.runs);
  showTables(overview.runs, overview.comparison);
  updateSamples(overview.runs);
  await readCurves();
}

async function readCurves() {
  const reading = ++readings;
  const [first, last] = state.range ?? [null, null];
  const read = overview.runs.map((_, run) => ask(`runs/${run}/series`, { first, last }));
  const found = await Promise.all(read);
  if (reading === readings) showCurves(overview.runs, found);
}

async function follow() {
  try {
    await look();
    tell(isLive ? "live" : "");
  } catch (error) {
    tell(error instanceof TypeError ? "no answer from the server: is it still running?" : error.message, true);
  }
  if (isLive) setTimeout(follow, LOOK_EVERY);
}

function tell(text, isProblem = false) {
  const left = overview.runs.map((run) => run.left_out).filter(Boolean);
  byId("status").replaceChildren(...(text ? [element("span", { class: isProblem ? "problem" : "live" }, text)] : []),
    ...left.map((one) => element("span", { class: "left" }, one)));
}

function drawHeader() {
  byId("runs").replaceChildren(...overview.runs.map((run, number) => {
    const box = element("input", { type: "checkbox", "aria-label": `curves of ${run.name}`,
      change: () => {
        const others = state.hidden.filter((one) => one !== number);
        change({ hidden: box.checked ? others : [...others, number] });
      } });
    box.checked = !state.hidden.includes(number);
    const progress = run.kind === "run" ? [`step ${run.steps}${run.planned ? ` of ${run.planned}` : ""}`] : [];
    return element("label", { class: "run" }, overview.runs.length > 1 ? box : null,
      element("i", { class: `swatch run${number}` }), element("b", {}, run.name), element("span", {}, run.title),
      element("span", { class: "facts" }, [...progress, ...run.facts].join(" · ")));
  }));
}

function drawTabs() {
  const hasRuns = overview.runs.some((run) => run.kind === "run");
  const names = Object.keys(TABS).filter((name) =>
    name === "study" ? overview.study : overview.runs.length && (hasRuns || name !== "curves"));
  const tab = (name) => element("button", { type: "button", "data-tab": name, "aria-pressed": String(state.tab === name),
    click: () => change({ tab: name }) }, name === "comparison" && !hasRuns ? "Results" : TABS[name]);
  const keys = element("button", { type: "button", class: "keys", click: () => byId("help").showModal() },
    "keys ", element("kbd", {}, "?"));
  byId("tabs").replaceChildren(...names.map(tab), keys);
  for (const name of Object.keys(TABS)) byId(name).hidden = name !== state.tab;
}

function cycled(list, value) {
  return list[(list.indexOf(value) + 1) % list.length];
}

const openTab = (tab) => overview.runs.length && change({ tab });
const KEYS = {
  1: () => openTab("curves"),
  2: () => openTab("samples"),
  3: () => openTab("comparison"),
  "?": () => byId("help").showModal(),
  "/": () => byId(state.tab === "samples" ? "text" : "metric")?.focus(),
};
const KEYS_OF_SAMPLES = {
  j: () => move(1),
  k: () => move(-1),
  ArrowRight: () => moveSection(1),
  ArrowLeft: () => moveSection(-1),
  v: () => change({ verdict: cycled(VERDICTS, state.verdict) }),
  f: () => change({ about: cycled(Object.keys(ABOUTS), state.about) }),
  c: () => change({ colour: cycled(Object.keys(COLOURS), state.colour) }),
  g: () => change({ view: state.view === "group" ? "response" : "group" }),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["SELECT", "INPUT"].includes(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = KEYS[event.key] ?? (state.tab === "samples" ? KEYS_OF_SAMPLES[event.key] : undefined);
  if (!act) return;
  event.preventDefault();
  act();
});

const SHOWN_BY_CURVES = ["hidden", "metric", "smoothing"];
const redraw = calm(0, drawCurves);

onChange((changed) => {
  if (changed.has("tab")) drawTabs();
  if (changed.has("metric") && byId("metric")) byId("metric").value = state.metric;
  if (changed.has("range")) readCurves().catch((error) => tell(error.message, true));
  else if (SHOWN_BY_CURVES.some((name) => changed.has(name))) redraw();
  if (state.tab === "samples" && !(changed.size === 1 && changed.has("hidden"))) refresh();
});

byId("help").append(element("h2", {}, "Keys"), element("dl", {}, ...KEYS_SHOWN.flatMap(([keys, meaning]) =>
  [element("dt", {}, ...keys.split("  ").flatMap((key) => [element("kbd", {}, key), " "])), element("dd", {}, meaning)])),
  element("button", { type: "button", click: () => byId("help").close() }, "close"));
await follow();
