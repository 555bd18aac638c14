#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Clients that leave in every state, read slowly, send half of what they should, or wait long."""
import json
import os
import random
import resource
import signal
import socket
import struct
import threading
import time

from kvserver import PATIENCE, SLOW, Server, in_time, main, text_of

COMPLETION = "/v1/completions"
FAULT = os.environ.get("KVD_TEST_FAULT")  # its steps take at least 2 ms
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
        in_time(time.monotonic() - start, 0.1)
        assert s.slots()["waiting"] == 1
        data = until(second, b": keepalive")  # on the wall clock
        data += until(second, b": keepalive")
        assert 0.5 < time.monotonic() - start and b"data:" not in data
        in_time(time.monotonic() - start, 1.5)
        start = time.monotonic()
        assert s.get("/health") == {"status": "ok"}
        in_time(time.monotonic() - start, 0.1)
        first.close()
        until(second, b"data: ")
        second.close()
        s.wait_idle()


def test_leaves_in_every_state():
    """Closing frees the sequence within a second, and no other."""
    with Server("--parallel", "2", program=FAULT) as s:
        stays = s.raw_post(COMPLETION, ENDLESS)
        until(stays, b"data: ")
        for k, stream in enumerate((True, False)):
            for i, state in enumerate(("prompt", "answer")):
                c = s.raw_post(COMPLETION, {**LONG, "prompt": [70 + 2 * k + i] * 3000,
                                            "stream": stream})
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


