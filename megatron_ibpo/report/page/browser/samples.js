// Samples of one step, or one set of an evaluation: groups on the left, one of them on the right.

import { byId, calm, choice, element, shown, visible } from "./dom.js";
import { ask } from "./transport.js";
import { change, state } from "./state.js";
import { GLYPHS, nameOf, pane, responseDetail, turns, verdictOf } from "./diff.js";
import { COLOURS, hideTip, legend, letters } from "./tokens.js";
import { groupAsJson, saveButton } from "./download.js";
import { rewardHistogram, rewardScale, rewardTint, shortReward } from "./rewards.js";

const GROUPS_AT_ONCE = 100;

export const VERDICTS = ["all", "correct", "wrong", "error"];
export const ABOUTS = {
  "anything": () => true,
  "corrected": (item) => item.kinds.includes("corrected"),
  "rewritten": (item) => item.kinds.includes("rewritten"),
  "no-op": (item) => item.kinds.includes("no-op"),
  "correction failed": (item) => item.kinds.includes("failed"),
  "without a correction": (item) => verdictOf(item.response) === "wrong" && item.kinds.length === 0,
  "quotes the reference": (item) => item.leaks,
  "truncated": (item) => item.response.truncated,
};
const VERDICT_NAMES = { all: "any verdict", correct: "✓ correct", wrong: "✗ wrong", error: "! no reward" };

let overviews = [];
let index = []; // groups of the section, without tokens
let rewards = rewardScale([]); // of the section
let found = null; // "group/response" of those that hold the searched text; null: no search
let loaded = ""; // address and version of what `index` holds
let items = []; // responses that pass the filters
let opened = { address: "", group: null }; // the group that was shown last

function address() {
  return `runs/${state.run}/sections/${state.key}`;
}

function sections() {
  return overviews[state.run]?.sections ?? [];
}

// Take the overview of the runs. Steps that are new become choices.
export function updateSamples(runs) {
  overviews = runs;
  if (state.tab === "samples") refresh();
}

// Show what the state says, and read what of it is not there yet.
export async function refresh() {
  const box = byId("samples");
  if (!overviews[state.run]?.sections.length) {
    const other = overviews.findIndex((one) => one.sections.length);
    if (other < 0 || state.run === other) return showNothing();
    return change({ run: other, key: null });
  }
  if (!sections().some(({ key }) => key === state.key)) return change({ key: sections().at(-1).key, group: 0, response: 0 });
  box.classList.add("busy");
  try {
    if (loaded !== address()) {
      const asked = address();
      const groups = await ask(asked);
      if (asked !== address()) return; // it was left before the answer came
      [index, loaded, found, rewards] = [groups, asked, null, rewardScale(groups)];
    }
    const wanted = state.text.trim();
    if (wanted === "") found = null;
    else if (found?.text !== wanted) {
      const hits = await ask(`${address()}/search`, { text: wanted });
      found = { text: wanted, hits: new Set(hits.map(([group, response]) => `${group}/${response}`)) };
    }
    choose();
    await draw();
  } catch (error) {
    byId("samples").replaceChildren(element("p", { class: "problem" }, error.message));
  } finally {
    box.classList.remove("busy");
  }
}

function showNothing() {
  byId("samples").replaceChildren(element("p", { class: "hint" },
    overviews.some((one) => one.kind === "run") ? "No samples were kept: --keep-samples says of how many steps, and --save-debug-rollout-data keeps every step." :
      "This evaluation kept no samples."));
}

function passes(item) {
  const { response } = item;
  if (state.verdict !== "all" && verdictOf(response) !== state.verdict) return false;
  if (!ABOUTS[state.about]?.(item)) return false;
  if (state.low !== "" && !(response.reward !== null && response.reward >= Number(state.low))) return false;
  if (state.high !== "" && !(response.reward !== null && response.reward <= Number(state.high))) return false;
  return found === null || found.hits.has(`${item.group}/${item.index}`);
}

// Filter, and go to the nearest response that passes.
function choose() {
  items = index.flatMap((group, number) => group.responses.map((response, place) => {
    const made = group.corrections.filter((correction) => correction.target === place);
    const kinds = made.map(({ kind }) => kind);
    return { group: number, index: place, response, kinds, leaks: made.some(({ leaks }) => leaks) };
  })).filter(passes);
  if (!items.length || position() >= 0) return;
  const isLater = ({ group, index: place }) => group > state.group || (group === state.group && place >= state.response);
  const next = items.find(isLater) ?? items.at(-1);
  [state.group, state.response] = [next.group, next.index];
}

