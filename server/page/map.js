// SPDX-License-Identifier: Apache-2.0
// The map: tiers, sequences, layers and heads, the last steps; asked for twice a second while the
// page is seen.
import { at, call, context, make, setText, tellModel, tellState } from "./page.js";

const POLL_MS = 500;
const RETRY_MS = 2000;
const PERCENT = new Intl.NumberFormat("en", {
  style: "percent",
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});

const count = (n) => n.toLocaleString("en");

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; bytes >= 1024 && i + 1 < units.length; i++) bytes /= 1024;
  return `${i === 0 || bytes >= 100 ? Math.round(bytes) : bytes.toFixed(1)} ${units[i]}`;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Makes a list's children as many as items, and shows each item in its child.
function showList(list, items, create, show) {
  while (list.children.length > items.length) list.lastElementChild.remove();
  while (list.children.length < items.length) list.append(create());
  items.forEach((item, i) => show(list.children[i], item));
}

// ---- tiers and sequences --------------------------------------------------------------------

function makeTier() {
  const row = make("li", "tier");
  const bar = make("div", "bar");
  bar.append(make("div", "fill"), make("span", "open", "no limit"));
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-valuemin", "0");
  bar.setAttribute("aria-valuemax", "100");
  row.append(make("span", "name"), make("span", "amount"), bar);
  return row;
}

function showTier(row, t) {
  const [name, amount, bar] = row.children;
  const share = t.capacity_bytes ? Math.min(1, t.used_bytes / t.capacity_bytes) : 0;
  const text = t.capacity_bytes
    ? `${size(t.used_bytes)} of ${size(t.capacity_bytes)}, ${PERCENT.format(share)}`
    : `${size(t.used_bytes)} in use`;
  setText(name, t.name);
  setText(amount, text);
  bar.className = `bar ${t.name}`;
  bar.lastElementChild.hidden = Boolean(t.capacity_bytes);
  bar.setAttribute("aria-label", t.name);
  bar.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  bar.setAttribute("aria-valuetext", t.capacity_bytes ? text : `${text}, no limit`);
  bar.firstElementChild.style.inlineSize = `${share * 100}%`;
}

function makeSequence() {
  const row = make("li", "sequence");
  const bar = make("div", "bar");
  for (const tier of ["device", "host", "disk"]) bar.append(make("div", `fill ${tier}`));
  bar.setAttribute("aria-hidden", "true"); // the text says it
  row.append(make("span", "name"), make("span", "amount"), bar, make("p", "note"));
  return row;
}

function showSequence(row, q) {
  const [name, amount, bar, detail] = row.children;
  const n = [q.device_tokens, q.host_tokens, q.disk_tokens];
  const all = n[0] + n[1] + n[2];
  const where = ["device", "host", "disk"].map((t, i) => [t, n[i]]).filter(([, k]) => k > 0);
  const parts = where.length > 1 ? where.map(([t, k]) => `${t} ${count(k)}`) : [];
  if (q.window_tokens) parts.push(`windows ${count(q.window_tokens)}`);
  setText(name, `${q.id} ${q.state}`);
  setText(amount, `${count(all)} of ${count(context)} tokens`);
  setText(detail, parts.join(" · "));
  detail.hidden = parts.length === 0;
  row.classList.toggle("runs", runs(q));
  [...bar.children].forEach((e, i) => {
    e.style.inlineSize = `${(context ? n[i] / context : 0) * 100}%`;
  });
}

const runs = (q) => q.state === "prompt" || q.state === "answer";

// Those that hold something or run; their bars are relative to the context.
function showSequences(sequences) {
  const tokens = (q) => q.device_tokens + q.host_tokens + q.disk_tokens;
  const held = sequences.filter((q) => tokens(q) > 0 || runs(q));
  setText(at("held"), `Holding tokens: ${count(held.length)}`);
  showList(at("sequences"), held, makeSequence, showSequence);
}

// ---- canvases -----------------------------------------------------------------------------------

// A canvas as wide as its place and so high, in units of CSS; cleared.
function begin(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const w = Math.round(width * scale);
  const h = Math.round(height * scale);
  canvas.style.blockSize = `${height}px`;
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  return { g, width, height };
}

// ---- layers and heads -------------------------------------------------------------------------

let lanes = null;
let cursor = -1; // number of the cell that is told

const shown = () => document.querySelector("#heat-what input:checked").value;
const label = (what) => (what === "mass" ? "attention mass" : "hit rate");
const place = (i) => `layer ${Math.floor(i / lanes.kv_heads)}, head ${i % lanes.kv_heads}`;
const share = (x) => (x === null ? "none yet" : PERCENT.format(x));

