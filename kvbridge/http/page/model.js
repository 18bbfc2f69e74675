// From what a daemon says to what is drawn: ends, links with their rates, tiles. Makes no elements.

import {age, bytes, count, plural, rate} from "./format.js";

const sum = (values) => values.reduce((total, value) => total + value, 0);
const known = (values) => values.filter((value) => value !== undefined);
const total = (values) => (known(values).length ? sum(known(values)) : undefined);

function fullestName(available, all) {
  const used = (space) => 1 - (available[space] || 0) / all[space];
  return Object.keys(all).filter((space) => all[space]).sort((a, b) => used(b) - used(a))[0] || "";
}

function fullest(available, all) {
  const shares = Object.keys(all).filter((space) => all[space]).map((space) => 1 - (available[space] || 0) / all[space]);
  return shares.length ? Math.max(...shares) : null;
}

const NOTHING = {sent_bytes: 0, received_bytes: 0, rooms_completed: 0, rooms_failed: 0};

const LATELY = "in 15 min";
const ENDED = ["completed", "failed", "aborted"];

// The peers of a node by incarnation, with what went to and from each.
function peersOf({role, peers, traffic}) {
  return Object.fromEntries(peers.map((peer) => {
    const unanswered = role === "decode" && !peer.incarnation, connecting = peer.connecting || [];
    const name = role === "prefill" ? `${peer.instance}/${peer.node}` : peer.node || peer.endpoint;
    const problem = unanswered ? "it has not answered yet" : connecting.length ? `not connected yet: ${connecting.join(", ")}` : "";
    return [peer.incarnation || peer.endpoint, {name, problem, ...(traffic[peer.incarnation] || NOTHING)}];
  }));
}

const byName = (list, name) => Object.fromEntries(list.map((one) => [one[name], one]));

