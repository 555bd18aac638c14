// SPDX-License-Identifier: Apache-2.0
// The chat: one conversation, kept in the page, answered as a stream.  Answers are shown as
// Markdown, by elements and text nodes; what the user writes stays text.
import { growing } from "./markdown.js";
import { at, call, make, setText } from "./page.js";

const WRITE_MS = 40; // at least, and as long as the last took: until an answer is shown again
const TOLD_MS = 1500;

// {text, answer, reasoning, asked, told}: what the user said; the answer so far, and the reasoning
// before it; the entries of the log that show the former and the latter
const turns = [];
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
  const body = make("div", "said", text);
  entry.append(make("h3", "who", role === "user" ? "You" : "Model"), body);
  at("empty").hidden = true;
  changeLog((log) => log.append(entry));
  at("log").scrollTop = at("log").scrollHeight;
  return { entry, body };
}

function button(text, label, press) {
  const b = make("button", "small", text);
  b.type = "button";
  b.setAttribute("aria-label", label);
  b.addEventListener("click", () => press(b));
  return b;
}

function addActions(entry, buttons) {
  const row = make("div", "actions");
  for (const b of buttons) row.append(b);
  changeLog(() => entry.append(row));
}

// The clipboard of the browser, or where a page without TLS has none, the command of a document.
async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "unseen");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function copyButton(label, text) {
  return button("Copy", label, async (b) => {
    setText(b, (await toClipboard(text())) ? "Copied" : "Not copied");
    b.focus();
    setTimeout(() => setText(b, "Copy"), TOLD_MS);
  });
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

// Why there is no answer, or not all of it, in words for the user.
class Reason extends Error {}

async function refusal(r) {
  if (r.status === 401) return new Reason("the server needs a valid API key");
  try {
    return new Reason((await r.json()).error.message);
  } catch {
    return new Reason(`the server, or a proxy before it, answered with status ${r.status}`);
  }
}

// Errors of the browser have words of its own, which say little.
function reasonOf(e, began) {
  if (e instanceof Reason) return e.message;
  console.info(e);
  if (!began) return "the server cannot be reached; it may have ended";
  return "the connection to the server was lost";
}

function eventOf(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Reason("the server sent something that is no event of an answer");
  }
}

function number(id) {
  const value = Number.parseFloat(at(id).value);
  return Number.isFinite(value) ? value : undefined;
}

// Roles alternate: what has no answer is left out, but for the last turn.
function messagesFor(last) {
  const system = at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn !== last && !turn.answer) continue;
    messages.push({ role: "user", content: turn.text });
    const reasoning_content = turn.reasoning || undefined; // for templates that want it
    if (turn !== last)
      messages.push({ role: "assistant", content: turn.answer, reasoning_content });
  }
  return messages;
}

