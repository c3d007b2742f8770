// A response in full: its verdict, its numbers, and its corrections side by side with it.

import { element, shown, visible, words } from "./dom.js";
import { letters, tokens } from "./tokens.js";

export function verdictOf(response) {
  if (response.error) return "error";
  return response.correct ? "correct" : "wrong";
}

export const GLYPHS = { correct: "✓", wrong: "✗", error: "!" };

// What an edit script makes of each token of one side: replace, delete, insert, or nothing.
function edits(ops, side, length) {
  const marks = new Array(length).fill("");
  for (const [tag, ...bounds] of ops) {
    if (tag === "equal") continue;
    for (let i = bounds[2 * side]; i < bounds[2 * side + 1]; i++) marks[i] = tag;
  }
  return marks;
}

function mean(list) {
  return list.reduce((a, b) => a + b, 0) / list.length;
}

function facts(response) {
  const isExplained = response.lines?.length > 0;
  const told = isExplained ? [] : [`reward ${shown(response.reward)}`];
  for (const [name, value] of Object.entries(response.details ?? {})) told.push(`${words(name)} ${shown(value)}`);
  if (response.answer !== undefined) told.push(response.answer === null ? "no answer was found" : `answer ${response.answer}`);
  if (response.advantage !== undefined && !isExplained) told.push(`advantage ${shown(response.advantage)}`, `weight ${shown(response.weight)}`);
  if (response.length !== null) told.push(`${response.length.toLocaleString("en")} tokens`);
  if (response.weights) told.push(`${response.weights.filter((w) => w === 0).length} of ${response.weights.length} tokens masked`);
  if (response.new && response.old && response.old.length)
    told.push(`sequence ratio of the update ${shown(Math.exp(mean(response.new) - mean(response.old)), 5)}`);
  if (response.temperature !== undefined) told.push(`temperature ${shown(response.temperature)}`);
  if (response.versions) told.push(`policy version ${[...new Set(response.versions.map(([, version]) => version))].join(", ")}`);
  if (response.truncated) told.push("cut off at the length limit");
  const box = element("p", { class: "facts" }, told.join(" · "));
  return response.error ? element("div", {}, box, element("p", { class: "problem" }, `no reward: ${response.error}`)) : box;
}

export function pane(title, response, group, colour, marks) {
  const verdict = verdictOf(response);
  const peers = group.responses.filter((one) => one.tokens);
  return element("article", { class: `pane ${verdict}` },
    element("h2", {}, element("span", { class: `verdict ${verdict}` }, GLYPHS[verdict]), " ", title,
      response.truncated ? element("span", { class: "label" }, "truncated") : null),
    tokens(response, group.vocabulary, colour, colour === "edits" ? marks : [], peers),
    explanation(response.lines ?? []),
    facts(response),
    response.asked ? element("details", { class: "asked" }, element("summary", {}, "its own prompt"), ...turns(response.asked)) : null);
}

// How the advantage came about: lines of a name, a value, the sum that gives it, and a note.
function explanation(lines) {
  if (!lines.length) return "";
  return element("dl", { class: "lines" }, ...lines.flatMap(([name, value, sum, note]) => [
    element("dt", {}, visible(name)),
    element("dd", {}, sum ? `${visible(sum)} = ` : "",
      typeof value === "string" ? visible(value) : element("b", {}, shown(value, 6)),
      note ? element("span", { class: "hint" }, visible(note)) : null)]));
}

export function nameOf(response, index) {
  return response.name ?? `response ${index + 1}`;
}

// A response alone, or beside each of its corrections and what they were shown.
export function responseDetail(group, index, colour) {
  const response = group.responses[index];
  const made = group.corrections.filter((correction) => correction.target === index);
  if (!made.length) return [pane(nameOf(response, index), response, group, colour, [])];
  return made.map((correction) => besideCorrection(group, index, correction, colour));
}

function besideCorrection(group, index, correction, colour) {
  const before = group.responses[index];
  const { ops } = correction;
  const response = { ...correction.response, lines: correction.lines };
  const told = [`edit distance ${shown(correction.distance)}`];
  if (correction.reference_distance !== null) told.push(`to the nearest reference ${shown(correction.reference_distance)}`);
  told.push(`${Math.round(100 * correction.unmodified_share)} % of the response unmodified`);
  const asked = element("details", {}, element("summary", {}, "what the policy was asked"), ...turns(correction.prompt));
  return element("section", { class: "correction" },
    element("p", { class: "facts" }, element("span", { class: "label kind" }, correction.kind),
      correction.leaks ? element("span", { class: "label problem" }, "quotes the reference's answer") : null, told.join(" · ")),
    element("div", { class: "panes" },
      pane(nameOf(before, index), before, group, colour, edits(ops, 0, before.tokens.length)),
      pane("its correction", response, group, colour, edits(ops, 1, response.tokens.length)),
      ...correction.references.map((place) => pane(`reference: response ${place + 1}`, group.responses[place], group, colour, []))),
    asked);
}

// A prompt as the turns of a chat, without the one that the policy is to write.
export function turns(prompt) {
  return prompt.filter(([, text]) => text).map(([role, text]) => element("div", { class: `turn ${["system", "user", "assistant"].includes(role) ? role : "other"}` },
    element("span", { class: "role" }, role || "prompt"), letters(text)));
}
