// SPDX-License-Identifier: Apache-2.0
// The chat: one conversation, kept in the page, answered as a stream.  What the model writes
// becomes text nodes.
import { at, call, make, setText } from "./page.js";

const WRITE_MS = 40;

const messages = []; // {role, content} so far
let running = null; // the AbortController of the answer under way

// ---- the log --------------------------------------------------------------------------------

function atEnd(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 48;
}

// Changes the log, and stays at its end where it was there.
function changeLog(change) {
  const log = at("log");
  const follow = atEnd(log);
  change(log);
  if (follow) log.scrollTop = log.scrollHeight;
}

function addEntry(role, text) {
  const entry = make("article", `entry ${role}`);
  const body = make("div", "said");
  const node = document.createTextNode(text);
  body.append(node);
  entry.append(make("h3", "who", role === "user" ? "You" : "Model"), body);
  at("empty").hidden = true;
  changeLog((log) => log.append(entry));
  at("log").scrollTop = at("log").scrollHeight;
  return { entry, node };
}

function addNote(entry, text, kind = "note") {
  changeLog(() => entry.append(make("p", kind, text)));
}

function tellProgress(p) {
  at("progress").hidden = !p;
  if (!p) return;
  at("progress-bar").value = p.total ? p.processed / p.total : 0;
  const cached = p.cache ? `, ${p.cache} from the cache` : "";
  setText(at("progress-text"), `Reading the prompt: ${p.processed} of ${p.total} tokens${cached}`);
}

// ---- the stream -------------------------------------------------------------------------------

// Data of server-sent events, as it comes.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

async function refusal(r) {
  try {
    return (await r.json()).error.message;
  } catch {
    return `the server answered ${r.status}`;
  }
}

function number(id) {
  const value = Number.parseFloat(at(id).value);
  return Number.isFinite(value) ? value : undefined;
}

function request() {
  const system = at("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return {
    messages: [...first, ...messages],
    stream: true,
    stream_options: { include_usage: true },
    return_progress: true,
    temperature: number("temperature"),
    max_completion_tokens: number("most"),
  };
}

// What an answer took, in a line.
function summary(usage, timings, finish) {
  const part = [];
  if (usage) {
    const d = usage.prompt_tokens_details ?? {};
    const tiers = Object.entries(d.cached_by_tier ?? {}).filter(([, n]) => n > 0);
    const from = tiers.map(([name, n]) => `${n} from ${name}`).join(", ");
    part.push(`prompt ${usage.prompt_tokens}${from ? ` (${from})` : ""}`);
    part.push(`answer ${usage.completion_tokens} tokens`);
  }
  if (timings) {
    if (timings.predicted_per_second > 0)
      part.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
    part.push(`first after ${((timings.queue_ms + timings.prompt_ms) / 1000).toFixed(2)} s`);
  }
  if (finish === "length") part.push("cut at the most tokens");
  return part.join(" · ");
}

// Text for a node, put there some times a second: laying a long answer out takes time.
function writer(node) {
  let text = "";
  let timer = 0;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    const more = text;
    text = "";
    if (more) changeLog(() => node.appendData(more));
  };
  const add = (more) => {
    text += more;
    timer ||= setTimeout(flush, WRITE_MS);
  };
  return { add, flush };
}

// Gives the text to `out` as it comes; returns what the answer took.
async function take(body, out) {
  let usage, timings, finish;
  for await (const data of events(body)) {
    if (data === "[DONE]") break;
    const e = JSON.parse(data);
    if (e.error) throw new Error(e.error.message);
    if (e.prompt_progress) tellProgress(e.prompt_progress);
    usage = e.usage ?? usage;
    timings = e.timings ?? timings;
    for (const c of e.choices ?? []) {
      finish = c.finish_reason ?? finish;
      if (!c.delta?.content) continue;
      tellProgress(null);
      out.add(c.delta.content);
    }
  }
  return summary(usage, timings, finish);
}

function setRunning(controller) {
  running = controller;
  at("log").setAttribute("aria-busy", String(Boolean(running)));
  const focused = document.activeElement;
  at("send").hidden = Boolean(running);
  at("stop").hidden = !running;
  if (focused === at("send") || focused === at("stop")) at(running ? "stop" : "prompt").focus();
  if (!running) tellProgress(null);
}

async function send(text) {
  const controller = new AbortController();
  messages.push({ role: "user", content: text });
  addEntry("user", text);
  const { entry, node } = addEntry("model", "");
  const out = writer(node);
  setRunning(controller);
  try {
    const r = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: controller.signal,
    });
    if (!r.ok) throw new Error(await refusal(r));
    const took = await take(r.body, out);
    out.flush();
    addNote(entry, took);
  } catch (e) {
    out.flush();
    if (e.name === "AbortError") addNote(entry, "Stopped");
    else addNote(entry, `No answer: ${e.message}`, "note bad");
  }
  if (running !== controller) return; // another conversation has begun
  if (node.data) messages.push({ role: "assistant", content: node.data });
  else messages.pop(); // so that roles alternate
  setRunning(null);
}

function clear() {
  running?.abort();
  setRunning(null);
  messages.length = 0;
  for (const e of document.querySelectorAll("#log .entry")) e.remove();
  at("empty").hidden = false;
  at("prompt").focus();
}

export function startChat() {
  const prompt = at("prompt");
  at("composer").addEventListener("submit", (e) => {
    e.preventDefault();
    const text = prompt.value;
    if (running || !text.trim()) return;
    prompt.value = "";
    send(text);
  });
  prompt.addEventListener("keydown", (e) => {
    if (e.key !== "Enter" || e.shiftKey || e.isComposing) return;
    e.preventDefault();
    at("composer").requestSubmit();
  });
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape" && !at("key-dialog").open) running?.abort();
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", clear);
}
