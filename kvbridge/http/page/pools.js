// Pages of each space by state, as one bar a space. Cached pages are in use as far as somebody reads them. And what is in them.

import {count, el, keyed, plural, text} from "./format.js";

const STATES = ["leased", "held", "quarantined", "cached", "used", "available", "free"];
const SPACES = {
  full: "pages of components that grow with the tokens", swa: "windows and states", request: "one page a room", host: "components in host memory",
  full_twin: "host copies of pages of full", swa_twin: "host copies of windows and states at the end of prefixes",
};
const EMPTY = ["free", "available"];

export function drawPools(root, pools, available) {
  keyed(root, Object.entries(pools), {
    key: ([space]) => space,
    make: ([space]) => el("div", {class: "pool"},
      el("h3", {title: SPACES[space]}, space),
      el("p", {class: "quiet"}),
      el("div", {class: "bar", role: "img"}),
      el("ul", {class: "legend"})),
    update: (row, [space, states]) => {
      const total = Object.values(states).reduce((sum, pages) => sum + pages, 0);
      const busy = total - (available[space] || 0);
      const present = STATES.filter((state) => states[state] !== undefined);
      const [, note, bar, legend] = row.children;
      text(note, total ? `${percent(busy, total)} of ${count(total)} pages in use` : "no pages");
      bar.setAttribute("aria-label", `${space}: ${present.map((state) => `${count(states[state])} ${state}`).join(", ")}`);
      keyed(bar, present.filter((state) => !EMPTY.includes(state) && states[state]), {
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

// Of a node that keeps prefixes: how many pages, who reads them, what they were good for.
export function drawPrefixes(root, {role, prefixes, host_tier: tier, store}) {
  root.hidden = !prefixes;
  if (!prefixes) return;
  const {read_pages: read, unread_pages: unread, readers, hit_tokens: hit, miss_tokens: miss} = prefixes;
  const [evicted, retained] = [prefixes.evicted_pages, prefixes.retained_pages].map((pages) => Object.values(pages).reduce((sum, each) => sum + each, 0));
  const facts = [
    ["Cached", plural(read + unread, "page")],
    ["Pinned", `${plural(read, "page")} by ${plural(readers, "room")}`],
    ["Hits", hit + miss ? `${percent(hit, hit + miss)} of ${plural(hit + miss, "prompt token")} with keys` : "no prompt with keys yet"],
    ["Evicted", plural(evicted, "page")],
    ["Retained", plural(retained, "page")],
  ];
  if (tier) facts.push(["On the host", `${plural(tier.both_pages + tier.host_pages, "page")}, ${count(tier.host_pages)} only there`]);
  if (store) {
    const {stored = 0, ...others} = store.objects.put || {}, refused = Object.values(others).reduce((sum, each) => sum + each, 0);
    facts.push(["Store", `${store.kind}: ${plural(stored, "page")} written${refused ? `, ${count(refused)} not (${Object.keys(others).map((word) => word.replaceAll("_", " ")).join(", ")})` : ""}, ${count(store.fetched_pages)} fetched`]);
  }
  if (role === "prefill") facts.push(["Checkpoints", count(prefixes.checkpoints)]);
  keyed(root.lastElementChild, facts, {
    key: ([name]) => name,
    make: ([name]) => el("div", {}, el("dt", {}, name), el("dd", {})),
    update: (row, [, value]) => text(row.lastElementChild, value),
  });
}

function percent(part, whole) {
  const share = (100 * part) / whole;
  return share > 0 && share < 1 ? "under 1 %" : `${Math.round(share)} %`;
}
