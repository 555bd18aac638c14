#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Clients that leave in every state, read slowly, send half of what they should, or wait long."""
import json
import os
import random
import re
import socket
import threading
import time

from kvserver import SLOW, Server, main, text_of

COMPLETION = "/v1/completions"
FAULT = os.environ.get("KVDRIVE_FAULT")  # its steps take at least 2 ms
BIAS = {"261": -100}
LONG = {"prompt": [67] * 3000, "max_tokens": 900, "logit_bias": BIAS, "stream": True}
# an answer of about 7 s, while nobody reads it
ENDLESS = {"prompt": [67] * 50, "max_tokens": 3500, "logit_bias": BIAS, "stream": True}


def until(s, *words):
    """Reads a raw socket until all words were seen."""
    data = b""
    while not all(w in data for w in words):
        more = s.recv(65536)
        assert more, data[-300:]
        data += more
    return data


def states(s):
    return [x["state"] for x in s.slots()["slots"]]


def test_headers_come_at_once():
    with Server("--parallel", "1", "--keepalive", "0.3", program=FAULT) as s:
        first = s.raw_post(COMPLETION, ENDLESS)
        until(first, b"200 OK", b"data: ")
        start = time.monotonic()
        second = s.raw_post(COMPLETION, ENDLESS)  # waits: there is one slot
        until(second, b"200 OK", b"text/event-stream")
        assert time.monotonic() - start < 0.1 * SLOW
        assert s.slots()["waiting"] == 1
        data = until(second, b": keepalive")  # on the wall clock
        data += until(second, b": keepalive")
        assert 0.5 < time.monotonic() - start < 1.5 * SLOW and b"data:" not in data
        start = time.monotonic()
        assert s.get("/health") == {"status": "ok"} and time.monotonic() - start < 0.1 * SLOW
        first.close()
        until(second, b"data: ")
        second.close()
        s.wait_idle()


def test_leaves_in_every_state():
    """Closing frees the sequence within a second, and no other."""
    with Server("--parallel", "2", program=FAULT) as s:
        stays = s.raw_post(COMPLETION, ENDLESS)
        until(stays, b"data: ")
        for stream in (True, False):
            for state in ("prompt", "answer"):
                c = s.raw_post(COMPLETION, {**LONG, "stream": stream})
                s.wait_for(lambda: state in states(s)[1:] or states(s).count(state) == 2)
                c.close()
                s.wait_for(lambda: s.slots()["running"] == 1, 1)
            # queued: the second slot is taken, the third request waits
            other = s.raw_post(COMPLETION, ENDLESS)
            s.wait_for(lambda: s.slots()["running"] == 2)
            c = s.raw_post(COMPLETION, {**LONG, "stream": stream})
            s.wait_for(lambda: s.slots()["waiting"] == 1)
            c.close()
            s.wait_for(lambda: s.slots()["waiting"] == 0, 1)
            assert s.slots()["running"] == 2
            other.close()
            s.wait_for(lambda: s.slots()["running"] == 1, 1)
        # half a request; then one that shuts its side only
        s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")\
            .close()
        c = s.raw_post(COMPLETION, LONG)
        c.shutdown(socket.SHUT_WR)
        s.wait_for(lambda: s.slots()["running"] == 1, 1)
        assert stays.recv(65536)  # the one that stayed goes on
        stays.close()
        s.wait_idle()


def test_many_leave():
    """200 clients leave at random moments; nothing is left behind and answers are the same."""
    rng = random.Random(1)
    ask = {"prompt": "what remains", "max_tokens": 20, "logit_bias": BIAS}
    with Server("--parallel", "3") as s:
        want = s.post(COMPLETION, ask)["choices"][0]["text"]
        files, rss = s.files(), 0
        for i in range(200):
            body = {**LONG, "prompt": [68] * rng.randrange(1, 600), "stream": rng.random() < 0.7,
                    "n": rng.randrange(1, 3), "max_tokens": 200}
            c = s.raw_post(COMPLETION, body)
            time.sleep(rng.random() * 0.01)
            c.close()
            if i == 60:
                s.wait_idle(5)
                rss = s.rss_kib()
        s.wait_idle(5)
        assert s.post(COMPLETION, ask)["choices"][0]["text"] == want
        s.wait_for(lambda: s.files() <= files)
        if SLOW == 1:  # sanitizers keep what was freed
            assert s.rss_kib() < rss * 1.05 + 2048, (rss, s.rss_kib())


