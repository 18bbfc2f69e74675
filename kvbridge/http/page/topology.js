// Who sends to whom and how fast: prefill on the left, decode on the right, a curve for each link.
//
// `draw(model)` takes {left, right, links}: ends {id, name, brief, ok, note, does, rate, rooms, full, here} and links {from, to, rate}.
// The whole picture is one tab stop; arrow keys go from end to end, Enter or a click selects one and shows its links alone.

import {keyed, plural, rate, svg, text} from "./format.js";

const MAX_CURVES = 240; // of a large fleet: the fastest; all of whoever is selected
const MAX_MOVING = 24; // beyond that, curves stand still: motion costs, and tells nothing any more
const ROOMY = 8; // ends on one side that get two lines each

export class Topology {
  constructor(root, onSelect) {
    this.root = root;
    this.onSelect = onSelect;
    this.selected = null;
    this.curves = svg("g", {class: "curves", "aria-hidden": "true"});
    this.ends = svg("g", {class: "ends"});
    this.labels = svg("g", {class: "labels", "aria-hidden": "true"});
    this.picture = svg("svg", {role: "group"}, this.curves, this.labels, this.ends);
    root.append(this.picture);
    this.picture.addEventListener("keydown", (event) => this.#key(event));
    this.picture.addEventListener("click", (event) => {
      if (!event.target.closest("[data-key]")) this.select(null);
    });
    new ResizeObserver(() => this.model && this.draw(this.model)).observe(root);
  }

  select(id) {
    this.selected = this.selected === id ? null : id;
    this.draw(this.model);
    this.onSelect(this.selected);
  }

  draw(model) {
    this.model = model;
    const width = Math.max(300, this.root.clientWidth);
    const places = this.#places(model, width);
    if (this.selected && !places.has(this.selected)) this.selected = null;
    const links = this.#shown(model.links);
    const label = `${model.left.length} prefill and ${model.right.length} decode ends; arrow keys go from one to the next`;
    this.picture.setAttribute("aria-label", label);
    this.#drawCurves(links, places);
    this.#drawEnds([...model.left, ...model.right], places);
  }

  #shown(links) {
    const mine = this.selected;
    const found = mine ? links.filter((link) => link.from === mine || link.to === mine) : links;
    return [...found].sort((a, b) => (b.rate || 0) - (a.rate || 0)).slice(0, mine ? undefined : MAX_CURVES);
  }

