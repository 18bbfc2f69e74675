// The page: asks the daemon and draws what it says. Everything that is shown comes in by `show(document)`.

import {age, count, el, keyed, plural, Rates, svg, text} from "./format.js";
import {drawPools, drawPrefixes} from "./pools.js";
import {NodeRoomDialog, PairRoomDialog, RoomList} from "./rooms.js";
import {listen, Unauthorized} from "./poll.js";
import {bootstrapModel, fleetPools, nodeModel, readable, remarks, routerModel, selectedEnd} from "./model.js";
import {Topology} from "./topology.js";

const $ = (id) => document.getElementById(id);
const TOKEN = "kvbridge.token";
const rates = new Rates();
const history = new Map(); // of each tile that has a curve: its values of the last two minutes
const token = () => sessionStorage.getItem(TOKEN) || "";

let shown = null, model = null, roomDialog = null;
const topology = new Topology($("topology"), () => drawSelected());
const roomList = new RoomList($("phases"), $("rooms"), (room, generation) => roomDialog.open(room, generation));

function show(found) {
  const incarnation = shown && shown.status.incarnation;
  if (incarnation !== found.status.incarnation) rates.samples.clear();
  shown = readable(found);
  const fleet = Boolean(shown.instances), router = Boolean(shown.status.servers);
  document.body.classList.toggle("fleet", fleet);
  document.body.classList.toggle("router", router);
  if (!router) roomDialog ||= fleet ? new PairRoomDialog($("room"), token) : new NodeRoomDialog($("room"), token, (peer) => shown.names[peer] || peer);
  model = router ? routerModel(shown) : fleet ? bootstrapModel(shown, rates) : nodeModel(shown, rates);
  drawHead();
  drawTiles(model.tiles);
  topology.draw(model);
  text($("topology-title"), router ? "Servers" : "Transfers");
  text($("topology-note"), model.note);
  drawSelected();
  drawProblems(fleet ? model.problems : shown.status.problems);
  if (router) return;
  if (fleet) {
    const pools = fleetPools(shown);
    drawPools($("pools"), pools, Object.fromEntries(Object.entries(pools).map(([name, {available}]) => [name, available])));
  } else {
    drawPools($("pools"), shown.status.pools, shown.status.available_pages);
  }
  drawPrefixes($("prefixes"), shown.status);
  drawQuarantine(shown.status);
  drawRooms(fleet);
}

function drawHead() {
  const {status} = shown, title = {bootstrap: "Bootstrap", router: "Router"}[status.role];
  const name = title || `${status.instance} / ${status.node}`;
  text($("name"), name);
  const heading = `${name}${status.ready.ready ? "" : " (not ready)"} · kvbridge`;
  if (document.title !== heading) document.title = heading;
  const facts = [...about(status), `kvbridge ${status.version}`, `up ${age(status.at - status.started_at)}`];
  text($("about"), facts.join(" · "));
  const pill = $("readiness"), {ready} = status.ready, reasons = [...status.ready.reasons, ...remarks(shown)];
  pill.hidden = false;
  pill.className = `pill ${ready ? (reasons.length ? "warn" : "good") : "bad"}`;
  const bare = status.engines && !status.engines.some((engine) => !engine.gone);
  text(pill, ready ? (bare ? "Ready, no engine" : reasons.length ? "Ready, with remarks" : "Ready") : "Not ready");
  $("notice").hidden = reasons.length === 0;
  text($("notice"), reasons.join(" · "));
}

function about(status) {
  if (status.role === "router") return [`${status.order} order`];
  if (status.role === "bootstrap") return [`directory in ${status.store.kind}`];
  const {name, identity} = status.model, engines = status.engines.filter((engine) => !engine.gone);
  const named = engines.length === 1 ? `engine of process ${engines[0].pid || "?"}` : engines.length ? `${count(engines.length)} engines` : "no engine";
  return [status.role, identity ? `${identity.name} ${identity.revision}` : name, named, plural(status.ranks.length, "rank")];
}

function drawTiles(tiles) {
  keyed($("tiles"), tiles, {
    key: (tile) => tile.name,
    make: (tile) => el("div", {class: "tile"}, el("p", {class: "quiet"}, tile.name), el("p", {class: "value"}), el("p", {class: "quiet more"}),
      "curve" in tile && svg("svg", {class: "spark", viewBox: "0 0 60 20", preserveAspectRatio: "none", "aria-hidden": "true"}, svg("path"), svg("path"))),
    update: (box, tile) => {
      box.className = `tile ${tile.tone || ""}`;
      text(box.children[1], tile.value);
      text(box.children[2], tile.more || "");
      if ("curve" in tile) drawSpark(box.lastElementChild, tile);
    },
  });
}

function drawSpark(picture, tile) {
  const values = history.get(tile.name) || [];
  values.push(tile.curve || 0);
  if (values.length > 61) values.shift();
  history.set(tile.name, values);
  const most = Math.max(...values, 1e-9), step = 60 / (Math.max(values.length, 12) - 1);
  const points = values.map((value, index) => `${(60 - (values.length - 1 - index) * step).toFixed(1)} ${(19 - (17 * value) / most).toFixed(1)}`);
  picture.children[0].setAttribute("class", "area");
  picture.children[0].setAttribute("d", `M${points[0].split(" ")[0]} 20L${points.join("L")}V20Z`);
  picture.children[1].setAttribute("class", "line");
  picture.children[1].setAttribute("d", `M${points.join("L")}`);
}

