#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page at /: what it is served with, the map that it shows, and the page itself in a browser
without a screen.  The latter is skipped where there is no Chromium."""
import atexit
import json
import os
import re
import sys

import browser
from kvserver import HERE, Directory, Server, limit_of, main

FAULT = os.environ["KVD_TEST_FAULT"]
KEY = "sk-of-the-page"
SOURCE = HERE.parent.parent / "server" / "page"
SPARSE = ("--attention", "sparse", "--budget", "64", "--kv-device", "1500K", "--parallel", "2")
LONG = {"prompt": [67, 80, 71] * 500, "max_tokens": 20, "logit_bias": {"261": -100}}
# Everything that a page may be made of comes from one of these.
FILES = {"/": "text/html", "/page/page.css": "text/css", "/page/page.js": "text/javascript",
         "/page/chat.js": "text/javascript", "/page/map.js": "text/javascript",
         "/page/markdown.js": "text/javascript",
         "/page/icon.svg": "image/svg+xml"}
HOSTILE = ("<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
           "&amp;")


# ---- without a browser ---------------------------------------------------------------------------

def test_files():
    """They need no key, say nothing of the server, and may load nothing but each other."""
    with Server(env={"KVDRIVE_API_KEY": KEY}) as s:
        for path, kind in FILES.items():
            status, headers, data = s.call("GET", path)
            assert status == 200 and headers["Content-Type"].startswith(kind), path
            name = path.rsplit("/", 1)[1] or "index.html"
            assert data == (SOURCE / name).read_bytes(), path
            policy = dict(p.split(" ", 1) for p in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == "'self'"
            assert "unsafe" not in str(policy) and policy["require-trusted-types-for"] == "'script'"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["X-Content-Type-Options"] == "nosniff"
            addresses = re.findall(rb"https?://[^\"' >]*", data)
            assert set(addresses) <= {b"http://www.w3.org/2000/svg"}, (path, addresses)
            assert s.call("GET", path, headers={"Host": "evil.example"})[0] == 403
        assert len(list(SOURCE.iterdir())) == len(FILES)
        assert s.call("GET", "/page/../page/page.css")[0] == 401
        assert s.call("GET", "/map")[0] == 401
        assert s.call("GET", "/v1/models")[1]["Content-Security-Policy"] is None


def test_map():
    with Directory() as d, Server(*SPARSE, "--cache-dir", d, "--kv-disk", "64M") as s:
        m = s.get("/map")
        device, host, disk = m["tiers"]
        assert disk == {"name": "disk", "used_bytes": 0, "capacity_bytes": 64 << 20}
        assert 0 < device["used_bytes"] < device["capacity_bytes"] <= 1500 << 10
        assert host["used_bytes"] == 0 < host["capacity_bytes"]
        assert m["steps"]["last"] == [] and set(m["lanes"]["hit_rate"]) == {None}
        s.post("/v1/completions", LONG)
        s.wait_for(lambda: s.get("/map")["tiers"][2]["used_bytes"] > 0)
        s.wait_for(lambda: s.get("/map")["running"] == 0)
        m, slots = s.get("/map"), s.slots()
        for q, slot in zip(m["sequences"], slots["slots"]):
            assert (q["device_tokens"] + q["host_tokens"] + q["disk_tokens"] == slot["tokens"])
        q = m["sequences"][0]
        assert q["host_tokens"] == 1280 and q["window_tokens"] == 128 and q["state"] == "idle"
        assert m["tokens"]["used"] == slots["slots"][0]["tokens"]
        assert m["tiers"][1]["used_bytes"] > 0
        assert device["used_bytes"] < m["tiers"][0]["used_bytes"] <= device["capacity_bytes"]
        lanes = m["lanes"]
        assert len(lanes["mass"]) == len(lanes["hit_rate"]) == lanes["layers"] * lanes["kv_heads"]
        assert all(0 < x <= 1 for x in lanes["hit_rate"] + lanes["mass"])
        check_steps(s, m["steps"])


def check_steps(s, steps):
    last = steps["last"]
    assert steps["parts"] == ["qkv", "select", "fetch", "attend", "ffn", "logits", "seal", "rest"]
    assert 20 <= len(last) <= 64
    numbers = [x["number"] for x in last]
    assert numbers == list(range(numbers[0], numbers[0] + len(last)))
    assert sum(x["answer_tokens"] for x in last) == 19  # the first is the prompt's
    assert sum(x["prompt_tokens"] for x in last) == 1500
    sparse = last[-1]
    assert sparse["answer_tokens"] == 1
    assert all(us > 0 for p, us in zip(steps["parts"], sparse["us"]) if p not in ("fetch", "seal"))
    spent = sum(sum(x["us"]) for x in last) * 1e-6
    text = s.call("GET", "/metrics")[2].decode()
    known = sum(float(x) for x in re.findall(r"evaluation_seconds_total\{.*\} (\S+)", text))
    assert known <= spent < known + limit_of(1, spent), (known, spent)
    for _ in range(4):  # it has the last ones, and no more
        s.post("/v1/completions", {"prompt": [67] * 10, "max_tokens": 30,
                                   "logit_bias": {"261": -100}})
    s.wait_for(lambda: s.get("/map")["steps"]["last"][0]["number"] > 40)
    assert len(s.get("/map")["steps"]["last"]) == 64


def test_map_resident():
    with Server() as s:
        assert [t["name"] for t in s.get("/map")["tiers"]] == ["device"]
        s.post("/v1/completions", {**LONG, "max_tokens": 2})
        s.wait_for(lambda: s.get("/map")["sequences"][0]["device_tokens"] == 1501)
        m = s.get("/map")
        assert m["sequences"][0]["host_tokens"] == 0
        assert all(us == 0 for x in m["steps"]["last"] for us in x["us"][1:3])


# ---- in a browser ------------------------------------------------------------------------------

_browser = []


def open_page(s, **screen):
    if not _browser:
        _browser.append(browser.Browser())
        atexit.register(_browser[0].__exit__)
    p = _browser[0].page(**screen)
    p.open(f"http://127.0.0.1:{s.port}/")
    p.wait("document.readyState === 'complete' && document.getElementById('tiers') !== null")
    return p


def text_of(p, selector):
    return p.run(f"document.querySelector({json.dumps(selector)}).textContent")


def wait_text(p, selector, part, seconds=10):
    find = f"document.querySelector({json.dumps(selector)})"
    p.wait(f"{find} !== null && {find}.textContent.includes({json.dumps(part)})", seconds)


def focus(p):
    return p.run("document.activeElement.id || document.activeElement.textContent")


def tab_to(p, name):
    """Presses Tab until an element has the focus, which must come."""
    for _ in range(30):
        if focus(p) == name:
            return
        p.key("Tab")
    raise AssertionError((name, focus(p)))


def say(p, text):
    p.run("document.getElementById('prompt').focus()")
    p.type(text)
    p.key("Enter")


def check_clean(p, s):
    """Nothing was logged as wrong, and nothing asked of anybody else."""
    assert p.problems == [], p.problems
    assert p.asked
    for method, url in p.asked:
        assert url.startswith(f"http://127.0.0.1:{s.port}/"), (method, url)


def test_chat_and_map():
    ask = [{"role": "user", "content": "hello"}]
    with Directory() as d, Server(*SPARSE, "--cache-dir", d, program=FAULT) as s:
        s.post("/v1/completions", LONG)
        want = s.post("/v1/chat/completions", {"messages": ask, "max_tokens": 150})
        want = want["choices"][0]["message"]["content"]
        p = open_page(s, height=1400)
        want = p.run(MARKDOWN + f"shown([{json.dumps(want)}]).then((e) => e.textContent)")
        p.wait("document.getElementById('model').textContent.includes('2 × 4,000 tokens')")
        p.run("""document.getElementById('most').value = 150; window.seen = new Set();
                 new MutationObserver(() => seen.add(document.querySelector('.model .said')
                     ?.textContent.length)).observe(document.getElementById('log'),
                     { subtree: true, childList: true, characterData: true })""")
        say(p, "hello")
        wait_text(p, ".model .note", "answer 150 tokens")
        assert text_of(p, ".user .said") == "hello" and text_of(p, ".model .said") == want
        assert (n := p.run("seen.size")) > 3, ("it came in one piece", n)
        assert re.search(r"tokens/s · first after \d", text_of(p, ".model .note"))
        say(p, "and again")  # the conversation goes on: its beginning is in the cache
        wait_text(p, ".model:last-child .note", "from ")
        assert p.run("document.querySelector('.tier .open').offsetWidth") == 0  # it has a limit
        p.wait("!document.getElementById('heat-shown').hidden")
        wait_text(p, "#state", "idle")
        rows = p.run("[...document.querySelectorAll('.tier')].map((e) => e.innerText)")
        assert [r.split()[0].lower() for r in rows] == ["device", "host", "disk"], rows
        assert "in use" in rows[2] and "no limit" in rows[2] and "no limit" not in rows[0] + rows[1]
        assert "100.0%" not in rows[0]
        p.wait("""[...document.querySelectorAll('.sequence .fill')]
                  .some((e) => e.matches('.host') && e.offsetWidth > 10)""")
        check_sequence_bars(p, s)
        assert p.run("document.querySelector('.tier [role=meter]').ariaValueNow") != "0"
        assert "windows 128" in p.run("document.getElementById('sequences').innerText")
        assert p.run("document.querySelectorAll('#parts td').length") == 16
        # cells that hit as often look alike, and how often they do is the processor's arithmetic
        for canvas, least in (("heat", 2), ("steps", 4)):
            n = p.run(f"""(() => {{ const c = document.getElementById('{canvas}');
                const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)
                    .data.buffer); return new Set(d).size }})()""")
            assert n >= least, (canvas, n)
            assert re.search(r"\d", p.run(f"document.getElementById('{canvas}').ariaLabel"))
        assert browser.colors(p.screenshot()) > 200
        check_clean(p, s)


def check_sequence_bars(p, s):
    """A bar is full where a sequence is as long as its context."""
    q = s.get("/map")["sequences"][0]
    n = q["device_tokens"] + q["host_tokens"] + q["disk_tokens"]
    wait_text(p, ".sequence .amount", f"{n:,} of 4,000 tokens")
    p.wait(f"""(() => {{ const bar = document.querySelector('.sequence .bar');
        const filled = [...bar.children].reduce((a, e) => a + e.getBoundingClientRect().width, 0);
        return Math.abs(filled / bar.clientWidth - {n} / 4000) < 0.01 }})()""")


def test_keyboard_only():
    with Server(*SPARSE, program=FAULT) as s:
        s.post("/v1/completions", LONG)
        p = open_page(s)
        p.wait("!document.getElementById('heat-shown').hidden")
        assert focus(p) == "prompt"
        p.type("one")
        p.key("Enter", shift=True)
        p.type("two")
        assert p.run("document.getElementById('prompt').value") == "one\ntwo"
        p.key("Enter")
        wait_text(p, "#state", "running")
        p.wait("document.querySelector('.model .said').textContent.length > 20")
        tab_to(p, "stop")
        p.key("Enter")
        wait_text(p, ".model .note", "Stopped")
        assert focus(p) == "prompt"
        s.wait_idle()
        p.type("again")
        p.key("Enter")
        p.wait("document.querySelector('.model:last-child .said').textContent.length > 20")
        p.key("Escape")
        wait_text(p, ".model:last-child .note", "Stopped")
        s.wait_idle()
        tab_to(p, "Retry")
        p.key("Enter")
        wait_text(p, "#state", "running")
        assert focus(p) == "stop"
        p.key("Enter")
        settled(p)
        s.wait_idle()
        tab_to(p, "Settings")
        p.key("Enter")
        tab_to(p, "most")
        p.type("7")
        walk_heat(p)
        p.run("document.activeElement.blur()")
        tab_to(p, "clear")
        p.key(" ")
        assert p.run("document.querySelectorAll('.entry').length") == 0 and focus(p) == "prompt"
        p.type("short")
        p.key("Enter")
        wait_text(p, ".model .note", "answer 7 tokens")
        assert "cut at the most tokens" in text_of(p, ".model .note")
        check_clean(p, s)


def walk_heat(p):
    """The map of layers and heads: its radio buttons, its cells, its table."""
    p.wait("document.getElementById('heat').ariaLabel.startsWith('hit rate')")
    for _ in range(30):
        if p.run("document.activeElement.name === 'heat'"):
            break
        p.key("Tab")
    p.key("ArrowRight")
    p.wait("document.getElementById('heat').ariaLabel.startsWith('attention mass')")
    tab_to(p, "heat")
    for key, where in (("ArrowRight", "layer 0, head 0"), ("ArrowRight", "layer 1, head 0"),
                       ("ArrowDown", "layer 1, head 1"), ("ArrowDown", "layer 1, head 1"),
                       ("ArrowRight", "layer 1, head 1"), ("ArrowLeft", "layer 0, head 1"),
                       ("ArrowUp", "layer 0, head 0"), ("ArrowUp", "layer 0, head 0")):
        p.key(key)
        assert re.fullmatch(where + r": hit rate [\d.]+%, attention mass [\d.]+%",
                            text_of(p, "#heat-cell")), (key, where, text_of(p, "#heat-cell"))
    tab_to(p, "As a table")
    p.key("Enter")
    p.wait("document.querySelectorAll('#heat-table td').length === 4")
    assert "attention mass" in text_of(p, "#heat-table")


def test_key():
    with Server(env={"KVDRIVE_API_KEY": KEY}) as s:
        p = open_page(s)
        p.wait("document.getElementById('key-dialog').open")
        assert focus(p) == "key"
        p.type("sk-wrong")
        p.key("Enter")
        wait_text(p, "#key-why", "refused")
        p.wait("document.getElementById('key-dialog').open")
        p.key("Escape")
        wait_text(p, "#state", "a key is needed")
        p.run("document.getElementById('most').value = 5")
        say(p, "hello")  # asks again
        p.wait("document.getElementById('key-dialog').open")
        p.type(KEY)
        p.key("Enter")
        wait_text(p, ".model .note", "answer 5 tokens")
        wait_text(p, "#model", "tokens")
        wait_text(p, "#state", "idle")
        kept = p.run("""Promise.all([indexedDB.databases(), caches.keys()]).then(([a, b]) =>
            [localStorage.length, sessionStorage.length, document.cookie, a.length, b.length])""")
        assert kept == [0, 0, "", 0, 0], kept
        assert KEY not in p.run("document.documentElement.outerHTML")
        assert p.run("document.getElementById('key').value") == ""
        assert all(KEY not in url for _, url in p.asked)
        refused = [e for e in p.problems if "401" in str(e)]  # the browser tells those itself
        assert refused == p.problems, p.problems
        p.open(f"http://127.0.0.1:{s.port}/")  # nothing was kept
        p.wait("document.getElementById('key-dialog')?.open")


# window.sent has the bodies of requests of the chat, which get window.said, a character an event.
# window.thought is the reasoning before it.  window.broken: the connection is lost after that;
# window.dead: before it; window.failed: the server's message after that.
ANSWERING = """(() => { const real = window.fetch; window.sent = [];
    window.fetch = (path, o) => {
        if (path !== "v1/chat/completions") return real(path, o);
        sent.push(JSON.parse(o.body));
        if (window.dead) return Promise.reject(new TypeError("Failed to fetch"));
        const event = (x) => "data: " + JSON.stringify(x) + "\\n\\n";
        const deltas = [...window.said].map((content) => ({ content }));
        if (window.thought) deltas.unshift({ reasoning_content: window.thought });
        const text = deltas.map((delta) => event({ choices: [{ delta }] })).join("")
            + (window.failed ? event({ error: { message: window.failed } }) : "data: [DONE]\\n\\n");
        return Promise.resolve(new Response(!window.broken ? text : new ReadableStream({
            start(c) { c.enqueue(new TextEncoder().encode(text.slice(0, -14))) },
            pull(c) { setTimeout(() => c.error(new TypeError("network error")), 200) } }))) }
    })();"""


def answer_with(p, text):
    p.run(f"window.said = {json.dumps(text)}; if (!window.sent) {{ {ANSWERING} }}")


def test_text_stays_text():
    with Server() as s:
        p = open_page(s)
        answer_with(p, HOSTILE)
        say(p, HOSTILE)
        p.wait("document.querySelector('.model .note') !== null")
        assert text_of(p, ".user .said") == text_of(p, ".model .said") == HOSTILE
        assert p.run("document.querySelectorAll('#log img, #log script').length") == 0
        assert "owned" not in p.run("document.title")
        refused = p.run("""(() => { try { document.body.innerHTML = "x"; return "" }
                                   catch (e) { return e.name } })()""")
        assert refused == "TypeError"  # trusted types: no markup from text, by mistake either
        # the report of the one before may come only now
        assert p.run("""new Promise((r) => { document.onsecuritypolicyviolation = (e) =>
            e.effectiveDirective === "require-trusted-types-for" || r(e.effectiveDirective);
            const e = document.createElement("img");
            e.src = "http://127.0.0.2:9/x"; document.body.append(e) })""") == "img-src"


# An element that shows texts that came one after the other.
MARKDOWN = """globalThis.shown = async (parts) => {
    const { growing } = await import("/page/markdown.js");
    const place = document.createElement("div"), g = growing(place);
    for (const x of parts) g.add(x);
    g.end();
    return place };"""

CODE = ('<div class="code"><div class="head"><span>{}</span></div>'
        '<pre tabindex="0"><code>{}</code></pre></div>')
A = '<a href="{}" target="_blank" rel="noopener noreferrer nofollow">{}</a>'
SUBSET = (
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A *b*\ntext\n### C #", "<h4>A <em>b</em></h4><p>text</p><h6>C</h6>"),
    ("#tag, a_b_c, 2*3*4 x, a * b * c", "<p>#tag, a_b_c, 2<em>3</em>4 x, a * b * c</p>"),
    ("**b** *e* ***x*** ~~s~~ __b__ _e_ ~n~", "<p><strong>b</strong> <em>e</em> <em><strong>x"
     "</strong></em> <del>s</del> <strong>b</strong> <em>e</em> ~n~</p>"),
    ("**a *b* c** **open *x*", "<p><strong>a <em>b</em> c</strong> **open <em>x</em></p>"),
    ("**a*", "<p>*<em>a</em></p>"),
    (r"\*a\* \# \(x\) `\*` ``a ` b`` `open",
     r"<p>*a* # \(x\) <code>\*</code> <code>a ` b</code> `open</p>"),
    ("---\n***\n- - -", "<hr><hr><hr>"),
    ("> a\nb\n> - c\n\nd", "<blockquote><p>a<br>b</p><ul><li>c</li></ul></blockquote><p>d</p>"),
    ("- a\n  - b\n    - c\n- d\n", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d"
     "</li></ul>"),
    ("3. a\n  - b\n4. c\nd\n\ne", '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c<br>d</li></ol>'
     "<p>e</p>"),
    ("- a\n\n  b\n- c", "<ul><li><p>a</p><p>b</p></li><li><p>c</p></li></ul>"),
    ("- a\n1. b", '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>'),
    ("In 2019\n2020. was", "<p>In 2019<br>2020. was</p>"),
    ("1. x\n   ```c\n   int a;\n     b\n   ```\n2. y", '<ol start="1"><li>x'
     + CODE.format("c", "int a;\n  b") + "</li><li>y</li></ol>"),
    ("a\n```py x\nif a:\n\tb < c\n\n# d\n```\ne", "<p>a</p>"
     + CODE.format("py", "if a:\n    b &lt; c\n\n# d") + "<p>e</p>"),
    ("````\n```\n~~~\n````", CODE.format("", "```\n~~~")),
    ("```\nnever **closed**\n\n- <b>", CODE.format("", "never **closed**\n\n- &lt;b&gt;")),
    ("text\n| a | b \\| c |\n|:-:|--:|\n| *1* | 2 | 3 |\n| x |\n\nend", "<p>text</p>"
     '<div class="table" tabindex="0"><table><thead><tr><th class="center" scope="col">a</th>'
     '<th class="end" scope="col">b | c</th></tr></thead><tbody><tr><td class="center"><em>1</em>'
     '</td><td class="end">2</td></tr><tr><td class="center">x</td></tr></tbody></table></div>'
     "<p>end</p>"),
    ("a | b\nc | d", "<p>a | b<br>c | d</p>"),
    ('[a *b*](https://x.org/(y) "t") <https://z.org/>', "<p>"
     + A.format("https://x.org/(y)", "a <em>b</em>") + " "
     + A.format("https://z.org/", "https://z.org/") + "</p>"),
    ("(see https://x.org/a_b_c). **https://y.org/**", "<p>(see "
     + A.format("https://x.org/a_b_c", "https://x.org/a_b_c") + "). <strong>"
     + A.format("https://y.org/", "https://y.org/") + "</strong></p>"),
    ("![alt](https://x.org/i.png)", "<p>" + A.format("https://x.org/i.png", "alt") + "</p>"),
)
# Nothing of these becomes an element or an attribute.
PLAIN = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<b onclick='x'>b</b>",
         "[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,x)",
         "[a](java\tscript:alert(1))", "[a](\x01javascript:alert(1))", "[a](vbscript:x)",
         "[a](//evil.example)",
         "[a](/health)", "[a](file:///etc/passwd)", "[a](blob:x)", "![a](data:x)",
         "<javascript:alert(1)>", "[a](https://)", "[a](<javascript:x>)", "&lt;b&gt; &amp; &#60;",
         "[a]: javascript:x", "[[[[", "](", "**", "\u202e\ufeff\u0000")
TAGS = {"P", "BR", "H4", "H5", "H6", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "STRONG", "EM", "DEL",
        "CODE", "PRE", "A", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "DIV", "SPAN"}


def test_markdown():
    """What is shown of each text, whole or by characters; all else stays text."""
    with Server() as s:
        p = open_page(s)
        p.run(MARKDOWN + "0")
        html = "shown({}).then((e) => e.innerHTML)"
        for text, want in SUBSET:
            for parts in ([text], list(text)):
                assert (got := p.run(html.format(json.dumps(parts)))) == want, (text, got, want)
        for text in PLAIN:
            got = p.run(f"""shown([{json.dumps(text)}]).then((e) =>
                [e.textContent, e.querySelectorAll('*').length, e.firstElementChild.tagName])""")
            assert got == [text.strip(), 1, "P"], (text, got)
        hostile = "\n\n".join([*PLAIN, *(t for t, _ in SUBSET if "never" not in t)])
        tags, names, links = p.run(f"""shown([...{json.dumps(hostile)}]).then((e) => {{
            const all = [...e.querySelectorAll('*')];
            return [all.map((x) => x.tagName), all.flatMap((x) => x.getAttributeNames()),
                    [...e.querySelectorAll('a')].map((x) => x.protocol)] }})""")
        assert set(tags) <= TAGS and set(links) == {"https:"}, set(tags) - TAGS
        assert set(names) <= {"class", "tabindex", "start", "scope", "href", "target", "rel"}, names
        check_large(p)
        check_clean(p, s)


def check_large(p):
    """Deep and long ones take time by their length, and no stack."""
    for unit in ("> ", "- ", "[", "](", "[](", "*a ", "`", "``a`", "|", "<", "a\n", "~~~\n", "_*"):
        n = 50000 // len(unit)
        took, deepest = p.run(f"""(async () => {{ const start = performance.now();
            const e = await shown([{json.dumps(unit)}.repeat({n}), "x"]);
            const took = performance.now() - start, depth = new Map([[e, 0]]);
            for (const x of e.querySelectorAll("*")) depth.set(x, depth.get(x.parentElement) + 1);
            return [took, Math.max(...new Set(depth.values()))] }})()""")
        assert deepest < 40, (unit, deepest)
        assert took < 1000 * limit_of(2, took / 1000), (unit, took)


def press(p, label, last=True):
    p.run(f"""[...document.querySelectorAll('#log button[aria-label="{label}"]')]
              .at({-1 if last else 0}).click()""")


def settled(p):
    p.wait("document.getElementById('log').ariaBusy === 'false'")


def roles(p):
    return p.run("sent.at(-1).messages.map((m) => m.role[0] + ':' + m.content)")


def test_copy_retry_edit():
    with Server() as s:
        p = open_page(s)
        p.browser.send("Browser.grantPermissions",
                       permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        p.send("Page.bringToFront")
        copied = "navigator.clipboard.readText()"
        answer_with(p, "**one**\n```c\nint a;\n```")
        say(p, "first")
        settled(p)
        assert text_of(p, ".model .said strong") == "one"
        assert p.run("getComputedStyle(document.querySelector('.model pre')).overflowX") == "auto"
        for label, want in (("Copy the answer", "**one**\n```c\nint a;\n```"),
                            ("Copy the code", "int a;"), ("Copy the message", "first")):
            press(p, label)
            p.wait(f"document.activeElement.ariaLabel === '{label}' &&"
                   "document.activeElement.textContent === 'Copied'")
            assert p.run(copied) == want, label
        # a page that is not from this machine and has no TLS has no such clipboard
        p.run("navigator.clipboard.writeText = undefined")
        press(p, "Copy the answer")
        p.wait("document.activeElement.textContent === 'Copied'")
        assert p.run(copied).startswith("**one**") and focus(p) == "Copied"
        answer_with(p, "two")
        press(p, "Answer again")  # in the place of the first answer
        settled(p)
        assert roles(p) == ["u:first"] and text_of(p, ".model .said") == "two"
        assert p.run("document.querySelectorAll('.entry').length") == 2
        say(p, "second")
        settled(p)
        assert roles(p) == ["u:first", "a:two", "u:second"]
        assert p.run("""[...document.querySelectorAll('.retry')]
                        .map((e) => e.offsetWidth > 0).join()""") == "false,true"
        edit_first(p)
        check_clean(p, s)


def edit_first(p):
    """Escape leaves all as it was, Enter sends and drops what follows."""
    press(p, "Edit the message", last=False)
    assert p.run("document.activeElement.value") == "first"
    assert "all that follows" in text_of(p, ".edit .note")
    p.key("Escape")
    assert p.run("document.querySelectorAll('.entry').length") == 4
    assert p.run("document.activeElement.ariaLabel") == "Edit the message"
    p.key("Enter")
    p.run("document.activeElement.select()")
    p.type("edited")
    p.key("Enter", shift=True)
    p.type("text")
    p.key("Enter")
    settled(p)
    assert roles(p) == ["u:edited\ntext"] and focus(p) == "prompt"
    assert p.run("[...document.querySelectorAll('.said')].map((e) => e.textContent)") == [
        "edited\ntext", "two"]


def test_reasoning():
    """It is text above the answer, which closes it, and no part of what is copied."""
    with Server() as s:
        p = open_page(s)
        p.run("window.thought = '<b>first</b>\\n*then*'")
        answer_with(p, "")
        say(p, "why")
        settled(p)
        assert text_of(p, ".reasoning p") == "<b>first</b>\n*then*"
        assert p.run("document.querySelector('.reasoning').open")
        assert p.run("document.querySelector('[aria-label=\"Copy the answer\"]')") is None
        answer_with(p, "so")
        press(p, "Answer again")
        settled(p)
        assert text_of(p, ".model .said") == "so"
        assert p.run("[...document.querySelectorAll('.reasoning')].map((e) => e.open)") == [False]
        say(p, "and")
        settled(p)
        assert p.run("sent.at(-1).messages") == [
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": "so", "reasoning_content": "<b>first</b>\n*then*"},
            {"role": "user", "content": "and"}]
        check_clean(p, s)


def test_reasons():
    """An error leaves what has come, says why in our words, and can be tried again."""
    with Server() as s:
        p = open_page(s)
        answer_with(p, "half of *it*")
        for state, has, want in (
                ("broken", True, "not complete: the connection to the server was lost"),
                ("dead", False, "No answer: the server cannot be reached; it may have ended"),
                ("failed", True, "not complete: the device failed")):
            p.run("document.getElementById('clear').click();"
                  f"window.{state} = 'the device failed'")
            say(p, "please")
            wait_text(p, ".model .note", ": ")
            settled(p)
            assert text_of(p, ".model .note.bad").endswith(want), text_of(p, ".model .note")
            assert text_of(p, ".user .said") == "please"
            assert p.run("document.querySelectorAll('.model em').length") == has
            assert (text_of(p, ".model .said") == "half of it") == has
            assert (p.run("document.querySelector('[aria-label=\"Copy the answer\"]')") is not None
                    ) == has
            p.run(f"window.{state} = undefined")
            press(p, "Answer again")
            settled(p)
            assert roles(p) == ["u:please"] and text_of(p, ".model .said") == "half of it"
            assert p.run("document.querySelectorAll('.bad').length") == 0
        check_clean(p, s)


def test_errors_are_told():
    with Server("--parallel", "1", "--queue", "1") as s:
        p = open_page(s)
        say(p, "x" * 30000)
        wait_text(p, ".model .note", "No answer: ")
        assert "at most 4000" in text_of(p, ".model .note"), text_of(p, ".model .note")
        p.run("document.getElementById('most').value = 3")
        say(p, "short")  # what was refused is no part of the conversation
        wait_text(p, ".model:last-child .note", "answer 3 tokens")
        assert [e for e in p.problems if "400" in str(e)] == p.problems, p.problems
    wait_text(p, "#state", "unreachable")


CONTRAST = """(() => { const css = getComputedStyle(document.documentElement);
    const light = (name) => { const c = css.getPropertyValue(name).trim();
        const hex = c.length === 4 ? c.replace(/[0-9a-f]/g, "$&$&") : c;
        const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
            .map((x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 };
    return [["--ink", "--ground"], ["--ink", "--panel"], ["--soft", "--ground"],
        ["--soft", "--panel"], ["--bad", "--ground"], ["--busy", "--panel"],
        ["--on-accent", "--accent"]].map((p) => { const [a, b] = p.map(light);
            return [p.join(), Math.max(a, b) / Math.min(a, b)] }) })()"""


def check_narrow_answer(p):
    """What is wide scrolls in its own place; lists have their marks."""
    answer_with(p, "- one\n\n```\n" + "wide " * 40 + "\n```\n|" + "a|" * 30 + "\n|" + "-|" * 30)
    say(p, "more")
    settled(p)
    assert p.run("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)"
                 "(document.getElementById('log'))")
    assert p.run("""[...document.querySelectorAll('.said pre, .said .table')]
        .map((e) => getComputedStyle(e).overflowX + (e.scrollWidth > e.clientWidth)).join()"""
                 ) == "autotrue,autotrue"
    assert p.run("getComputedStyle(document.querySelector('.said li')).display") == "list-item"


def test_narrow_dark_and_still():
    with Server(*SPARSE, program=FAULT) as s:
        s.post("/v1/completions", LONG)
        shots = {}
        for dark in (False, True):
            p = open_page(s, width=320, height=640, dark=dark, still=True)
            p.wait("!document.getElementById('heat-shown').hidden")
            say(p, "wide" * 40)
            wait_text(p, "#state", "running")
            assert p.run("document.getAnimations().length") == 0
            assert p.run("document.documentElement.scrollWidth") == 320
            assert p.run("(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)"
                         "(document.getElementById('log'))")
            p.run("document.querySelector('#heat-table').closest('details').open = true")
            assert p.run("""[...document.querySelectorAll('button, textarea, canvas, .tier')]
                .every((e) => e.getBoundingClientRect().right <= 320)""")
            p.key("Escape")
            settled(p)
            check_narrow_answer(p)
            for pair, ratio in p.run(CONTRAST):
                assert ratio >= 4.5, (dark, pair, ratio)
            shots[dark] = p.screenshot()
            assert browser.colors(shots[dark]) > 100
            check_clean(p, s)
        ground = [browser.pixels(shots[dark])[0][-2][:3] for dark in (False, True)]
        assert min(ground[0]) > 200 and max(ground[1]) < 60, ground
        p = open_page(s)
        say(p, "moves")
        p.wait("document.getAnimations().length > 0")  # where that is not declined
        p.key("Escape")


if __name__ == "__main__":
    tests = dict(globals())
    if not browser.PROGRAM:
        needed = [n for n, f in tests.items() if n.startswith("test_") and "open_page" in
                  f.__code__.co_names]
        print("skipped: no Chromium: " + ", ".join(needed))
        tests = {n: f for n, f in tests.items() if n not in needed}
    main(tests)
