// Pages of each space by state, as one bar a space.

import {count, el, keyed, text} from "./format.js";

const STATES = ["leased", "held", "quarantined", "used", "free"];

export function drawPools(root, pools) {
  keyed(root, Object.entries(pools), {
    key: ([space]) => space,
    make: ([space]) => el("div", {class: "pool"},
      el("h3", {}, space),
      el("p", {class: "quiet"}),
      el("div", {class: "bar", role: "img"}),
      el("ul", {class: "legend"})),
    update: (row, [space, states]) => {
      const total = Object.values(states).reduce((sum, pages) => sum + pages, 0);
      const busy = total - (states.free || 0);
      const present = STATES.filter((state) => states[state] !== undefined);
      const [, note, bar, legend] = row.children;
      text(note, total ? `${percent(busy, total)} of ${count(total)} pages in use` : "no pages");
      bar.setAttribute("aria-label", `${space}: ${present.map((state) => `${count(states[state])} ${state}`).join(", ")}`);
      keyed(bar, present.filter((state) => state !== "free" && states[state]), {
        key: (state) => state,
        make: (state) => el("span", {class: `part ${state}`}),
        update: (part, state) => part.style.setProperty("width", `${(100 * states[state]) / total}%`),
      });
      keyed(legend, present, {
        key: (state) => state,
        make: (state) => el("li", {class: state}, el("span")),
        update: (item, state) => text(item.firstElementChild, `${count(states[state])} ${state}`),
      });
    },
  });
}

function percent(part, whole) {
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "under 1 %" : `${Math.round(share)} %`;
}
