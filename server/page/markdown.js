// SPDX-License-Identifier: Apache-2.0
// A subset of Markdown as elements: headings, paragraphs, lists, tables, quotes, code, emphasis and
// links.  Every element comes from a fixed set of tags.  What the model writes becomes text nodes,
// and the address of a link where that is an http, https or mailto one.  HTML stays text.

const MAX_DEPTH = 12; // blocks within blocks, spans within spans; deeper ones stay text
const MAX_ADDRESS = 2000; // characters

const ITEM = /^([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const ESCAPED = "\\`*_[]#+-.!|~<>";
const MARK = /[\p{P}\p{S}]/u;

// ---- blocks ---------------------------------------------------------------------------------
// A block is {type, first, ...}; `first` is the number of its first line.

const indentOf = (line) => line.length - line.trimStart().length;
const cut = (line, n) => line.slice(Math.min(n, indentOf(line)));

function headingOf(line) {
  const m = /^(#{1,6})(?=[ \t]|$)/.exec(line);
  if (!m) return null;
  const text = line.slice(m[0].length).trim().replace(/(^|[ \t])#+$/, "");
  return { level: m[1].length, text };
}

function fenceOf(line) {
  const m = /^(`{3,}|~{3,})(.*)$/.exec(line);
  if (!m || (m[1][0] === "`" && m[2].includes("`"))) return null;
  return { mark: m[1], language: m[2].trim().split(/\s/)[0] };
}

const isRule = (line) => /^(\*{3,}|-{3,}|_{3,})$/.test(line.replace(/[ \t]/g, ""));

// The cells of a table's row; "\|" is a bar of its text.
function cellsOf(line) {
  const cells = [""];
  for (let i = line.startsWith("|") ? 1 : 0; i < line.length; i++) {
    if (line[i] === "\\" && line[i + 1] === "|") cells[cells.length - 1] += line[++i];
    else if (line[i] === "|") cells.push("");
    else cells[cells.length - 1] += line[i];
  }
  if (cells.length > 1 && !cells.at(-1).trim()) cells.pop();
  return cells.map((c) => c.trim());
}

function isTable(lines, i) {
  const head = lines[i].trim();
  const under = (lines[i + 1] ?? "").trim();
  return head.includes("|") && under.includes("-") && DELIMITERS.test(under) &&
    cellsOf(head).length === cellsOf(under).length;
}

// Whether line i ends the paragraph before it.
function interrupts(lines, i) {
  const line = lines[i].trim();
  const item = ITEM.exec(line);
  if (item && line.length > item[0].length && !/^\d/.test(line)) return true;
  if (item && /^1[.)]./.test(line)) return true;
  return !line || line[0] === ">" || Boolean(headingOf(line) || fenceOf(line)) || isRule(line) ||
    isTable(lines, i);
}

function takeCode(lines, i, fence) {
  const indent = indentOf(lines[i]);
  const text = [];
  for (i++; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.startsWith(fence.mark) && /^(`+|~+)$/.test(line)) {
      i++;
      break;
    }
    text.push(cut(lines[i], indent));
  }
  return [{ type: "code", language: fence.language, text: text.join("\n") }, i];
}

function takeTable(lines, i) {
  const sides = cellsOf(lines[i + 1].trim()).map((c) => {
    if (c.endsWith(":")) return c.startsWith(":") ? "center" : "end";
    return "start";
  });
  const rows = [cellsOf(lines[i].trim())];
  for (i += 2; i < lines.length && !interrupts(lines, i); i++)
    rows.push(cellsOf(lines[i].trim()).slice(0, sides.length));
  return [{ type: "table", sides, rows }, i];
}

function takeQuote(lines, i, depth) {
  const inner = [];
  for (; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line[0] === ">") inner.push(line.slice(1).replace(/^ /, ""));
    else if (inner.at(-1).trim() && !interrupts(lines, i)) inner.push(line);
    else break;
  }
  return [{ type: "quote", blocks: blocksOf(inner, depth + 1) }, i];
}

const kindOf = (marker) => (/^\d/.test(marker) ? "ordered" : "bullets");

// What is indented by two or more belongs to the item: models indent by two also below numbers.
function takeList(lines, i, depth) {
  const indent = indentOf(lines[i]);
  const first = ITEM.exec(lines[i].trim())[1];
  const list = { type: "list", kind: kindOf(first), start: Number.parseInt(first, 10), items: [] };
  let inner = null;
  let offset = 0;
  let blank = false;
  let loose = false;
  for (; i < lines.length; i++) {
    const line = lines[i].trim();
    if (!line) {
      inner.push("");
      blank = true;
      continue;
    }
    const own = indentOf(lines[i]);
    const item = own < indent + 2 && !isRule(line) ? ITEM.exec(line) : null;
    if (item && kindOf(item[1]) !== list.kind) break;
    if (item) {
      inner = [line.slice(item[0].length)];
      list.items.push(inner);
      offset = own + item[0].length;
    } else if (own >= indent + 2) inner.push(cut(lines[i], offset));
    else if (!blank && !interrupts(lines, i)) inner.push(line);
    else break;
    loose ||= blank && list.items.length > 0;
    blank = false;
  }
  list.loose = loose;
  list.items = list.items.map((item) => blocksOf(item, depth + 1));
  return [list, i];
}

function takeParagraph(lines, i) {
  const text = [lines[i].trim()];
  for (i++; i < lines.length && !interrupts(lines, i); i++) text.push(lines[i].trim());
  return [{ type: "paragraph", text: text.join("\n") }, i];
}

// The block that begins at line i, which is not blank, and the number of the line behind it.
function takeBlock(lines, i, depth) {
  const line = lines[i].trim();
  const heading = headingOf(line);
  const fence = fenceOf(line);
  if (heading) return [{ type: "heading", ...heading }, i + 1];
  if (fence) return takeCode(lines, i, fence);
  if (isRule(line)) return [{ type: "rule" }, i + 1];
  if (depth < MAX_DEPTH && line[0] === ">") return takeQuote(lines, i, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return takeList(lines, i, depth);
  if (isTable(lines, i)) return takeTable(lines, i);
  return takeParagraph(lines, i);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [block, next] = takeBlock(lines, i, depth);
    blocks.push({ ...block, first: i });
    i = next;
  }
  return blocks;
}

const linesOf = (text) =>
  text.split("\n").map((l) => l.replace(/^[ \t]+/, (s) => s.replaceAll("\t", "    ")));

// ---- spans ----------------------------------------------------------------------------------
// A span is a string, {type, spans}, {type: "code", text}, {type: "link", to, spans} or
// {type: "break"}.  Runs of "*", "_" and "~" are {mark, n, opens, closes} until they are paired.

// An address that may be followed, or null.
export function address(text) {
  if (!/^(https?:\/\/|mailto:)[^\s]+$/i.test(text)) return null;
  return URL.canParse(text) ? new URL(text).href : null;
}

function runAt(text, i) {
  const mark = text[i];
  let end = i;
  while (text[end] === mark) end++;
  const before = text[i - 1] ?? " ";
  const after = text[end] ?? " ";
  const [blankBefore, blankAfter] = [/\s/.test(before), /\s/.test(after)];
  const [markBefore, markAfter] = [MARK.test(before), MARK.test(after)];
  const left = !blankAfter && (!markAfter || blankBefore || markBefore);
  const right = !blankBefore && (!markBefore || blankAfter || markAfter);
  const word = mark === "_"; // within a word it is a letter
  return {
    mark,
    n: end - i,
    opens: left && (!word || !right || markBefore),
    closes: right && (!word || !left || markAfter),
  };
}

// What a run of backticks at i begins: code, or text where no run of that length follows.
function codeAt(text, i, missing) {
  const mark = /^`+/.exec(text.slice(i))[0];
  if (missing.has(mark.length)) return { text: mark, next: i + mark.length };
  for (let at = i + mark.length; (at = text.indexOf(mark, at)) >= 0; ) {
    let end = at + mark.length;
    while (text[end] === "`") end++;
    if (end - at === mark.length) {
      const inner = text.slice(i + mark.length, at).replaceAll("\n", " ");
      const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
      return { code: padded ? inner.slice(1, -1) : inner, next: end };
    }
    at = end;
  }
  missing.add(mark.length);
  return { text: mark, next: i + mark.length };
}

