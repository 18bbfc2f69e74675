// Rooms by phase, open and slowest first, and what happened to one of them.

import {age, bytes, count, el, keyed, moment, short, svg, text} from "./format.js";
import {call} from "./poll.js";

export const PHASES = ["admitted", "offered", "transferring", "committed", "claimed", "aborting", "failed", "aborted", "completed"];
const FINAL = new Set(["failed", "aborted", "completed"]);

export class RoomList {
  constructor(phases, list, onOpen) {
    this.phases = phases;
    this.list = list;
    this.onOpen = onOpen;
    this.only = null;
    this.body = el("tbody");
    this.table = el("table", {class: "rooms"},
      el("caption", {class: "unseen"}, "Rooms, open and slowest first"),
      el("thead", {}, el("tr", {}, ...["Room", "Phase", "Age", "Since", "Waits for, or why it ended"].map((name) => el("th", {scope: "col"}, name)))),
      this.body);
    this.empty = el("p", {class: "empty"}, "No room yet.");
    this.scroll = el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Rooms, open and slowest first"}, this.table);
    list.append(this.scroll, this.empty);
  }

  // `counts`: all rooms by phase; `rooms`: those that are shown; `peers`: names by incarnation.
  draw({counts, rooms, peers}) {
    this.last = {counts, rooms, peers};
    const most = Math.max(...Object.values(counts), 1);
    const oldest = {};
    for (const room of rooms) oldest[room.state] = Math.max(oldest[room.state] || 0, room.in_state_s);
    keyed(this.phases, PHASES.filter((phase) => counts[phase] || !["aborting", "aborted"].includes(phase)), {
      key: (phase) => phase,
      make: (phase) => el("button", {type: "button", class: `phase ${phase}`, onclick: () => this.#filter(phase)},
        el("span", {class: "amount"}), el("span", {class: "word"}, phase), el("span", {class: "bar"}, el("i")), el("span", {class: "oldest"})),
      update: (button, phase) => {
        const [amount, , bar, old] = button.children;
        button.setAttribute("aria-pressed", String(this.only === phase));
        text(amount, count(counts[phase] || 0));
        bar.firstElementChild.style.setProperty("width", `${(100 * (counts[phase] || 0)) / most}%`);
        text(old, !FINAL.has(phase) && oldest[phase] ? `max ${age(oldest[phase])}` : "");
      },
    });
    const shown = rooms.filter((room) => !this.only || room.state === this.only).sort(order);
    this.empty.hidden = shown.length > 0;
    this.scroll.hidden = shown.length === 0;
    text(this.empty, this.only ? `No room is ${this.only} now.` : "No room yet.");
    keyed(this.body, shown, {
      key: (room) => `${room.room}:${room.generation}`,
      still: this.body.matches(":hover") || this.body.contains(document.activeElement),
      make: (room) => el("tr", {},
        el("th", {scope: "row"}, el("button", {type: "button", class: "open", onclick: () => this.onOpen(room.room, room.generation)}, String(room.room))),
        el("td", {}, el("span", {class: "state"})), el("td", {class: "figure"}), el("td", {class: "figure"}), el("td", {class: "why"})),
      update: (row, room) => {
        const [name, state, whole, phase, why] = row.children;
        if (room.generation > 1) text(name.firstElementChild, `${room.room} #${room.generation}`);
        row.className = room.state;
        state.firstElementChild.className = `state ${room.state}`;
        text(state.firstElementChild, room.state);
        const ended = FINAL.has(room.state);
        text(whole, age(ended ? room.age_s - room.in_state_s : room.age_s));
        text(phase, ended ? `${age(room.in_state_s)} ago` : age(room.in_state_s));
        const peer = room.peer && (peers[room.peer] || short(room.peer));
        text(why, room.reason || [room.waits_for || (ended ? "" : "the next step"), peer && !room.waits_for?.includes(peer) && `with ${peer}`].filter(Boolean).join(" · "));
      },
    });
  }

  #filter(phase) {
    this.only = this.only === phase ? null : phase;
    this.draw(this.last);
  }
}

function group(room) {
  if (room.state === "aborting") return 0;
  if (room.state === "failed") return 2;
  return {aborted: 3, completed: 4}[room.state] ?? 1;
}

// Rooms that are open first, aborting ones and then the slowest; of those that ended the failed ones and then the latest.
function order(a, b) {
  return group(a) - group(b) || (FINAL.has(a.state) ? a.in_state_s - b.in_state_s : b.age_s - a.age_s);
}