// The scale goes from the lowest value, rounded down to a step of 5 %, to 100 %.
function floorOf(values) {
  const low = Math.min(1, ...values.filter((x) => x !== null));
  return Math.min(0.95, Math.floor(low * 20) / 20);
}

// Between two colors "#rrggbb" or "#rgb".
function mix(a, b, t) {
  const parse = (c) => {
    const hex = c.length === 4 ? c.replace(/[0-9a-f]/gi, "$&$&") : c;
    return [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
  };
  const [from, to] = [parse(a), parse(b)];
  return `rgb(${from.map((x, i) => Math.round(x + (to[i] - x) * t)).join(" ")})`;
}

function cellSize(width) {
  const h = Math.max(5, Math.min(18, Math.floor(160 / lanes.kv_heads)));
  return { w: width / lanes.layers, h };
}

function drawHeat() {
  const values = lanes[shown()];
  const low = floorOf(values);
  const [cold, hot, none, ink] = ["--heat-low", "--heat-high", "--line", "--ink"].map(color);
  const { g, width } = begin(at("heat"), cellSize(1).h * lanes.kv_heads);
  const { w, h } = cellSize(width);
  const gap = w > 5 ? 1 : 0;
  values.forEach((x, i) => {
    const left = Math.floor(i / lanes.kv_heads) * w;
    const top = (i % lanes.kv_heads) * h;
    g.fillStyle = x === null ? none : mix(cold, hot, (x - low) / (1 - low));
    g.fillRect(left, top, w - gap, h - 1);
    if (i !== cursor) return;
    g.strokeStyle = ink;
    g.lineWidth = 2;
    g.strokeRect(left + 1, top + 1, w - gap - 2, h - 3);
  });
  setText(at("heat-low"), PERCENT.format(low));
  setText(at("heat-high"), PERCENT.format(1));
}

function tellHeat() {
  const what = shown();
  const known = lanes[what].map((x, i) => [x, i]).filter(([x]) => x !== null);
  if (known.length === 0) return;
  known.sort((a, b) => a[0] - b[0]);
  const mean = known.reduce((sum, [x]) => sum + x, 0) / known.length;
  const least = known[0];
  at("heat").setAttribute(
    "aria-label",
    `${label(what)} of ${lanes.layers} layers by ${lanes.kv_heads} KV heads: ` +
      `mean ${PERCENT.format(mean)}, lowest ${PERCENT.format(least[0])} at ${place(least[1])}`,
  );
  setText(
    at("heat-mean"),
    `Mean ${PERCENT.format(mean)}; lowest ${PERCENT.format(least[0])}, ${place(least[1])}.`,
  );
}

// Told once for each move, so that nobody is read the same cell twice a second.
function tellCell() {
  setText(
    at("heat-cell"),
    `${place(cursor)}: hit rate ${share(lanes.hit_rate[cursor])}, ` +
      `attention mass ${share(lanes.mass[cursor])}`,
  );
  drawHeat();
}

// Only while it is open: it has as many cells as there are heads.
function fillHeatTable() {
  const table = at("heat-table");
  if (!table.closest("details").open) return;
  const head = make("tr");
  head.append(make("th", "", "Layer"));
  for (let h = 0; h < lanes.kv_heads; h++) head.append(make("th", "", `Head ${h}`));
  const rows = [head];
  for (let l = 0; l < lanes.layers; l++) {
    const row = make("tr");
    row.append(make("th", "", String(l)));
    for (let h = 0; h < lanes.kv_heads; h++)
      row.append(make("td", "", share(lanes[shown()][l * lanes.kv_heads + h])));
    rows.push(row);
  }
  for (const e of head.children) e.scope = "col";
  for (const row of rows.slice(1)) row.firstElementChild.scope = "row";
  table.replaceChildren(make("caption", "", `${label(shown())} by layer and KV head`), ...rows);
}

function showLanes() {
  if (!lanes) return;
  const any = lanes.hit_rate.some((x) => x !== null) || lanes.mass.some((x) => x !== null);
  at("heat-none").hidden = any;
  at("heat-shown").hidden = !any;
  if (!any) return;
  drawHeat();
  tellHeat();
  fillHeatTable();
}

function moveCursor(e) {
  const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[e.key];
  if (!by) return;
  e.preventDefault();
  const within = (x, n) => Math.max(0, Math.min(n - 1, x));
  if (cursor < 0) cursor = 0;
  else
    cursor =
      within(Math.floor(cursor / lanes.kv_heads) + by[0], lanes.layers) * lanes.kv_heads +
      within((cursor % lanes.kv_heads) + by[1], lanes.kv_heads);
  tellCell();
}

function pointAt(e) {
  const { w, h } = cellSize(at("heat").clientWidth);
  const layer = Math.min(lanes.layers - 1, Math.floor(e.offsetX / w));
  const head = Math.min(lanes.kv_heads - 1, Math.floor(e.offsetY / h));
  cursor = Math.max(0, layer) * lanes.kv_heads + Math.max(0, head);
  tellCell();
}

function leaveHeat() {
  cursor = -1;
  drawHeat();
}

// ---- steps --------------------------------------------------------------------------------------

let steps = null;

const total = (step) => step.us.reduce((sum, x) => sum + x, 0);

// Of the tallest; but steps with prompts do not hide the others: those are cut.
function topOf(list) {
  const sorted = list.map(total).sort((a, b) => a - b);
  return Math.min(sorted.at(-1), 4 * sorted[Math.floor(sorted.length / 2)]) || 1;
}

function drawSteps() {
  const { last, parts } = steps;
  const colors = parts.map((p) => color(`--part-${p}`));
  const top = topOf(last);
  const { g, width, height } = begin(at("steps"), 112);
  const w = width / Math.max(last.length, 32);
  last.forEach((step, i) => {
    let y = height;
    step.us.forEach((us, k) => {
      const h = (us / top) * (height - 4);
      g.fillStyle = colors[k];
      g.fillRect(i * w, y - h, Math.max(1, w - 1), h);
      y -= h;
    });
    if (total(step) > top) {
      g.fillStyle = color("--panel");
      g.fillRect(i * w, 6, Math.max(1, w - 1), 2);
    }
  });
  const cut = last.some((s) => total(s) > top);
  setText(at("steps-scale"), `Full height: ${(top / 1000).toFixed(2)} ms` +
    `${cut ? "; taller steps, with a notch, are cut" : ""}. The newest is on the right.`);
}

function makePart() {
  const row = make("tr");
  const name = make("th");
  name.scope = "row";
  row.append(name, make("td"), make("td"));
  name.append(make("i"), make("span"));
  return row;
}

function showPart(row, { name, us, all }) {
  const [head, ms, part] = row.children;
  head.firstElementChild.className = `part-${name}`;
  setText(head.lastElementChild, name);
  setText(ms, (us / 1000).toFixed(2));
  setText(part, all ? PERCENT.format(us / all) : "");
}

function showSteps() {
  const any = Boolean(steps?.last.length);
  at("steps-none").hidden = any;
  at("steps-shown").hidden = !any;
  if (!any) return;
  drawSteps();
  const n = steps.last.length;
  const mean = steps.parts.map((_, k) => steps.last.reduce((sum, s) => sum + s.us[k], 0) / n);
  const all = mean.reduce((sum, x) => sum + x, 0);
  const answers = steps.last.reduce((sum, s) => sum + s.answer_tokens, 0);
  const prompts = steps.last.reduce((sum, s) => sum + s.prompt_tokens, 0);
  const text = `${n} steps, ${(all / 1000).toFixed(2)} ms each: ${count(answers)} tokens of ` +
    `answers, ${count(prompts)} of prompts`;
  setText(at("parts-caption"), text);
  at("steps").setAttribute("aria-label", `Time of the last steps by stage. ${text}`);
  showList(at("parts").tBodies[0], steps.parts.map((name, k) => ({ name, us: mean[k], all })),
    makePart, showPart);
}

// ---- all of it ----------------------------------------------------------------------------------

function show(m) {
  const waiting = m.waiting ? `, ${count(m.waiting)} waiting` : "";
  tellState(m.running ? `${count(m.running)} running${waiting}` : `idle${waiting}`,
    m.running ? "busy" : "");
  setText(at("tokens"), `${count(m.tokens.used)} of ${count(m.tokens.capacity)} tokens`);
  showList(at("tiers"), m.tiers, makeTier, showTier);
  showSequences(m.sequences);
  ({ lanes, steps } = m);
  showLanes();
  showSteps();
}

// One look; how long to wait for the next.
async function look() {
  try {
    const r = await call("map", {}, true);
    if (r.ok) {
      const m = await r.json();
      await tellModel();
      show(m);
      return POLL_MS;
    }
    tellState(r.status === 401 ? "a key is needed" : `answers ${r.status}`, "bad");
  } catch {
    tellState("unreachable", "bad");
  }
  return RETRY_MS;
}

async function poll() {
  const wait = document.hidden ? RETRY_MS : await look();
  setTimeout(poll, wait);
}

function redraw() {
  showLanes();
  showSteps();
}

export function startMap() {
  const heat = at("heat");
  at("heat-what").addEventListener("change", showLanes);
  heat.addEventListener("keydown", moveCursor);
  heat.addEventListener("pointermove", pointAt);
  heat.addEventListener("pointerleave", leaveHeat);
  heat.addEventListener("blur", leaveHeat);
  at("heat-table").closest("details").addEventListener("toggle", showLanes);
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  poll();
}
