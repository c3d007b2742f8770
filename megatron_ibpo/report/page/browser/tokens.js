// The tokens of a response as text, coloured by one of their numbers.
//
// Colours are blue and orange or one hue by its depth, which look different to everybody; edits are underlined or
// struck through as well.

import { byId, element, shown, visible } from "./dom.js";

const AT_ONCE = 3000; // tokens shown of a response; a button shows the next ones
const LETTERS_AT_ONCE = 20000; // of a text without tokens, and of one token

function over(minuend, subtrahend) {
  return minuend && subtrahend ? minuend.map((value, i) => value - subtrahend[i]) : null;
}

function repeated(value, response) {
  return value === null || value === undefined ? null : response.tokens.map(() => value);
}

function trainedShare(response) {
  const weights = response.weights ?? repeated(response.advantage === undefined ? null : 1, response);
  const mask = response.mask ?? repeated(1, response);
  return weights === null ? response.mask : weights.map((weight, i) => weight * mask[i]);
}

function advantageOfTokens(response) {
  const whole = response.advantages ?? repeated(response.advantage, response);
  const weights = trainedShare(response);
  return whole === null ? null : whole.map((value, i) => (weights ? value * weights[i] : value));
}

// What tokens can be coloured by: the number of each token, the ends of the scale, and what the ends mean.
// `most` null: as far as the numbers on the page go. One-sided scales have `least` 0.
export const COLOURS = {
  "edits": { name: "edits of the correction", numbers: () => null },
  "logprob": { name: "log-prob of the engine", numbers: (r) => r.sampled, least: 0, most: -5, ends: ["certain", "surprising"] },
  "advantage": { name: "advantage × weight", numbers: advantageOfTokens, most: null, ends: ["discouraged", "encouraged"] },
  "mask": { name: "weight in the loss", numbers: trainedShare, least: 0, most: null, ends: ["not trained on", "most"] },
  "value": { name: "critic's value", numbers: (r) => r.values, most: null, ends: ["expects less", "more"] },
  "mismatch": { name: "trainer − engine log-prob", numbers: (r) => over(r.old, r.sampled), most: Math.LN2,
    ends: ["trainer thinks less of it", "more"] },
  "update": { name: "change by the update", numbers: (r) => over(r.new, r.old), most: Math.LN2, ends: ["less likely now", "more"] },
};

function scaleOf(colour, responses) {
  if (colour.most !== null) return colour;
  const largest = Math.max(0, ...responses.map((one) => (colour.numbers(one) ?? []).reduce((a, b) => Math.max(a, Math.abs(b)), 0)));
  return { ...colour, most: largest || 1 };
}

function tint(scale, value) {
  const strength = Math.round(100 * Math.min(1, Math.abs(value / scale.most)));
  const hue = scale.least === 0 ? "var(--depth)" : value < 0 ? "var(--below)" : "var(--above)";
  return `color-mix(in srgb, ${hue} ${strength}%, transparent)`;
}

export function legend(key, responses) {
  if (key === "edits")
    return element("span", { id: "legend" }, element("span", { class: "replace" }, "replaced"), " ",
      element("span", { class: "delete" }, "deleted"), " ", element("span", { class: "insert" }, "inserted"),
      ...(responses.some(({ weights, mask }) => weights || mask) ? [" ", element("span", { class: "untrained" }, "not trained on")] : []),
      ...(responses.some(({ weights }) => weights) ? [" ", element("span", { class: "weighed" }, "token weight")] : []));
  const scale = scaleOf(COLOURS[key], responses.filter((one) => one.tokens));
  const [low, high] = scale.least === 0 ? [0, scale.most] : [-scale.most, scale.most];
  const bar = element("span", { class: `scale ${scale.least === 0 ? "depth" : "sides"}` });
  return element("span", { id: "legend" }, `${shown(low)} ${scale.ends[0]} `, bar, ` ${scale.ends[1]} ${shown(high)}`);
}

// The text of a response.
//
// vocabulary: [[text, special]]; key: of COLOURS; marks: what an edit script makes of each token, or [];
// peers: the responses whose numbers share the scale.
export function tokens(response, vocabulary, key, marks, peers) {
  const box = element("div", { class: "text", tabindex: 0 });
  if (response.tokens === undefined) {
    appendLetters(box, response.text, 0);
    return box;
  }
  const scale = scaleOf(COLOURS[key], peers);
  const numbers = COLOURS[key].numbers(response) ?? null;
  const shades = scaleOf(COLOURS.mask, peers);
  const weights = response.weights ? trainedShare(response) : response.mask;
  const told = Object.values(COLOURS).map((colour) => [colour.name, colour.numbers(response)]).filter(([, list]) => list);
  const append = (start) => {
    const end = Math.min(start + AT_ONCE, response.tokens.length);
    let place = box;
    for (let i = start; i < end; i++) {
      if (response.mask && (i === start || response.mask[i] !== response.mask[i - 1])) place = stretch(box, response.mask, i);
      const [text, special] = vocabulary[response.tokens[i]];
      const span = element("span", { class: "token" + (special ? " special" : "") }, clipped(visible(text)));
      if (marks[i]) span.classList.add(marks[i]);
      if (numbers) span.style.backgroundColor = tint(scale, numbers[i]);
      if (weights && weights[i] === 0) span.classList.add("untrained");
      else if (weights && !numbers) span.style.boxShadow = `inset 0 -.28em ${tint(shades, weights[i])}`;
      span.place = i;
      place.append(span);
    }
    if (end < response.tokens.length) box.append(more(response.tokens.length - end, "tokens", () => append(end)));
  };
  append(0);
  box.addEventListener("pointerover", (event) => {
    const i = event.target.place;
    if (i === undefined) return hideTip();
    const lines = [`token ${i + 1} of ${response.tokens.length}`, ...(marks[i] ? [marks[i]] : []),
      ...told.map(([name, list]) => `${name} ${shown(list[i], 4)}`)];
    showTip(lines, event.target);
  });
  box.addEventListener("pointerleave", hideTip);
  return box;
}

// A block, which can be folded, for the tokens from `start` on that the policy wrote, or that it was given: the answers
// of an environment.
function stretch(box, mask, start) {
  const other = mask.findIndex((written, i) => i > start && written !== mask[start]);
  const count = (other < 0 ? mask.length : other) - start;
  const block = element("details", { class: mask[start] ? "stretch" : "stretch given", open: true },
    element("summary", {}, `${mask[start] ? "policy" : "environment"}, ${count.toLocaleString("en")} tokens`));
  box.append(block);
  return block;
}

function more(count, what, act) {
  const button = element("button", { type: "button", class: "more", click: () => { button.remove(); act(); } },
    `show more: ${count.toLocaleString("en")} ${what} are left`);
  return button;
}

function appendLetters(box, text, start) {
  const end = start + LETTERS_AT_ONCE;
  box.append(visible(text.slice(start, end)));
  if (end < text.length) box.append(more(text.length - end, "characters", () => appendLetters(box, text, end)));
}

export function letters(text) {
  const box = element("div", { class: "text", tabindex: 0 });
  appendLetters(box, text, 0);
  return box;
}

function clipped(text) {
  const left = text.length - LETTERS_AT_ONCE;
  return left > 0 ? `${text.slice(0, LETTERS_AT_ONCE)}⟨and ${left.toLocaleString("en")} more characters⟩` : text;
}

function showTip(lines, target) {
  const tip = byId("tip");
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  const below = box.bottom + 6;
  tip.style.top = `${below + tip.offsetHeight < innerHeight ? below : box.top - tip.offsetHeight - 6}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
