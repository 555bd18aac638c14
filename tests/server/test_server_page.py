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
        p.wait("document.getElementById('model').textContent.includes('2 × 4,000 tokens')")
        p.run("""document.getElementById('most').value = 150; window.seen = new Set();
                 new MutationObserver(() => seen.add(document.querySelector('.model .said')
                     ?.textContent.length)).observe(document.getElementById('log'),
                     { subtree: true, childList: true, characterData: true })""")
        say(p, "hello")
        wait_text(p, ".model .note", "answer 150 tokens")
        assert text_of(p, ".user .said") == "hello" and text_of(p, ".model .said") == want
        assert p.run("seen.size") > 5, "it came in one piece"
        assert re.search(r"tokens/s · first after \d", text_of(p, ".model .note"))
        say(p, "and again")  # the conversation goes on: its beginning is in the cache
        wait_text(p, ".model:last-child .note", "from ")
        p.wait("!document.getElementById('heat-shown').hidden")
        wait_text(p, "#state", "idle")
        rows = p.run("[...document.querySelectorAll('.tier')].map((e) => e.innerText)")
        assert [r.split()[0].lower() for r in rows] == ["device", "host", "disk"], rows
        assert "no limit" in rows[2] and "100.0%" not in rows[0]
        p.wait("""[...document.querySelectorAll('.sequence .fill')]
                  .some((e) => e.matches('.host') && e.offsetWidth > 10)""")
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


def test_text_stays_text():
    with Server() as s:
        p = open_page(s)
        p.run("window.said = " + json.dumps(HOSTILE) + """;
            const real = window.fetch;
            window.fetch = (path, o) => path !== "v1/chat/completions" ? real(path, o)
                : Promise.resolve(new Response(["", ...said].map((x) =>
                    "data: " + JSON.stringify({ choices: [{ delta: { content: x } }] }) + "\\n\\n"
                  ).join("") + "data: [DONE]\\n\\n"))""")
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
