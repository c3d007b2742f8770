// The result of a study: what was run, then its tables and pictures in the order of the report.

import { byId, element } from "./dom.js";

export function showStudy(study) {
  if (!study) return;
  byId("study").replaceChildren(element("h1", {}, study.name),
    ...study.lines.map((line) => element("p", {}, line)),
    element("ul", {}, ...study.tasks.map((task) => element("li", {}, task))),
    ...study.sections.flatMap(sectionOf));
}

function sectionOf({ title, picture, header, rows, legend }) {
  const content = picture ? element("img", { class: "picture", src: picture, alt: title }) :
    element("div", { class: "scrolled" }, element("table", { class: "report" },
      element("thead", {}, element("tr", {}, ...header.map((cell) => element("th", {}, cell)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))))));
  return [element("h2", {}, title), content, legend ? element("p", { class: "hint" }, legend) : null].filter(Boolean);
}