// Where brackets and parentheses that open are closed again.
function pairsOf(text) {
  const pairs = new Map();
  const open = { "]": [], ")": [] };
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\") i++;
    else if (text[i] === "[") open["]"].push(i);
    else if (text[i] === "(") open[")"].push(i);
    else if (open[text[i]]?.length) pairs.set(open[text[i]].pop(), i);
  }
  return pairs;
}

// "[text](address)" at i, with "!" before it or not; null where it is none that may be followed.
function linkAt(text, i, state) {
  const from = text[i] === "!" ? i + 1 : i;
  state.pairs ??= pairsOf(text);
  const middle = state.pairs.get(from) ?? text.length;
  const end = text[middle + 1] === "(" ? state.pairs.get(middle + 1) : undefined;
  if (end === undefined || end - middle > MAX_ADDRESS) return null;
  const inner = text.slice(middle + 2, end).trim();
  const where = inner.split(/\s/, 1)[0];
  const title = inner.slice(where.length).trim();
  const to = address(where.replace(/^<(.*)>$/, "$1"));
  if (!to || !/^(|".*"|'.*')$/s.test(title)) return null;
  const spans = spansOf(text.slice(from + 1, middle), true);
  return { link: { type: "link", to, spans: spans.length ? spans : [to] }, next: end + 1 };
}

