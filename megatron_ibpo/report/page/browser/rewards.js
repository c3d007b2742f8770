// Rewards as marks and as a histogram: ✓ and ✗ where they are 0 and 1, shades of their size everywhere else.

import { drawn, element, shown } from "./dom.js";

const BARS = 20;
const [ACROSS, UPWARD, BASE] = [300, 64, 14];

// The range of a section's rewards, and whether they are others than 0 and 1.
export function rewardScale(groups) {
  const rewards = groups.flatMap(({ responses }) => responses.map(({ reward }) => reward)).filter((reward) => reward !== null);
  const [low, high] = rewards.reduce(([a, b], reward) => [Math.min(a, reward), Math.max(b, reward)], [Infinity, -Infinity]);
  return { rewards, low, high, isGraded: rewards.some((reward) => reward !== 0 && reward !== 1) };
}

// A reward in as few letters as a chip holds.
export function shortReward(reward) {
  return shown(reward, Math.abs(reward) < 1 ? 2 : 3).replace(/^(-?)0\./, "$1.");
}

export function rewardTint({ low, high }, reward) {
  const strength = high > low ? Math.round(8 + 62 * (reward - low) / (high - low)) : 40;
  return `color-mix(in srgb, var(--right) ${strength}%, transparent)`;
}

// [low, high, number of rewards] of every bar; the values themselves if there are few.
function bars({ rewards, low, high }) {
  const values = [...new Set(rewards)].toSorted((a, b) => a - b);
  if (values.length <= BARS / 2) return values.map((value) => [value, value, rewards.filter((reward) => reward === value).length]);
  const width = (high - low) / BARS;
  const counts = new Array(BARS).fill(0);
  for (const reward of rewards) counts[Math.min(BARS - 1, Math.floor((reward - low) / width))] += 1;
  return counts.map((count, n) => [low + n * width, n === BARS - 1 ? high : low + (n + 1) * width, count]);
}

// The histogram of a section. A click on a bar calls pick(low, high).
export function rewardHistogram(scale, pick) {
  const all = bars(scale);
  if (!all.length) return null;
  const most = Math.max(...all.map(([, , count]) => count));
  const svg = drawn("svg", { viewBox: `0 0 ${ACROSS} ${UPWARD}`, role: "img" });
  const width = Math.min(ACROSS / all.length, 60);
  all.forEach(([low, high, count], n) => {
    const tall = Math.max(count ? 1.5 : 0, (UPWARD - BASE - 10) * count / most);
    const bar = drawn("g", { class: "bar", "data-count": count });
    const label = drawn("title", {});
    label.textContent = `reward ${shown(low)}${high > low ? ` to ${shown(high)}` : ""}: ${count} of ${scale.rewards.length} responses`;
    const area = { x: n * width, width: width - 1 };
    bar.append(label, drawn("rect", { ...area, class: "reach", y: 0, height: UPWARD - BASE }),
      drawn("rect", { ...area, y: UPWARD - BASE - tall, height: tall }));
    bar.addEventListener("click", () => pick(low, high));
    svg.append(bar);
    if (all.length <= 5) svg.append(axisText(n * width + width / 2, UPWARD - BASE - tall - 2, String(count), "middle"));
    if (all.length <= BARS / 2) svg.append(axisText(n * width + width / 2, UPWARD - 3, shown(low), "middle"));
  });
  if (all.length > BARS / 2) svg.append(axisText(1, UPWARD - 3, shown(scale.low), "start"), axisText(ACROSS - 1, UPWARD - 3, shown(scale.high), "end"));
  return element("div", { class: "histogram", "aria-label": "rewards of the step" }, svg);
}

function axisText(x, y, content, anchor) {
  const made = drawn("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
