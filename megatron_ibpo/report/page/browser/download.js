// Files that the page makes: a curve as CSV, a group as JSON.

import { element } from "./dom.js";

function save(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a", { href: address, download: name });
  link.click();
  URL.revokeObjectURL(address);
}

export function saveButton(label, title, make) {
  return element("button", { type: "button", class: "save", title, click: () => save(...make()) }, label);
}

function quoted(text) {
  return `"${String(text).replaceAll('"', '""')}"`;
}

const fileName = (text) => text.replace(/[^\w.-]+/g, "_");

// The drawn points of a metric: lines as `curve` takes them, with [first step, last step] of every point in `steps`.
export function curveAsCsv(metric, lines) {
  const rows = lines.flatMap(({ name, points, steps, band }) => points.map(([at, value], n) => {
    const [, low, high] = band.find(([step]) => step === at) ?? [];
    return [quoted(name), ...steps[n], value, low ?? "", high ?? ""].join(",");
  }));
  return [`${fileName(metric)}.csv`, "text/csv", [`run,first_step,last_step,${quoted(metric)},low,high`, ...rows, ""].join("\n")];
}

// A group with the text of every token in place of its number in the vocabulary.
export function groupAsJson(name, { vocabulary, responses, corrections, ...group }) {
  const readable = ({ tokens, ...response }) => {
    if (tokens === undefined) return response;
    const texts = tokens.map((number) => vocabulary[number][0]);
    return { text: texts.join(""), tokens: texts, ...response };
  };
  const content = { ...group, responses: responses.map(readable),
    corrections: corrections.map((made) => ({ ...made, response: readable(made.response) })) };
  return [`${fileName(name)}.json`, "application/json", JSON.stringify(content, null, 1)];
}