def test_slow_reader():
    """Who does not read is paused, then dropped; the others do not notice."""
    with Server("--parallel", "2", "--read-timeout", "2") as s:
        c = socket.socket()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.connect(("127.0.0.1", s.port))
        body = json.dumps({**ENDLESS, "max_tokens": 3900, "logprobs": 20}).encode()
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                  % len(body) + body)
        s.wait_for(lambda: s.slots()["running"] == 1)
        for _ in range(3):
            a = list(s.stream(COMPLETION, {"prompt": "hi", "max_tokens": 30, "logit_bias": BIAS}))
            assert a[-1] == "[DONE]"
        s.wait_idle(6)  # its time is over
        c.close()
        s.wait_for(lambda: any("canceled" in line for line in s.lines))


def test_slow_reader_gets_all():
    with Server("--parallel", "2") as s:
        body = {**ENDLESS, "max_tokens": 2000, "logprobs": 15}
        want = text_of(s.stream(COMPLETION, body))
        c = socket.socket()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.connect(("127.0.0.1", s.port))
        text = json.dumps(body).encode()
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                  b"Content-Length: %d\r\n\r\n" % len(text) + text)
        time.sleep(0.5)
        raw = b""
        while True:
            more = c.recv(4096)
            if not more:
                break
            raw += more
        data, rest = b"", raw.split(b"\r\n\r\n", 1)[1]
        while rest:  # chunks of HTTP
            size, _, rest = rest.partition(b"\r\n")
            data += rest[:int(size, 16)]
            rest = rest[int(size, 16) + 2:]
        events = [json.loads(line[6:]) for line in data.decode().split("\n")
                  if line.startswith("data: {")]
        assert text_of(events) == want
        c.close()


def test_half_sent_and_idle():
    """300 idle connections and 60 half-sent requests change nothing; limits of time end them."""
    with Server("--read-timeout", "1.5", "--idle-timeout", "4") as s:
        idle = [s.raw() for _ in range(300)]
        half = [s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
                for _ in range(30)]
        half += [s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                       b"Content-Length: 50\r\n\r\n{") for _ in range(30)]
        start = time.monotonic()
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
        assert time.monotonic() - start < 0.5 * SLOW
        for c in half:
            c.settimeout(4 * SLOW)
            while c.recv(1000):
                pass
        assert 1 < time.monotonic() - start < 4 * SLOW
        for c in idle:
            c.settimeout(8 * SLOW)
            assert c.recv(1000) == b""
        assert time.monotonic() - start < 9 * SLOW


def test_queue_limit():
    with Server("--parallel", "1", "--queue", "2", program=FAULT) as s:
        held = [s.raw_post(COMPLETION, ENDLESS)]
        until(held[0], b"data: ")
        held += [s.raw_post(COMPLETION, ENDLESS) for _ in range(2)]
        s.wait_for(lambda: s.slots()["waiting"] == 2)
        status, headers, data = s.call("POST", COMPLETION, LONG)
        assert status == 429 and int(headers["Retry-After"]) >= 1, (status, data)
        assert json.loads(data)["error"]["type"] == "rate_limit_error"
        for c in held:
            c.close()
        s.wait_idle()
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})