function position() {
  return items.findIndex((item) => item.group === state.group && item.index === state.response);
}

export function move(by) {
  const item = items[Math.max(0, Math.min(position() + by, items.length - 1))];
  if (item) change({ group: item.group, response: item.index });
}

export function moveSection(by) {
  const keys = sections().map(({ key }) => key);
  const place = Math.max(0, Math.min(keys.indexOf(state.key) + by, keys.length - 1));
  if (keys.length) change({ key: keys[place] });
}

async function groupAt(asked) {
  if (opened.address !== asked) opened = { address: asked, group: await ask(asked) };
  return opened.group;
}

async function draw() {
  const asked = address();
  const group = items.length ? await groupAt(`${asked}/groups/${state.group}`) : null;
  if (asked !== address()) return;
  hideTip();
  const box = byId("samples");
  if (!byId("filters")) box.replaceChildren(element("div", { id: "filters", class: "toolbar" }),
    element("div", { class: "columns" }, element("div", { id: "groups" }), element("div", { id: "detail" })));
  drawFilters(group);
  drawGroups();
  byId("detail").replaceChildren(...(group ? detail(group) : [element("p", { class: "hint" }, "No response matches the filters.")]));
  document.querySelector(".group.here")?.scrollIntoView({ block: "nearest" });
}

// -------------------------------------------------------------------------------------------------- filters

function drawFilters(group) {
  const box = byId("filters");
  const focused = box.contains(document.activeElement) ? document.activeElement.id : null;
  if (focused) return drawCount(group); // one who types is not interrupted
  const number = (id, label) => {
    const input = element("input", { id, type: "number", step: "any", "aria-label": label, placeholder: label,
      input: calm(300, () => change({ [id]: input.value })) });
    input.value = state[id];
    return input;
  };
  const search = element("input", { id: "text", type: "search", placeholder: "search in text", "aria-label": "search in text",
    input: calm(300, () => change({ text: search.value })) });
  search.value = state.text;
  const ofEvaluation = overviews[state.run].kind === "evaluation";
  const runs = overviews.map((one, run) => [run, one.name]).filter(([run]) => overviews[run].sections.length);
  box.replaceChildren(
    runs.length > 1 ? choice("run", runs, state.run, (run) => change({ run: Number(run), key: null, group: 0, response: 0 })) : "",
    choice(ofEvaluation ? "set" : "", sections().map(({ key, label }) => [key, label]), state.key, (key) => change({ key: Number(key) })),
    choice("", VERDICTS.map((name) => [name, VERDICT_NAMES[name]]), state.verdict, (verdict) => change({ verdict })),
    ofEvaluation ? choice("", ["anything", "truncated"].map((name) => [name, name]), state.about, (about) => change({ about })) :
      choice("", Object.keys(ABOUTS).map((name) => [name, name]), state.about, (about) => change({ about })),
    element("span", { class: "range" }, "reward ", number("low", "from"), "–", number("high", "to")), search,
    element("span", { id: "count", "aria-live": "polite" }),
    element("span", { class: "right" },
      choice("view", [["response", "one response"], ["group", "whole group"]], state.view, (view) => change({ view })),
      ofEvaluation ? "" : choice("colour", Object.entries(COLOURS).map(([key, { name }]) => [key, name]), state.colour,
        (colour) => change({ colour })),
      ofEvaluation || !group ? "" : legend(state.colour, group.responses)));
  drawCount(group);
}

function drawCount(group) {
  byId("count").textContent = group ? `${position() + 1} of ${items.length}` : "none";
}

// --------------------------------------------------------------------------------------------------- groups

