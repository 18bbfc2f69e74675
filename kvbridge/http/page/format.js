// Numbers, ages and rates as people read them, and the making of elements.

const NUMBER = new Intl.NumberFormat("en");

export const count = (value) => NUMBER.format(value);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const rate = (perSecond) => (perSecond == null ? "–" : `${bytes(perSecond)}/s`);

export function age(seconds) {
  if (seconds < 0) seconds = 0;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

// A moment to the millisecond.
export const moment = (seconds) => (seconds < 60 ? `${seconds.toFixed(3)} s` : `${Math.floor(seconds / 60)} min ${(seconds % 60).toFixed(3)} s`);

export const short = (id) => (id.length > 14 ? `${id.slice(0, 12)}…` : id);

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Writes only what differs, so that nothing that is read or selected is disturbed.
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

// Makes the children of `parent` those of `items`, by key: `make(item)` once for a new one, `update(element, item)` each time.
// `still`: leave those that are there in their places, because somebody is at one of them.
export function keyed(parent, items, {key, make, update, still = false}) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = new Set(items.map(key));
  for (const [name, child] of there) if (!wanted.has(name)) child.remove();
  let after = null;
  for (const item of items) {
    const name = key(item);
    let child = there.get(name);
    if (!child) { child = make(item); child.dataset.key = name; }
    update(child, item);
    if (!child.parentNode || !still) {
      const place = after ? after.nextElementSibling : parent.firstElementChild;
      if (place !== child) parent.insertBefore(child, place);
    }
    after = child;
  }
}

// How fast counters grow, over the last seconds.
export class Rates {
  constructor(windowS = 8) { this.windowS = windowS; this.samples = new Map(); }

  add(key, atS, value) {
    let list = this.samples.get(key);
    const last = list && list[list.length - 1];
    if (!list || value < last[1]) this.samples.set(key, list = []); // another process counts from 0
    else if (last[0] >= atS) return;
    list.push([atS, value]);
    while (list.length > 2 && list[1][0] < atS - this.windowS) list.shift();
  }

  // Undefined before there are two samples.
  of(key) {
    const list = this.samples.get(key);
    if (!list || list.length < 2) return undefined;
    const [first, last] = [list[0], list[list.length - 1]];
    return (last[1] - first[1]) / (last[0] - first[0]);
  }

  keep(keys) { for (const key of this.samples.keys()) if (!keys.has(key)) this.samples.delete(key); }
}