def test_limits():
    with Server("--body-limit", "2000", "--connections", "40") as s:
        assert s.call("POST", COMPLETION, "x" * 2001)[0] == 413
        c = s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(100):
                c.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            assert c.recv(1000) == b""
        except OSError:
            pass  # closed
        c = s.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40000 + b"\r\n\r\n")
        try:
            assert b" 431 " in c.recv(1000)
        except OSError:
            pass
        many = [s.raw() for _ in range(40)]  # the next ones wait outside, or are refused
        for c in many:
            c.close()
        s.wait_for(lambda: s.call("GET", "/health")[0] == 200)


def test_preempts():
    """More than memory holds: some are preempted and resume with the same text."""
    ask = [{"prompt": [70 + i] * 200, "max_tokens": 500, "logit_bias": BIAS} for i in range(3)]
    with Server("--parallel", "3", "--deterministic", "--kv-tokens", "1280", ctx=1200) as s:
        want = [s.post(COMPLETION, a)["choices"][0]["text"] for a in ask]
        s.call("DELETE", "/cache")
        got = [None] * 3

        def run(i):
            got[i] = s.post(COMPLETION, ask[i])["choices"][0]["text"]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert got == want
        assert any("preempted" in line for line in s.lines), s.lines
        # one alone that needs more than there is ends by its length
        a = s.post(COMPLETION, {"prompt": [65] * 1000, "max_tokens": 500, "logit_bias": BIAS})
        assert a["choices"][0]["finish_reason"] == "length"


def steps(s):
    text = s.call("GET", "/metrics")[2].decode()
    return int(re.search(r"^kvdrive_steps_total (\d+)", text, re.M).group(1))


def test_choices_run_beside_each_other():
    """Choices of a short prompt have slots at once, and end together; those of a long one with
    short answers share its evaluation.  Either way the texts are those of one after the other."""
    short = {"prompt": "hello", "n": 4, "seed": 3, "temperature": 1, "max_tokens": 300,
             "ignore_eos": True}
    long = {**short, "prompt": [69] * 3000, "max_tokens": 4}
    with Server("--deterministic", "--parallel", "1") as s:
        want = [[c["text"] for c in s.post(COMPLETION, a)["choices"]] for a in (short, long)]
    with Server("--deterministic", program=FAULT) as s:
        c = s.raw_post(COMPLETION, {**short, "stream": True})
        s.wait_for(lambda: s.slots()["running"] == 4)
        c.close()
        s.wait_idle()
        before = steps(s)
        a = s.post(COMPLETION, short)
        assert a["usage"]["completion_tokens"] == 1200
        assert steps(s) - before < 700, (before, steps(s))
        assert [c["text"] for c in a["choices"]] == want[0]
        a = s.post(COMPLETION, long)
        assert [c["text"] for c in a["choices"]] == want[1]
        assert a["timings"]["prompt_n"] < 4000, a["timings"]
        events = [e for e in s.stream(COMPLETION, short) if e != "[DONE]"]
        for i in range(4):
            assert "".join(c["text"] for e in events for c in e["choices"]
                           if c["index"] == i) == want[0][i]
        # who comes later does not wait for choices that wait
        c = s.raw_post(COMPLETION, {**short, "n": 16, "stream": True})
        s.wait_for(lambda: s.slots()["running"] == 4)
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
        s.wait_for(lambda: s.slots()["running"] == 4)
        c.close()
        s.wait_idle()


def test_batches_like_alone():
    """16 clients at once over 4 slots get what each gets alone."""
    rng = random.Random(3)
    ask = [{"prompt": "client %d says %s" % (i, "la " * rng.randrange(1, 300)), "seed": i,
            "temperature": 0.9, "max_tokens": rng.randrange(5, 60), "stop": ["zz"]}
           for i in range(16)]
    with Server("--deterministic") as s:
        want = [s.post(COMPLETION, a)["choices"][0]["text"] for a in ask]
        for stream in (False, True):
            got = [None] * 16

            def run(i):
                got[i] = text_of(s.stream(COMPLETION, ask[i])) if stream else \
                    s.post(COMPLETION, ask[i])["choices"][0]["text"]

            s.call("DELETE", "/cache")
            threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert got == want


if __name__ == "__main__":
    main(globals())
