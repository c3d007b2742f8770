// Elements and numbers. Text goes into the page as text nodes and attributes only; nothing is ever parsed as HTML.

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function drawn(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

// A number with a few digits; large ones with units, small ones with a power of ten, a dash where there is none.
export function shown(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return Number(value.toPrecision(digits)).toExponential();
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? [1, ""];
  return String(Number((value / (unit === "k" ? 1e3 : size)).toPrecision(digits))) + unit;
}

export function words(name) {
  return name.replace("/", ": ").replaceAll("_", " ");
}

const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]|\p{Cs}/gu;

// Text in which characters that hide themselves or turn others around are named.
export function visible(text) {
  return text.replace(INVISIBLE, (found) => `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

export function choice(label, entries, value, change) {
  const select = element("select", { change: () => { change(select.value); select.blur(); } },
    ...entries.map(([key, text]) => element("option", { value: key }, text)));
  select.value = value;
  return element("label", {}, label, " ", select);
}

// A function that waits until it has not been called for a while.
export function calm(milliseconds, act) {
  let waiting;
  return (...values) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => act(...values), milliseconds);
  };
}