  // Where each end is drawn: in columns of at most so many that the picture stays about as high as wide.
  #places(model, width) {
    const most = Math.max(model.left.length, model.right.length, 1);
    this.roomy = most <= ROOMY;
    const gap = this.roomy ? 16 : 4, height = this.roomy ? 48 : 22;
    const narrow = width < 560;
    const columns = this.roomy || narrow ? 1 : Math.min(3, Math.ceil(most / 16));
    const share = this.roomy ? (narrow ? 0.4 : 0.3) : narrow ? 0.36 : [0, 0.2, 0.3, 0.42][columns];
    const end = Math.min(230, (width * share) / columns - gap);
    const rows = Math.ceil(most / columns);
    const total = rows * (height + gap) + gap;
    this.picture.setAttribute("viewBox", `0 0 ${width} ${total}`);
    this.picture.setAttribute("width", width);
    this.picture.setAttribute("height", total);
    const places = new Map();
    const put = (ends, side) => {
      const used = Math.min(columns, Math.ceil(ends.length / rows)) || 1;
      const filled = Math.ceil(ends.length / used);
      const top = (total - filled * (height + gap) + gap) / 2;
      ends.forEach((one, index) => {
        const column = Math.floor(index / filled), row = index % filled;
        const inward = side === "left" ? column : used - 1 - column;
        const x = side === "left" ? 1 + inward * (end + gap) : width - 1 - end - (used - 1 - column) * (end + gap);
        const y = top + row * (height + gap);
        const edge = side === "left" ? 1 + used * (end + gap) - gap : width - 1 - used * (end + gap) + gap;
        places.set(one.id, {x, y, width: end, height, side, edge, middle: y + height / 2 + (column - (used - 1) / 2) * 4});
      });
    };
    put(model.left, "left");
    put(model.right, "right");
    return places;
  }

  #drawCurves(links, places) {
    const fastest = Math.max(...links.map((link) => link.rate || 0), 1);
    const moving = links.length <= MAX_MOVING, widest = moving ? 6 : 2.2;
    const drawn = links.filter((link) => places.has(link.from) && places.has(link.to)).map((link) => {
      const [a, b] = [places.get(link.from), places.get(link.to)];
      const bend = (b.edge - a.edge) * 0.5;
      const path = `M${a.edge} ${a.middle}C${a.edge + bend} ${a.middle} ${b.edge - bend} ${b.middle} ${b.edge} ${b.middle}`;
      return {...link, path, a, b, weight: Math.sqrt((link.rate || 0) / fastest)};
    });
    const items = drawn.reverse(); // the fastest on top
    keyed(this.curves, items, {
      key: (link) => `${link.from} ${link.to}`,
      make: () => svg("path", {fill: "none"}),
      update: (path, link) => {
        path.setAttribute("d", link.path);
        path.setAttribute("stroke-width", (link.rate ? 1 + widest * link.weight : 1).toFixed(2));
        path.setAttribute("class", link.rate ? (moving ? "flows moving" : "flows") : "idle");
        path.setAttribute("opacity", link.rate ? (moving ? 0.9 : 0.08 + 0.5 * link.weight ** 2).toFixed(2) : 0.5);
      },
    });
    const told = this.roomy && links.length <= 16 && drawn.length ? drawn : [];
    keyed(this.labels, told, {
      key: (link) => `${link.from} ${link.to}`,
      make: () => svg("text", {"text-anchor": "middle", "dominant-baseline": "middle"}),
      update: (label, link) => {
        const t = this.#labelAt(link), mid = 3 * t * t - 2 * t * t * t;
        label.setAttribute("x", link.a.edge + (link.b.edge - link.a.edge) * t);
        label.setAttribute("y", link.a.middle + (link.b.middle - link.a.middle) * mid - 12);
        text(label, rate(link.rate));
      },
    });
  }

  // Labels of links between the same two columns stand side by side, not on each other.
  #labelAt(link) {
    const {left, right} = this.model;
    if (left.length < 2 || right.length < 2) return 0.5;
    const row = left.findIndex((one) => one.id === link.from);
    return 0.28 + (0.44 * (row + 0.5)) / left.length;
  }

  #drawEnds(ends, places) {
    const ids = ends.map((end) => end.id);
    if (!ids.includes(this.active)) this.active = ids[0];
    const linked = new Set(this.selected ? this.#shown(this.model.links).flatMap((link) => [link.from, link.to]) : ids);
    if (this.selected) linked.add(this.selected);
    keyed(this.ends, ends, {
      key: (end) => end.id,
      still: true,
      make: (end) => this.#makeEnd(end),
      update: (group, end) => this.#updateEnd(group, end, places.get(end.id), linked),
    });
  }

  #makeEnd(end) {
    return svg("g", {role: "button", tabindex: -1, onclick: () => { this.active = end.id; this.select(end.id); }},
      svg("title"), svg("rect", {class: "box", rx: 6}), svg("rect", {class: "full", rx: 2, height: 3}),
      svg("circle", {class: "dot", r: 4}), svg("text", {class: "name"}), svg("text", {class: "sub"}));
  }

  #updateEnd(group, end, place, linked) {
    const [title, box, full, dot, name, sub] = group.children;
    group.setAttribute("transform", `translate(${place.x} ${place.y})`);
    group.setAttribute("tabindex", end.id === this.active ? 0 : -1);
    group.setAttribute("aria-pressed", String(end.id === this.selected));
    group.setAttribute("class", ["end", place.side, end.ok ? "ok" : "bad", end.here && "here", !linked.has(end.id) && "dim"].filter(Boolean).join(" "));
    const used = end.full == null ? "" : `, ${Math.round(end.full * 100)} % of its fullest pool in use`;
    const rooms = end.rooms == null ? "" : `, ${plural(end.rooms, "room")}`;
    const spoken = `${end.name}: ${end.ok ? "ready" : end.note || "not ready"}, ${end.does || `${place.side === "left" ? "sends" : "receives"} ${rate(end.rate)}`}${rooms}${used}`;
    if (group.getAttribute("aria-label") !== spoken) { group.setAttribute("aria-label", spoken); text(title, spoken); }
    box.setAttribute("width", place.width);
    box.setAttribute("height", place.height);
    const two = this.roomy, letter = two ? 7.8 : 7.2;
    dot.setAttribute("cx", 11);
    dot.setAttribute("cy", two ? 17 : place.height / 2);
    name.setAttribute("x", 20);
    name.setAttribute("y", two ? 21 : place.height / 2 + 4);
    const speed = end.rate == null ? "" : rate(end.rate);
    const fits = two || place.width > 30 + letter * (end.brief || end.name).length + 6.4 * speed.length;
    const most = Math.floor((place.width - 26) / letter);
    text(name, cut(end.brief || end.name, most));
    sub.setAttribute("x", two ? 20 : place.width - 6);
    sub.setAttribute("y", two ? 37 : place.height / 2 + 4);
    sub.setAttribute("text-anchor", two ? "start" : "end");
    const detail = end.rooms == null || place.width < 170 ? "" : ` · ${plural(end.rooms, "room")}`;
    text(sub, fits ? (two ? (end.ok ? end.does || `${speed || "measuring"}${detail}` : cut(end.note || "not ready", most + 3)) : speed) : "");
    full.setAttribute("x", two ? 8 : 2);
    full.setAttribute("y", place.height - (two ? 6 : 3));
    full.setAttribute("width", Math.max(0, (end.full || 0) * (place.width - (two ? 16 : 4))));
  }

  #key(event) {
    const at = event.target.closest("[data-key]");
    if (!at) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.select(at.dataset.key);
      return;
    }
    if (event.key === "Escape" && this.selected) { this.select(null); return; }
    const {left, right} = this.model;
    const side = left.some((end) => end.id === at.dataset.key) ? left : right;
    const index = side.findIndex((end) => end.id === at.dataset.key);
    const to = {
      ArrowDown: side[index + 1], ArrowUp: side[index - 1], Home: side[0], End: side[side.length - 1],
      ArrowRight: side === left ? right[Math.min(index, right.length - 1)] : null,
      ArrowLeft: side === right ? left[Math.min(index, left.length - 1)] : null,
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.active = to.id;
    this.draw(this.model);
    [...this.ends.children].find((end) => end.dataset.key === to.id).focus();
  }
}

const cut = (words, most) => (words.length > most ? `${words.slice(0, most - 1)}…` : words);