// An address at i, in "<" and ">" or not.
function bareAt(text, i) {
  const m = /^<?((?:https?:\/\/|mailto:)[^\s<>`"]+)/i.exec(text.slice(i, i + MAX_ADDRESS));
  if (!m) return null;
  const angled = text[i] === "<";
  let found = m[1];
  if (angled && text[i + m[0].length] !== ">") return null;
  if (!angled) {
    found = found.replace(/[.,:;!?'*_~]{1,100}$/, "");
    if (found.endsWith(")") && !found.includes("(")) found = found.slice(0, -1);
  }
  const to = address(found);
  const next = i + found.length + (angled ? 2 : 0);
  return to && { link: { type: "link", to, spans: [found] }, next };
}

// What is at i and is no plain text: [span, next], or null.
function spanAt(text, i, state) {
  const c = text[i];
  if (c === "\n") return [{ type: "break" }, i + 1];
  if (c === "\\" && text[i + 1] === "\n") return [{ type: "break" }, i + 2];
  if (c === "\\" && ESCAPED.includes(text[i + 1] ?? " ")) return [text[i + 1], i + 2];
  if (c === "*" || c === "_" || c === "~") {
    const run = runAt(text, i);
    return [run, i + run.n];
  }
  if (c === "`") {
    const found = codeAt(text, i, state.missing);
    return [found.code === undefined ? found.text : { type: "code", text: found.code }, found.next];
  }
  if (state.linked) return null;
  let found = null;
  if (c === "[" || (c === "!" && text[i + 1] === "[")) found = linkAt(text, i, state);
  else if (c === "<" || (/[hm]/i.test(c) && !/\w/.test(text[i - 1] ?? " ")))
    found = bareAt(text, i);
  return found && [found.link, found.next];
}

// Closes what a run closes; returns how many of its marks are left.
function closeRun(stack, run) {
  let left = run.n;
  while (left > 0) {
    const at = stack.findLastIndex((f) => f.mark === run.mark);
    if (at <= 0) break;
    while (stack.length > at + 1) giveUp(stack);
    const frame = stack.pop();
    const n = Math.min(frame.n, left);
    const type = run.mark === "~" ? "struck" : n === 2 ? "strong" : "emphasis";
    const span = { type, spans: frame.spans };
    left -= n;
    if (frame.n > n) stack.push({ ...frame, n: frame.n - n, spans: [span] });
    else stack.at(-1).spans.push(span);
  }
  return left;
}

// The last frame is not closed: its marks are text.
function giveUp(stack) {
  const f = stack.pop();
  const { spans } = stack.at(-1);
  spans.push(f.mark.repeat(f.n));
  for (const s of f.spans) spans.push(s);
}

function putRun(stack, run) {
  const pairs = run.mark !== "~" || run.n === 2;
  let left = run.closes && pairs ? closeRun(stack, run) : run.n;
  const opens = run.opens && pairs && left <= 3 && stack.length < MAX_DEPTH;
  for (; opens && left > 0; left -= left === 3 ? 1 : left)
    stack.push({ mark: run.mark, n: left === 3 ? 1 : left, spans: [] });
  if (left > 0) stack.at(-1).spans.push(run.mark.repeat(left));
}

function spansOf(text, linked = false) {
  const stack = [{ mark: "", n: 0, spans: [] }];
  // missing: lengths of runs of backticks that have no second one; linked: within a link
  const state = { linked, missing: new Set(), pairs: null };
  let plain = 0;
  let i = 0;
  const putPlain = () => {
    if (i > plain) stack.at(-1).spans.push(text.slice(plain, i));
  };
  while (i < text.length) {
    const found = spanAt(text, i, state);
    if (!found) {
      i++;
      continue;
    }
    const [span, next] = found;
    putPlain();
    if (span.mark) putRun(stack, span);
    else stack.at(-1).spans.push(span);
    plain = i = next;
  }
  putPlain();
  while (stack.length > 1) giveUp(stack);
  return stack[0].spans;
}

// ---- elements -------------------------------------------------------------------------------

const TAGS = { strong: "strong", emphasis: "em", struck: "del", code: "code", break: "br" };

// Children come as a list, which may be longer than the arguments of a call can be.
function element(tag, children = []) {
  const e = document.createElement(tag);
  for (const c of children) e.append(c);
  return e;
}

function showSpan(span) {
  if (typeof span === "string") return span;
  if (span.type === "code") return element("code", [span.text]);
  if (span.type !== "link") return element(TAGS[span.type], span.spans?.map(showSpan));
  const a = element("a", span.spans.map(showSpan));
  a.href = span.to;
  a.target = "_blank";
  a.rel = "noopener noreferrer nofollow";
  return a;
}

const showSpans = (text) => spansOf(text).map(showSpan);

function showTable(block) {
  const cell = (text, i, tag) => {
    const e = element(tag, showSpans(text));
    e.className = block.sides[i];
    if (tag === "th") e.scope = "col";
    return e;
  };
  const row = (cells, tag) => element("tr", cells.map((c, i) => cell(c, i, tag)));
  const head = element("thead", [row(block.rows[0], "th")]);
  const body = element("tbody", block.rows.slice(1).map((cells) => row(cells, "td")));
  const place = element("div", [element("table", [head, body])]);
  place.className = "table";
  place.tabIndex = 0;
  return place;
}

function showList(block, onCode) {
  const items = block.items.map((blocks) => element("li", blocks.flatMap((b) =>
    b.type === "paragraph" && !block.loose ? showSpans(b.text) : [showBlock(b, onCode)])));
  const list = element(block.kind === "ordered" ? "ol" : "ul", items);
  if (block.kind === "ordered") list.start = block.start;
  return list;
}

function showCode(block, onCode) {
  const pre = element("pre", [element("code", [block.text])]);
  const head = element("div", [element("span", [block.language])]);
  const place = element("div", [head, pre]);
  pre.tabIndex = 0;
  head.className = "head";
  place.className = "code";
  onCode?.(head, block.text);
  return place;
}

function showBlock(block, onCode) {
  switch (block.type) {
    case "heading": // below those of the page
      return element(`h${Math.min(6, block.level + 3)}`, showSpans(block.text));
    case "code":
      return showCode(block, onCode);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", block.blocks.map((b) => showBlock(b, onCode)));
    case "list":
      return showList(block, onCode);
    case "table":
      return showTable(block);
    default:
      return element("p", showSpans(block.text));
  }
}

// Shows a text that grows in `place`.  `add` takes more of it, `end` says that there is no more.
// Blocks that more text cannot change stay as they are; for each block of code among them
// `onCode` gets its head, for a button, and its text.
export function growing(place, onCode = null) {
  let rest = ""; // the text from the first block on that can change
  let tail = []; // the elements of those blocks

  const show = (done) => {
    const blocks = blocksOf(linesOf(rest), 0);
    for (const e of tail) e.remove();
    tail = blocks.map((b) => showBlock(b, done ? onCode : null));
    for (const e of tail) place.append(e);
  };
  // An unfinished line can still join the block before it.
  const keep = () => {
    const lines = rest.slice(0, rest.lastIndexOf("\n") + 1).split("\n");
    const blocks = blocksOf(linesOf(lines.join("\n")), 0);
    const last = blocks.pop();
    if (blocks.length === 0) return;
    for (const e of tail) e.remove();
    tail = [];
    for (const b of blocks) place.append(showBlock(b, onCode));
    rest = rest.slice(lines.slice(0, last.first).join("\n").length + 1);
  };
  return {
    add(more) {
      rest += more;
      keep();
      show(false);
    },
    end() {
      show(true);
    },
  };
}