function drawGroups() {
  const kept = new Set(items.map((item) => `${item.group}/${item.index}`));
  const numbers = [...new Set(items.map((item) => item.group))];
  const start = Math.floor(Math.max(0, numbers.indexOf(state.group)) / GROUPS_AT_ONCE) * GROUPS_AT_ONCE;
  const rows = numbers.slice(start, start + GROUPS_AT_ONCE).map((number) => groupRow(number, kept));
  const turnTo = (place, label) => (numbers[place] === undefined || place < 0 ? null :
    element("button", { type: "button", class: "more", click: () => change({ group: numbers[place], response: 0 }) }, label));
  const histogram = rewardHistogram(rewards, (low, high) => change(isPicked(low, high) ? { low: "", high: "" } : { low: String(low), high: String(high) }));
  byId("groups").replaceChildren(...[histogram, turnTo(start - GROUPS_AT_ONCE, "earlier groups"), ...rows,
    turnTo(start + GROUPS_AT_ONCE, `${numbers.length - start - GROUPS_AT_ONCE} later groups`)].filter(Boolean));
}

const isPicked = (low, high) => state.low === String(low) && state.high === String(high);

function groupRow(number, kept) {
  const group = index[number];
  const chips = group.responses.map((response, place) => {
    const verdict = verdictOf(response);
    const kinds = group.corrections.filter((made) => made.target === place).map(({ kind }) => kind);
    const here = number === state.group && place === state.response;
    const told = [nameOf(response, place), verdict, `reward ${shown(response.reward)}`, ...kinds, response.truncated ? "truncated" : ""];
    const isGraded = rewards.isGraded && response.reward !== null;
    const chip = element("button", { type: "button", title: told.filter(Boolean).join(", "), "data-place": place,
      class: ["chip", verdict, isGraded ? "graded" : "", here ? "here" : "", kept.has(`${number}/${place}`) ? "" : "left-out",
        kinds.some((kind) => kind === "corrected" || kind === "rewritten") ? "mended" : ""].filter(Boolean).join(" "),
      click: () => change({ group: number, response: place }) }, isGraded ? shortReward(response.reward) : GLYPHS[verdict]);
    if (isGraded) chip.style.backgroundColor = rewardTint(rewards, response.reward);
    return chip;
  });
  const scored = group.responses.map(({ reward }) => reward).filter((reward) => reward !== null);
  const share = rewards.isGraded ? (scored.length ? `mean ${shortReward(scored.reduce((a, b) => a + b, 0) / scored.length)}` : "–") :
    `${group.responses.filter((response) => response.correct).length}/${group.responses.length}`;
  const first = items.find((item) => item.group === number);
  return element("div", { class: `group${number === state.group ? " here" : ""}`, "data-group": number },
    element("button", { type: "button", class: "question", click: () => change({ group: number, response: first.index }) },
      element("span", { class: "share" }, share),
      element("span", {}, visible(group.prompt.length > 90 ? "…" + group.prompt.slice(-89) : group.prompt))),
    element("div", { class: "chips" }, ...chips));
}

// --------------------------------------------------------------------------------------------------- detail

function promptFacts(group) {
  const told = [`label ${visible(group.label)}`, visible(group.task), group.index === undefined ? "" : `prompt ${group.index}`];
  const skipped = index[state.group].skipped_pairs;
  if (skipped) told.push(`${skipped} corrections would not have fitted the context`);
  const [mean, spread] = ["group mean", "group σ"].map((name) => lineOfGroup(group, name));
  if (mean !== undefined) told.push(`mean ${shown(mean, 6)} and σ ${shown(spread, 6)} of the rewards that are compared`);
  return told.filter(Boolean).join(" · ");
}

function lineOfGroup(group, name) {
  return group.responses.flatMap(({ lines }) => lines ?? []).find(([own]) => own === name)?.[1];
}

function detail(group) {
  const name = `${overviews[state.run].name} ${sections().find(({ key }) => key === state.key)?.label} group ${state.group + 1}`;
  const asked = element("article", { class: "prompt", id: "prompt" }, ...turns(group.prompt),
    element("p", { class: "facts" }, promptFacts(group), " ",
      saveButton("JSON", "save this group with its tokens and numbers", () => groupAsJson(name, group))),
    group.metadata ? element("details", { class: "asked" }, element("summary", {}, "metadata"), letters(group.metadata)) : null);
  if (state.view === "group") {
    const panes = group.responses.map((response, place) => {
      const made = pane(nameOf(response, place), response, group, state.colour, []);
      if (place === state.response) made.classList.add("here");
      return made;
    });
    return [asked, element("div", { class: "side-by-side" }, ...panes)];
  }
  return [asked, ...responseDetail(group, state.response, state.colour)];
}