def leave_somehow(s, rng, held):
    """A request whose client leaves, in one of the states that it can be in."""
    body = {**LONG, "prompt": [68] * rng.randrange(1, 600), "stream": rng.random() < 0.7,
            "n": rng.randrange(1, 3), "max_tokens": 200}
    how = rng.randrange(6)
    if how == 0:  # half sent: the head, or some of the body
        text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{"
        c = s.raw(text[:rng.randrange(len(text))])
    elif how == 1:  # streams much and is not read, until it leaves some requests later
        c = s.raw_post(COMPLETION, {**body, "n": 1, "stream": True, "logprobs": 20,
                                    "max_tokens": 1500})
        held.append(c)
        c = held.pop(0) if len(held) > 2 else None  # there are three slots
    elif how == 2:  # after the first bytes of a stream
        c = s.raw_post(COMPLETION, {**body, "stream": True})
        until(c, b"data: " if rng.random() < 0.5 else b"200 OK")
    else:  # queued, in its prompt or answer: as it comes
        c = s.raw_post(COMPLETION, body)
        time.sleep(rng.random() * 0.01)
    if not c:
        return
    if rng.random() < 0.3:  # a reset in place of an orderly end
        c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.close()


def test_many_leave():
    """Clients leave at random moments, in every state; descriptors, sequences and memory are what
    they were, and so are answers.  KVD_LEAVE_CLIENTS (200) says how many."""
    rng = random.Random(1)
    many = int(os.environ.get("KVD_LEAVE_CLIENTS", "200"))
    ask = {"prompt": "what remains", "max_tokens": 20, "logit_bias": BIAS}
    with Server("--parallel", "3", "--queue", "100") as s:
        want = s.post(COMPLETION, ask)["choices"][0]["text"]
        files, rss, held, slowest = s.files(), 0, [], 0.0
        for i in range(many):
            leave_somehow(s, rng, held)
            if i % 50 == 49:  # what is left of them is freed within a second
                while held:
                    held.pop().close()
                start = time.monotonic()
                s.wait_idle(1)
                slowest = max(slowest, time.monotonic() - start)
                rss = rss if i > 100 else s.rss_kib()
        s.wait_idle(1)
        assert s.post(COMPLETION, ask)["choices"][0]["text"] == want
        s.wait_for(lambda: s.files() <= files)
        print(f"{many} left; idle after {slowest:.2f} s at most; {rss} KiB, then {s.rss_kib()}")
        if SLOW == 1:  # sanitizers keep what was freed
            assert s.rss_kib() < rss * 1.05 + 2048, (rss, s.rss_kib())


def test_ends_with_what_was_sent():
    """The end comes together with the last bytes, however few: the descriptor is freed at once, and
    those of others are."""
    text = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n{"
    with Server() as s:
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
        time.sleep(0.3)
        files = s.files()
        for cut in (1, 10, 40, len(text) - 1, len(text)):
            for _ in range(10):
                s.raw(text[:cut]).close()
            for _ in range(3):
                c = s.raw_post(COMPLETION, {**LONG, "prompt": "x", "max_tokens": 100})
                until(c, b"data: ")
                c.close()
            s.wait_for(lambda: s.files() <= files, 2)
        # a whole request is answered all the same, where its answer needs no waiting; also where
        # nothing has happened for a while, and limits of time are looked at when it comes
        for wait in (0, 0.1, 0.15, 0.1):
            c = s.raw()
            time.sleep(wait)
            c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            c.shutdown(socket.SHUT_WR)
            until(c, b"200 OK", b"ok")
            c.close()


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


def test_who_has_waited_is_no_slow_reader():
    """The time that a reader has begins when there is something to read, however long it waited."""
    with Server("--parallel", "1", "--queue", "100", "--read-timeout", "0.5", program=FAULT) as s:
        held = s.raw_post(COMPLETION, ENDLESS)
        until(held, b"data: ")
        ask = {"prompt": "x", "max_tokens": 1, "stream": True}
        waiting = [s.raw_post(COMPLETION, ask) for _ in range(100)]
        s.wait_for(lambda: s.slots()["waiting"] == 100)
        time.sleep(0.6)
        held.close()
        for c in waiting:
            until(c, b"[DONE]")
            c.close()


def test_half_sent_and_idle():
    """1,000 idle connections and 100 half-sent requests change nothing; limits of time end them."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, files[1]), files[1]))
    with Server("--read-timeout", "1.5", "--idle-timeout", "4", "--connections", "2000") as s:
        idle = [s.raw() for _ in range(1000)]
        half = [s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
                for _ in range(50)]
        half += [s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                       b"Content-Length: 50\r\n\r\n{") for _ in range(50)]
        start = time.monotonic()
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})
        in_time(time.monotonic() - start, 0.5)
        for c in half:
            c.settimeout(PATIENCE)
            while c.recv(1000):
                pass
        assert 1 < time.monotonic() - start
        in_time(time.monotonic() - start, 4)
        for c in idle:
            c.settimeout(PATIENCE)
            assert c.recv(1000) == b""
        in_time(time.monotonic() - start, 9)


def test_queue_limit():
    with Server("--parallel", "1", "--queue", "2", program=FAULT) as s:
        held = [s.raw_post(COMPLETION, ENDLESS)]
        until(held[0], b"data: ")
        held += [s.raw_post(COMPLETION, ENDLESS) for _ in range(2)]
        s.wait_for(lambda: s.slots()["waiting"] == 2)
        status, headers, data = s.call("POST", COMPLETION, LONG)
        assert status == 429 and int(headers["Retry-After"]) >= 1, (status, data)
        e = json.loads(data)["error"]
        assert e["type"] == "rate_limit_error", e
        assert "2 requests are waiting" in e["message"] and "2 may (--queue)" in e["message"], e
        for c in held:
            c.close()
        s.wait_idle()
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 2})


def test_free_slots_are_no_queue():
    """What a free slot is for waits for the engine alone, and does not count: one for all choices
    of a prompt, one for each prompt of a batch.  The engine hangs in a step meanwhile."""
    ask = {**ENDLESS, "stream": False}
    for queue, takes in ((1, ({}, {}, {})), (1, ({"n": 3}, {"prompt": ["a", "b"]})),
                         (2, ({"prompt": ["a"] * 9},))):
        with Server("--parallel", "4", "--queue", str(queue), program=FAULT) as s:
            s.exits = (-signal.SIGKILL,)
            held = [s.raw_post(COMPLETION, ENDLESS)]
            until(held[0], b"data: ")
            s.process.send_signal(signal.SIGUSR2)
            s.wait_for(lambda: "fault: a step hangs" in s.lines)
            try:
                for i, more in enumerate((*takes, *[{}] * queue)):
                    held.append(s.raw_post(COMPLETION, {**ask, **more}))
                    s.wait_for(lambda: s.slots()["waiting"] == i + 1)
                status, headers, data = s.call("POST", COMPLETION, {**LONG, "stream": False})
                assert status == 429 and headers["Retry-After"], (takes, status, data)
            finally:
                s.process.kill()
                s.process.wait(PATIENCE)
            for c in held:
                c.close()


def test_as_many_as_there_is_room_for():
    """Whom the end was told finds the slot free, or his place in the queue: of as many clients as
    both take, and one request of each at a time, none is turned away."""
    def ask(s, statuses, more):
        for _ in range(40):
            statuses.append(s.call("POST", COMPLETION, {"prompt": "x", "max_tokens": 2, **more})[0])

    with Server("--parallel", "2", "--queue", "1") as s:
        for clients in ([{}] * 3, [{"prompt": ["a", "b", "c"]}, {"n": 3, "max_tokens": 9}]):
            held = [s.raw_post(COMPLETION, {**ENDLESS, "n": 2}) for _ in range(2)]
            for c in held:  # and they find those of who has left
                until(c, b"data: ")
                c.close()
            s.wait_idle()
            statuses = []
            threads = [threading.Thread(target=ask, args=(s, statuses, more)) for more in clients]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert statuses == [200] * 40 * len(clients), statuses


def test_limits():
    with Server("--body-limit", "2000", "--connections", "40") as s:
        status, _, data = s.call("POST", COMPLETION, "x" * 2001)
        assert status == 413 and b"2001 bytes: at most 2000 (--body-limit)" in data, data
        c = s.raw(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                  b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(100):
                c.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        except OSError:
            pass  # closed
        assert b" 413 " in c.recv(1000)
        c = s.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40000 + b"\r\n\r\n")
        assert b" 431 " in c.recv(1000)
        many = [s.raw() for _ in range(40)]  # the next ones wait outside, or are refused
        for c in many:
            c.close()
        s.wait_for(lambda: s.call("GET", "/health")[0] == 200)


def preempted(s, more):
    """Choices of three prompts, one after the other, then together, when some are preempted."""
    ask = [{"prompt": [70 + i] * 200, "max_tokens": 500, "logit_bias": BIAS, **more}
           for i in range(3)]
    want = [s.post(COMPLETION, a)["choices"][0] for a in ask]
    s.call("DELETE", "/cache")
    got = [None] * 3

    def run(i):
        got[i] = s.post(COMPLETION, ask[i])["choices"][0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert any("preempted" in line for line in s.lines), s.lines
    return want, got


def test_preempts():
    """More than memory holds: some are preempted and resume with the same text."""
    with Server("--parallel", "3", "--deterministic", "--kv-tokens", "1280", ctx=1200) as s:
        want, got = preempted(s, {})
        assert got == want
        # one alone that needs more than there is ends by its length
        a = s.post(COMPLETION, {"prompt": [65] * 1000, "max_tokens": 500, "logit_bias": BIAS})
        assert a["choices"][0]["finish_reason"] == "length"


def test_preempted_parts_where_it_is_close():
    """Not deterministic, a text may part from what it is alone, where both tokens are as likely."""
    with Server("--parallel", "3", "--kv-tokens", "1280", ctx=1200) as s:
        parted = []
        for want, got in zip(*preempted(s, {"logprobs": 5})):
            w, g = want["logprobs"], got["logprobs"]
            assert len(w["tokens"]) == len(g["tokens"]) == 500
            at = [i for i in range(500) if w["tokens"][i] != g["tokens"][i]]
            if at:
                i = at[0]
                parted.append(w["token_logprobs"][i] - w["top_logprobs"][i][g["tokens"][i]])
        print(f"{len(parted)} of 3 parted, at gaps of {parted}")
        assert all(gap < 0.05 for gap in parted), parted


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
        before = s.metric("steps_total")
        a = s.post(COMPLETION, short)
        assert a["usage"]["completion_tokens"] == 1200
        assert s.metric("steps_total") - before < 700, (before, s.metric("steps_total"))
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