// What came from the daemon, with what the page looks up by name, and ages in place of moments.
export function readable({status: said, rooms, ...sums}) {
  const since = (at) => Math.max(0, said.at - at);
  const problems = said.problems.map((problem) => ({...problem, ago_s: since(problem.at), for_s: problem.at - problem.first_at}));
  const status = {...said, problems};
  if (status.servers) return {status};
  if (status.instances) {
    const instances = status.instances.map((instance) => ({...instance, nodes: byName(instance.nodes, "node")}));
    return {status: {...status, lost: status.lost.map((node) => ({...node, ago_s: since(node.at)}))}, instances: byName(instances, "instance")};
  }
  const aged = rooms.map((room) => ({...room, age_s: since(room.admitted_at), in_state_s: since(room.entered_at)}));
  const peers = peersOf(status);
  const names = Object.fromEntries([...Object.entries(status.traffic), ...Object.entries(peers)].map(([key, peer]) => [key, peer.name])); // also of peers that are gone
  return {status, rooms: aged, peers, names, ...sums};
}

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part !== whole ? 1 : 0)} %` : "–");

// What a node's colour depends on besides its readiness: remarks of the page, each true now.
export function remarks({status}) {
  if (status.instances || status.servers) return [];
  const found = [], attached = status.engines.filter((engine) => !engine.gone);
  const served = new Set(attached.flatMap((engine) => engine.ranks)), bare = status.ranks.filter(({rank}) => !served.has(rank));
  if (bare.length) found.push(`${attached.length ? `no engine is attached to ${bare.map(({rank}) => rank).join(", ")}` : "no engine is attached"}: rooms wait for one until they expire`);
  const {full = 0, timed_out: late = 0, unreachable = 0} = status.store?.objects.put || {};
  if (full) found.push(`the store (tier.store) is full: ${plural(full, "page")} could not be written since the start; free its disk or lower max_bytes`);
  if (late + unreachable) found.push(`the store (tier.store) did not take ${plural(late + unreachable, "page")} since the start`);
  if (status.store?.why_not) found.push(`the store (tier.store) takes no orders: ${status.store.why_not}`);
  return found;
}

// One node: itself on its own side, its peers on the other.
export function nodeModel({status, peers, rooms, ended, ended_lately: lately, moved_bytes: moved}, rates) {
  const nowS = status.at;
  const sends = status.role === "prefill";
  const own = `${status.instance}/${status.node}`;
  const ends = [], links = [];
  for (const [key, peer] of Object.entries(peers)) {
    rates.add(key, nowS, sends ? peer.sent_bytes : peer.received_bytes);
    const perSecond = rates.of(key);
    ends.push({id: key, name: peer.name, ok: !peer.problem, note: peer.problem, rate: perSecond, rooms: null, full: null});
    links.push({from: sends ? own : key, to: sends ? key : own, rate: perSecond});
  }
  const of = (name) => name.split("/")[0], alone = (name) => ends.filter((end) => of(end.name) === of(name)).length < 2;
  for (const end of ends) if (alone(end.name)) end.brief = of(end.name);
  ends.sort((a, b) => a.name.localeCompare(b.name, "en", {numeric: true}));
  const all = Object.fromEntries(Object.entries(status.pools).map(([space, states]) => [space, sum(Object.values(states))]));
  const open = rooms.filter((room) => !ENDED.includes(room.state));
  const openCount = sum(Object.entries(status.rooms).filter(([state]) => !ENDED.includes(state)).map(([, n]) => n));
  const flow = links.length ? total(links.map((link) => link.rate)) : 0;
  const full = fullest(status.available_pages, all);
  const me = {id: own, name: own, brief: status.instance, ok: status.ready.ready, note: status.ready.reasons[0], rate: flow, rooms: openCount, full, here: true};
  const {completed = 0, failed = 0} = ended, failedLately = lately.failed || 0, overLately = sum(Object.values(lately));
  rates.add("completed", nowS, completed);
  const perSecond = rates.of("completed");
  const oldest = open.length ? Math.max(...open.map((room) => room.age_s)) : null;
  const {waiting, oldest_since: since} = status.admission;
  const none = Object.keys(status.traffic).length ? "no peer is connected now" : "no peer yet: the first room brings one";
  return {
    left: sends ? [me] : ends, right: sends ? ends : [me], links,
    note: ends.length ? `${plural(ends.length, `${sends ? "decode" : "prefill"} node`)}, rates of the last seconds` : none,
    tiles: [
      {name: sends ? "Sending" : "Receiving", value: rate(flow), curve: flow, more: `${bytes(moved)} since the start`},
      {name: "Rooms completed", value: perSecond === undefined ? "–" : `${perSecond < 10 ? perSecond.toFixed(1) : Math.round(perSecond)} /s`, curve: perSecond, more: `${count(completed)} since the start`},
      {name: "Rooms open", value: count(openCount), curve: openCount, more: oldest === null ? "" : `oldest ${age(oldest)}`},
      {name: "Rooms failed", value: count(failedLately), tone: failedLately ? "alarm" : "", more: `${share(failedLately, overLately)} of ${count(overLately)} ${LATELY}; ${count(failed)} since the start`},
      {name: "Waiting for pages", value: count(waiting), tone: waiting ? "warn" : "", more: waiting ? `longest ${age(status.at - since)}` : "no request"},
      {name: "Fullest pool", value: full === null ? "–" : `${Math.round(100 * full)} %`, tone: full > 0.95 ? "warn" : "", more: fullestName(status.available_pages, all)},
    ],
  };
}

// Bootstrap: every instance. Only senders tell what went over a link, so it is counted once.
export function bootstrapModel({status, instances}, rates) {
  const links = new Map(), ends = {prefill: [], decode: []};
  const inward = new Map(), outward = new Map();
  const list = Object.entries(instances).sort(([a], [b]) => a.localeCompare(b, "en", {numeric: true}));
  for (const [name, instance] of list) {
    for (const [nodeName, node] of Object.entries(instance.nodes)) {
      for (const [to, sent] of Object.entries(node.load.sent_bytes || {})) {
        const key = `${name}/${nodeName} ${to}`;
        rates.add(key, status.at - node.silent_s, sent);
        const speed = rates.of(key), link = `${name} ${to}`;
        const former = links.get(link) || {from: name, to, rate: undefined};
        if (speed !== undefined) former.rate = (former.rate || 0) + speed;
        links.set(link, former);
      }
    }
  }
  for (const link of links.values()) {
    if (link.rate === undefined) continue;
    outward.set(link.from, (outward.get(link.from) || 0) + link.rate);
    inward.set(link.to, (inward.get(link.to) || 0) + link.rate);
  }
  for (const [name, instance] of list) {
    const nodes = Object.values(instance.nodes);
    const shares = nodes.map((node) => fullest(node.load.available_pages, node.load.total_pages)).filter((share) => share !== null);
    ends[instance.role].push({
      id: name, name, ok: instance.ready, note: instance.reasons[0], rooms: Math.max(...nodes.map((node) => node.load.rooms)),
      rate: (instance.role === "prefill" ? outward : inward).get(name) ?? 0, full: shares.length ? Math.max(...shares) : null,
    });
  }
  for (const node of status.lost) {
    if (instances[node.instance] || ends[node.role].some((end) => end.id === node.instance)) continue;
    ends[node.role].push({id: node.instance, name: node.instance, ok: false, note: `gone for ${age(node.ago_s)}: ${node.reason}`, rooms: null, rate: 0, full: null, gone: true});
  }
  const all = [...ends.prefill, ...ends.decode], bad = all.filter((end) => !end.ok && !end.gone);
  const {paired = 0, cancelled = 0, ...codes} = status.requests, refused = sum(Object.values(codes));
  const drawn = [...links.values()].filter((link) => instances[link.to]);
  const flow = total(drawn.map((link) => link.rate)) ?? 0;
  const fullestEnd = all.filter((end) => end.full !== null).sort((a, b) => b.full - a.full)[0];
  const open = sum(ends.decode.map((end) => end.rooms));
  const silent = Object.values(instances).flatMap((instance) => Object.values(instance.nodes)).map((node) => node.silent_s);
  const oldest = silent.length ? Math.max(...silent, 0) : null;
  return {
    left: ends.prefill, right: ends.decode, links: drawn,
    note: all.length ? "as the sending nodes say; rates of the last heartbeats" : "no instance has registered yet",
    problems: [...status.problems, ...status.lost.filter((node) => node.reason.startsWith("it has taken")).map((node) => ({what: "node left", whom: `${node.instance}/${node.node}`, reason: node.reason, ago_s: node.ago_s})),
      ...bad.flatMap((end) => instances[end.id].reasons.map((reason) => ({what: "not ready", whom: end.name, reason})))],
    roomCounts: {"being paired": status.rooms.pairing || 0, "paired and remembered": status.rooms.paired || 0, "cancelled, or not reserved": status.rooms.cancelled || 0},
    tiles: [
      {name: "Between instances", value: rate(flow), curve: flow, more: `over ${plural(drawn.filter((link) => link.rate).length, "link")}`},
      {name: "Prefill ready", value: `${count(ends.prefill.filter((end) => end.ok).length)} of ${count(ends.prefill.length)}`, tone: tone(ends.prefill), more: "instances"},
      {name: "Decode ready", value: `${count(ends.decode.filter((end) => end.ok).length)} of ${count(ends.decode.length)}`, tone: tone(ends.decode), more: "instances"},
      {name: "Rooms open", value: count(open), curve: open, more: "on decode instances"},
      {name: "Fullest pool", value: fullestEnd ? `${Math.round(100 * fullestEnd.full)} %` : "–", tone: fullestEnd && fullestEnd.full > 0.95 ? "warn" : "", more: fullestEnd ? fullestEnd.name : ""},
      {name: "Requests refused", value: share(refused, refused + paired), tone: refused ? (refused > paired ? "alarm" : "warn") : "", more: `${LATELY}: ${count(refused)} refused, ${count(paired)} paired${refused ? `; ${Object.entries(codes).sort(([, a], [, b]) => b - a).slice(0, 2).map(([code, n]) => `${count(n)} ${code}`).join(", ")}` : ""}`},
      {name: "Longest silence", value: oldest === null ? "–" : age(oldest), more: "since a heartbeat"},
    ],
  };
}

const tone = (ends) => (ends.every((end) => end.ok) ? (ends.length ? "" : "alarm") : ends.some((end) => end.ok) ? "warn" : "alarm");

// Pages of all instances of each role together; only available ones are told apart there.
export function fleetPools({instances}) {
  const pools = {};
  for (const instance of Object.values(instances)) {
    for (const {load} of Object.values(instance.nodes)) {
      for (const [space, pages] of Object.entries(load.total_pages)) {
        const pool = (pools[`${instance.role}: ${space}`] ||= {used: 0, available: 0});
        pool.available += load.available_pages[space] || 0;
        pool.used += pages - (load.available_pages[space] || 0);
      }
    }
  }
  return Object.fromEntries(Object.entries(pools).sort(([a], [b]) => b.split(":")[0].localeCompare(a.split(":")[0])));
}

// What is said of the end that somebody has selected.
export function selectedEnd(shown, model, id) {
  const end = [...model.left, ...model.right].find((one) => one.id === id);
  if (!end) return null;
  const names = new Map([...model.left, ...model.right].map((one) => [one.id, one.name]));
  const links = model.links.filter((link) => link.from === id || link.to === id)
    .sort((a, b) => (b.rate || 0) - (a.rate || 0))
    .map((link) => ({name: link.from === id ? `to ${names.get(link.to)}` : `from ${names.get(link.from)}`, rate: rate(link.rate)}));
  const instance = shown.instances && shown.instances[id];
  const peer = shown.peers && shown.peers[id];
  const facts = end.server || end.gone ? [] : [["Rate", rate(end.rate)]];
  if (end.server) facts.push(["Role", end.server.role], ["Requests", count(end.server.outstanding)], ["Prompt tokens of these", `about ${count(end.server.load_tokens)}`], ["Order", end.server.paired ? "both servers at once" : "prefill first"]);
  const pages = [];
  if (instance) {
    const nodes = Object.entries(instance.nodes);
    facts.push(["Model", instance.model], ["Ranks", `${count(sum(nodes.map(([, node]) => node.ranks.length)))} of ${count(instance.pp_size * instance.tp_size)} (${plural(instance.pp_size, "stage")} × ${instance.tp_size})`],
      ["Rooms", count(end.rooms)]);
    for (const [name, node] of nodes) {
      const available = Object.entries(node.load.total_pages).map(([space, pool]) => `${count(node.load.available_pages[space] || 0)} of ${count(pool)} ${space}`);
      facts.push([name, `available pages: ${available.join(", ") || "none"}`]);
      pages.push([name, node.http_url]);
    }
  }
  if (peer) facts.push(["Sent", bytes(peer.sent_bytes)], ["Received", bytes(peer.received_bytes)], ["Rooms", `${count(peer.rooms_completed)} completed, ${count(peer.rooms_failed)} failed`]);
  return {name: end.name, problem: end.ok ? "" : end.note || "not ready", facts, links, pages};
}

// A router: its prefill and decode servers.
export function routerModel({status}) {
  const ends = {prefill: [], decode: []};
  for (const server of status.servers) {
    ends[server.role].push({id: `${server.role} ${server.url}`, name: server.url.replace(/^https?:\/\//, ""), ok: !server.problem, note: server.problem, does: plural(server.outstanding, "request"), rooms: null, rate: null, full: null, server});
  }
  const {answered = 0, refused = 0, client_left: left = 0, ...bad} = status.requests, failed = sum(Object.values(bad)), all = answered + refused + left + failed;
  const tile = (name, list) => ({name, value: `${count(list.filter((end) => end.ok).length)} of ${count(list.length)}`, tone: tone(list), more: "servers that are well"});
  return {
    left: ends.prefill, right: ends.decode, links: [], note: status.directory_problem ? `the directory does not answer: ${status.directory_problem}` : `requests go in ${status.order} order; each server with its requests under way`,
    tiles: [
      {name: "Under way", value: count(status.outstanding), curve: status.outstanding, tone: status.outstanding >= status.limit ? "alarm" : "", more: `at most ${count(status.limit)} (limit)`},
      {name: "Requests answered", value: count(answered), more: `${LATELY}, of ${count(all)} that ended`},
      {name: "Requests failed", value: count(failed), tone: failed ? "alarm" : "", more: `${LATELY}${failed ? `: ${Object.entries(bad).map(([word, n]) => `${count(n)} ${word.replaceAll("_", " ")}`).join(", ")}` : ""}`},
      {name: "Refused by a server", value: count(refused), more: `${LATELY}; the client's request was wrong`},
      tile("Prefill", ends.prefill), tile("Decode", ends.decode),
    ],
  };
}