// What one room has been through, in a dialog that follows it to its end.
export class RoomDialog {
  // `token()` is the present one; `name(incarnation)` is what a peer is called.
  constructor(dialog, token, name) {
    this.name = name;
    this.dialog = dialog;
    this.title = dialog.querySelector("h2");
    this.body = dialog.querySelector("#room-body");
    this.token = token;
    dialog.addEventListener("close", () => clearTimeout(this.timer));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  open(room, generation) {
    this.shown = {room, generation};
    text(this.title, `Room ${room}`);
    this.body.replaceChildren(el("p", {class: "quiet"}, "asking the daemon"));
    if (!this.dialog.open) this.dialog.showModal();
    this.#ask(this.shown);
  }

  async #ask(asked) {
    clearTimeout(this.timer);
    let over = true, parts;
    try {
      ({over, parts} = await this.look(asked));
    } catch (error) {
      parts = [el("p", {class: "notice"}, error.message || "the daemon does not answer")];
    }
    if (this.shown !== asked || !this.dialog.open) return;
    this.body.replaceChildren(...parts);
    if (!over) this.timer = setTimeout(() => this.#ask(asked), 1000);
  }

  async get(path) { return (await call(path, this.token())).json(); }
}

// On a node: its report, and its timeline.
export class NodeRoomDialog extends RoomDialog {
  async look({room, generation}) {
    const which = generation ? `?generation=${generation}` : "";
    const timeline = await this.get(`v1/requests/${room}/timeline${which}`);
    const report = await this.get(`v1/requests/${room}`).catch(() => null);
    const current = report && report.generation === timeline.generation ? report : null;
    text(this.title, `Room ${room}${timeline.generation > 1 ? `, attempt ${timeline.generation}` : ""}`);
    const states = timeline.entries.filter((entry) => entry.state);
    const last = states[states.length - 1];
    return {over: FINAL.has(last.state), parts: [
      current && summary(current, timeline.age_s), gantt(states, timeline.age_s), el("h3", {}, "What happened"), entries(timeline.entries, this.name),
    ].filter(Boolean)};
  }
}

// On bootstrap: what both ends say.
export class PairRoomDialog extends RoomDialog {
  async look({room}) {
    const pair = await this.get(`v1/requests/${room}`);
    const ends = [...pair.prefill, ...pair.decode];
    return {over: FINAL.has(pair.state), parts: [
      el("p", {}, el("span", {class: `state ${pair.state}`}, pair.state), ` from ${pair.ticket.prefill.instance} to ${pair.ticket.decode.instance}`),
      ...ends.flatMap((end) => [
        el("h3", {}, el("a", {href: end.url}, end.url)),
        end.report ? summary(end.report, end.report.age_s) : el("p", {class: "notice"}, end.error || "it does not answer"),
      ]),
    ]};
  }
}

function summary(report, wholeS) {
  const moved = Object.values(report.amounts || {}).reduce((sum, amount) => sum + amount.bytes, 0);
  const facts = [
    ["Phase", el("span", {class: `state ${report.state}`}, report.state)],
    ["Prompt", `${count(report.prompt_tokens)} tokens${report.prefix_tokens ? `, ${count(report.prefix_tokens)} held before` : ""}`],
    ["Moved", bytes(moved)],
    Object.keys(report.pages).length > 0 && ["Pages", Object.entries(report.pages).map(([space, pages]) => `${count(pages)} ${space}`).join(", ")],
    report.client && ["Client", report.client],
    report.waits_for && ["Waits for", report.waits_for],
    report.quarantine && ["Quarantined", report.quarantine],
    report.expires_in_s != null && !FINAL.has(report.state) && ["Ends in", `${age(report.expires_in_s)} unless it goes on (${report.limit})`],
    !FINAL.has(report.state) && ["Age", age(wholeS)],
    report.reason && ["Why", `${report.reason} (${report.reason_code})`],
  ].filter(Boolean);
  return el("dl", {class: "facts"}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// How long the room was in each phase, to scale.
function gantt(states, wholeS) {
  const last = states[states.length - 1];
  const end = Math.max(FINAL.has(last.state) ? last.after_s : wholeS, 1e-6);
  const bars = states.filter((entry) => !FINAL.has(entry.state)).map((entry, index) => {
    const stop = states[index + 1] ? states[index + 1].after_s : end;
    return {state: entry.state, from: entry.after_s, tookS: stop - entry.after_s};
  });
  const words = bars.map((bar) => `${bar.state} ${age(bar.tookS)}`);
  const picture = svg("svg", {viewBox: "0 0 1000 22", preserveAspectRatio: "none", height: 22, role: "img", "aria-label": `Time in each phase: ${words.join(", ")}`},
    ...bars.map((bar) => svg("rect", {class: bar.state, x: (1000 * bar.from) / end, width: Math.max(2, (1000 * bar.tookS) / end), height: 22})));
  return el("figure", {class: "gantt"}, picture,
    el("figcaption", {}, el("ul", {class: "legend"}, ...bars.map((bar, index) => el("li", {class: bar.state}, el("span", {}, words[index]))))));
}

function entries(list, nameOf) {
  const told = {}; // a detail is shown where it changes
  return el("ol", {class: "timeline"}, ...list.map((entry) => {
    const {reason, peer: other, ...details} = entry.details;
    const words = Object.entries(details).filter(([name, value]) => told[name] !== value).map(([name, value]) => `${name.replaceAll("_", " ")}: ${value}`);
    if (other && other !== told.peer) words.push(`with ${nameOf(other)}`);
    Object.assign(told, details, other && {peer: other});
    return el("li", {class: entry.state || "fact"},
      el("span", {class: "after"}, `+${moment(entry.after_s)}`),
      el("span", {class: "what"}, entry.what),
      reason && el("span", {class: "details why"}, reason),
      words.length > 0 && el("span", {class: "details"}, words.join(" · ")));
  }));
}
