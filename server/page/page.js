// SPDX-License-Identifier: Apache-2.0
// What chat and map share: calls with the key, which is kept in memory only, and the page's head.
import { startChat } from "./chat.js";
import { startMap } from "./map.js";

export const at = (id) => document.getElementById(id);

// An element with a class and text; text only, never markup.
export function make(tag, kind = "", text = "") {
  const e = document.createElement(tag);
  if (kind) e.className = kind;
  if (text) e.textContent = text;
  return e;
}

export function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

// ---- the key ------------------------------------------------------------------------------

const WANTED = "The API key of this server. It stays in this page until that is closed.";

let key = "";
let asking = null; // the answer that an open dialog will give
let declined = false;

function askKey(why) {
  if (asking) return asking;
  const dialog = at("key-dialog");
  setText(at("key-why"), why);
  at("key").value = "";
  dialog.showModal();
  asking = new Promise((resolve) => {
    dialog.onclose = () => {
      asking = null;
      declined = dialog.returnValue !== "use";
      resolve(!declined);
    };
  });
  return asking;
}

function startKey() {
  const dialog = at("key-dialog");
  at("key-form").addEventListener("submit", (e) => {
    e.preventDefault();
    key = at("key").value.trim();
    at("key").value = "";
    dialog.close("use");
  });
  at("key-cancel").addEventListener("click", () => dialog.close("no"));
  dialog.addEventListener("cancel", () => {
    dialog.returnValue = "no";
  });
  at("key-button").addEventListener("click", () => {
    askKey(WANTED);
  });
}

// A call of this server.  Asks for a key where one is wanted; quiet ones do not ask again once
// that was declined.  A refusal is returned as any other response.
export async function call(path, options = {}, quiet = false) {
  for (;;) {
    const used = key;
    const headers = { ...options.headers };
    if (used) headers.Authorization = `Bearer ${used}`;
    const r = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    if (r.status !== 401) return r;
    if (used === key) {
      if (quiet && declined) return r;
      if (!(await askKey(used ? "That key was refused." : WANTED))) return r;
    }
  }
}

// ---- the head -----------------------------------------------------------------------------

export function tellState(text, kind = "") {
  const e = at("state");
  setText(e, text);
  e.className = kind;
}

export let context = 0; // tokens that a sequence can hold; 0 until the server has said it

// What runs; once.
export async function tellModel() {
  if (at("model").textContent) return;
  const r = await call("props", {}, true);
  if (!r.ok) return;
  const p = await r.json();
  context = p.n_ctx;
  const n = (x) => x.toLocaleString("en");
  setText(at("model"), `${p.model}, ${p.backend}, ${n(p.total_slots)} × ${n(p.n_ctx)} tokens`);
  document.title = `${p.model} - KVDrive`;
}

startKey();
startChat();
startMap();