function drawSelected() {
  const box = $("selected");
  const found = topology.selected && selectedEnd(shown, model, topology.selected);
  box.hidden = !found;
  if (!found) return;
  const key = JSON.stringify(found);
  if (box.dataset.shown === key) return;
  box.dataset.shown = key;
  box.replaceChildren(
    el("h3", {}, found.name),
    found.problem && el("p", {class: "notice"}, found.problem) || "",
    el("dl", {class: "facts"}, ...found.facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    found.pages.length ? el("p", {}, "Its own page: ", ...found.pages.flatMap(([name, url]) => [el("a", {href: url}, name), " "])) : "",
    found.links.length ? el("ul", {class: "links"}, ...found.links.map((link) => el("li", {}, el("span", {}, link.name), el("b", {}, link.rate)))) : "");
}

// Which pages nobody may use, for whom, why, and what frees them.
function drawQuarantine({quarantine = {}, fence}) {
  const found = Object.entries(quarantine), rooms = found.reduce((sum, [, owners]) => sum + owners.length, 0), box = $("quarantine");
  box.hidden = !rooms;
  if (!rooms) return;
  const waits = fence && fence.phase !== "idle" ? `Writers are being shut out (${fence.phase})${fence.waits_for_ranks.length ? `, waiting for ${fence.waits_for_ranks.join(", ")}` : ""}. ` : "";
  const lines = [`Pages of ${plural(rooms, "room")} are quarantined: nobody may use them, because something may still write or read there.`,
    ...found.map(([reason, owners]) => `${owners.length > 1 ? `${count(owners.length)} rooms, such as ` : ""}${reason.startsWith(owners[0]) ? "" : `${owners[0]}: `}${reason}`),
    `${waits}They are free by themselves as soon as the other side has stopped or its process has ended. If it hangs, end it: its page, or kvbridge status there, names the process.`];
  keyed(box, lines, {key: (line) => line, make: (line) => el("p", {}, line), update: () => {}});
}

function drawRooms(fleet) {
  if (!fleet) {
    roomList.draw({counts: shown.status.rooms, rooms: shown.rooms, peers: shown.names});
    return;
  }
  keyed($("phases"), Object.entries(model.roomCounts), {
    key: ([name]) => name,
    make: ([name]) => el("p", {class: `phase ${name}`}, el("span", {class: "amount"}), el("span", {class: "word"}, name)),
    update: (box, [, value]) => text(box.firstElementChild, count(value)),
  });
  if (!$("rooms").firstElementChild.matches(".hint")) {
    $("rooms").replaceChildren(el("p", {class: "hint quiet"}, "Each room lives on its two nodes: open one by its id, or a node's own page by its instance."));
  }
}

function drawProblems(problems) {
  const items = problems.map((problem, index) => ({...problem, key: `${problem.what} ${problem.first_at || problem.whom} ${index}`})).reverse();
  text($("problems-note"), `of the last 15 minutes${items.length ? "" : ": none"}`);
  keyed($("problems"), items, {
    key: (item) => item.key,
    make: (item) => el("li", {}, el("p", {}, el("b", {}), " ", el("code"), el("span", {class: "when quiet"})), el("p", {class: "reason"})),
    update: (row, item) => {
      const [what, whom, when] = row.firstElementChild.children, many = item.count > 1;
      text(what, many ? `${count(item.count)} × ${item.what}` : item.what);
      text(whom, item.whom ? (many ? `last ${item.whom}` : item.whom) : "");
      text(when, item.ago_s == null ? "now" : `${age(item.ago_s)} ago${many && item.for_s >= 1 ? `, first ${age(item.ago_s + item.for_s)} ago` : ""}`);
      text(row.lastElementChild, item.reason);
    },
  });
}

function connected(words, live, why) {
  const place = $("connection");
  place.className = `live ${live ? "on" : "off"}`;
  text(place, words);
  place.title = why || "";
  document.body.classList.toggle("stale", !live);
}

function askToken(again) {
  if (again) text($("token-why"), "The daemon does not take that token. It is one of http.token or http.token_file in its configuration.");
  const dialog = $("token");
  dialog.showModal();
  return new Promise((given) => dialog.addEventListener("close", () => given($("token-value").value.trim()), {once: true}));
}

async function run() {
  let refused = false;
  for (;;) {
    while (document.documentElement.dataset.token === "required" && !token()) {
      connected("waiting for a token", false);
      sessionStorage.setItem(TOKEN, await askToken(refused));
      $("token-value").value = "";
    }
    try {
      await listen(token(), show, connected);
    } catch (error) {
      if (!(error instanceof Unauthorized)) throw error;
      sessionStorage.removeItem(TOKEN);
      document.documentElement.dataset.token = "required";
      refused = true;
    }
  }
}

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("find-room").value.trim();
  if (/^\d{1,16}$/.test(id) && roomDialog) roomDialog.open(Number(id));
  else $("find-room").focus();
});

run();