function request(turn) {
  return {
    messages: messagesFor(turn),
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

// A place for reasoning, above the answer; it is closed when the answer begins.
function addReasoning(body) {
  const place = make("details", "reasoning");
  const node = document.createTextNode("");
  const text = make("p");
  text.append(node);
  place.append(make("summary", "", "Reasoning"), text);
  place.open = true;
  changeLog(() => body.before(place));
  return { place, node };
}

// Text for a turn's answer, shown some times a second: a long block takes time to lay out.
function writer(turn, body) {
  const shown = growing(body, (head, text) => head.append(copyButton("Copy the code", () => text)));
  let text = "";
  let thought = "";
  let reasoning = null;
  let timer = 0;
  let wait = WRITE_MS;
  const flush = () => {
    clearTimeout(timer);
    timer = 0;
    const start = performance.now();
    changeLog(() => {
      if (thought) reasoning.node.appendData(thought);
      if (text) shown.add(text);
    });
    text = thought = "";
    wait = Math.max(WRITE_MS, performance.now() - start);
  };
  const add = (more) => {
    if (!turn.answer && reasoning) reasoning.place.open = false;
    turn.answer += more;
    text += more;
    timer ||= setTimeout(flush, wait);
  };
  const think = (more) => {
    reasoning ??= addReasoning(body);
    turn.reasoning += more;
    thought += more;
    timer ||= setTimeout(flush, wait);
  };
  const end = () => {
    flush();
    changeLog(() => shown.end());
  };
  return { add, think, end };
}

// Gives the text to `out` as it comes; returns what the answer took.
async function take(body, out) {
  let usage, timings, finish;
  for await (const data of events(body)) {
    if (data === "[DONE]") return summary(usage, timings, finish);
    const e = eventOf(data);
    if (e.error) throw new Reason(e.error.message);
    if (e.prompt_progress) tellProgress(e.prompt_progress);
    usage = e.usage ?? usage;
    timings = e.timings ?? timings;
    for (const c of e.choices ?? []) {
      finish = c.finish_reason ?? finish;
      const { content, reasoning_content } = c.delta ?? {};
      if (content || reasoning_content) tellProgress(null);
      if (reasoning_content) out.think(reasoning_content);
      if (content) out.add(content);
    }
  }
  throw new Reason("the connection to the server was lost");
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

// ---- turns ------------------------------------------------------------------------------------

async function answer(turn) {
  const controller = new AbortController();
  const { entry, body } = addEntry("model", "");
  const out = writer(turn, body);
  let began = false;
  turn.told = entry;
  turn.answer = turn.reasoning = "";
  setRunning(controller);
  try {
    const r = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request(turn)),
      signal: controller.signal,
    });
    began = true;
    if (!r.ok) throw await refusal(r);
    const took = await take(r.body, out);
    out.end();
    addNote(entry, took);
  } catch (e) {
    out.end();
    if (e.name === "AbortError") addNote(entry, "Stopped");
    else {
      const what = turn.answer ? "The answer is not complete" : "No answer";
      addNote(entry, `${what}: ${reasonOf(e, began)}`, "note bad");
    }
  }
  if (running !== controller) return; // another conversation has begun
  const copy = copyButton("Copy the answer", () => turn.answer);
  const retry = button("Retry", "Answer again", () => retryTurn(turn));
  retry.classList.add("retry");
  addActions(entry, turn.answer ? [copy, retry] : [retry]);
  setRunning(null);
}

function retryTurn(turn) {
  if (running) return;
  turn.told.remove();
  answer(turn);
  at("stop").focus();
}

// Takes a turn and those after it out of the conversation.
function dropFrom(turn) {
  for (const t of turns.splice(turns.indexOf(turn))) {
    t.asked.remove();
    t.told.remove();
  }
}

function send(text) {
  const { entry, body } = addEntry("user", text);
  const turn = { text, answer: "", reasoning: "", asked: entry, told: null };
  turns.push(turn);
  const copy = copyButton("Copy the message", () => text);
  addActions(entry, [copy, button("Edit", "Edit the message", (b) => editTurn(turn, body, b))]);
  answer(turn);
}

const sends = (e) => e.key === "Enter" && !e.shiftKey && !e.isComposing;

// The text of a turn in a field; sent, it takes the place of that turn and of those after it.
function editTurn(turn, body, opener) {
  const form = make("form", "edit");
  const area = make("textarea");
  const submit = make("button", "main", "Send");
  const leave = () => {
    form.remove();
    body.hidden = false;
    opener.parentElement.hidden = false;
    opener.focus();
  };
  const row = make("div", "row");
  const cancel = button("Cancel", "Cancel", leave);
  const follow = turn === turns.at(-1) ? "its answer" : "all that follows";
  area.value = turn.text;
  area.rows = Math.min(12, turn.text.split("\n").length + 1);
  area.setAttribute("aria-label", "Edited message");
  cancel.className = "";
  row.append(make("p", "note", `Sending it removes ${follow}.`), cancel, submit);
  form.append(area, row);
  form.addEventListener("submit", (e) => {
    e.preventDefault();
    if (running || !area.value.trim()) return;
    dropFrom(turn);
    send(area.value);
    at("stop").focus();
  });
  form.addEventListener("keydown", (e) => {
    if (e.key === "Escape") {
      e.stopPropagation();
      leave();
    } else if (e.target === area && sends(e)) {
      e.preventDefault();
      form.requestSubmit();
    }
  });
  body.hidden = true;
  opener.parentElement.hidden = true;
  body.after(form);
  area.focus();
}

function clear() {
  running?.abort();
  setRunning(null);
  turns.length = 0;
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
    if (!sends(e)) return;
    e.preventDefault();
    at("composer").requestSubmit();
  });
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape" && !at("key-dialog").open) running?.abort();
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", clear);
}
