#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests that get in each other's way, or want more than their share."""
import json
import os
import select
import signal
import threading
import time

from kvserver import SLOW, Late, Server, main

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
FAULT = os.environ.get("KVD_TEST_FAULT")  # its steps take as long as a signal says
BIAS = {"261": -100}


def at_once(functions):
    """Runs them all; the first mistake is raised."""
    wrong = []

    def run(function):
        try:
            function()
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if wrong:
        raise wrong[0]


def test_echo_beside_prompts():
    """Prompts whose logits are all wanted leave room for the one row that others need: whatever
    comes together in a step, nobody's request fails."""
    ask = [{"prompt": [60 + i] * (20 if i % 2 else 700), "max_tokens": 1, "logit_bias": BIAS,
            **({} if i % 2 else {"echo": True, "logprobs": 1})} for i in range(8)]
    with Server("--parallel", "8") as s:
        got = []
        for _ in range(3):
            at_once([lambda a=a: got.append(s.call("POST", COMPLETION, a)) for a in ask])
            s.call("DELETE", "/cache")
        for status, _, data in got:
            assert status == 200, (status, data[:300])


def test_echo_goes_on_beside_answers():
    """However little of a prompt a step beside answers may take: one whose logits are all wanted
    goes on, and so do those behind it."""
    with Server("--max-gap", "0.01", "--parallel", "3") as s:
        done, told = threading.Event(), [0]

        def read():
            for e in s.stream(COMPLETION, {"prompt": [67] * 50, "max_tokens": 3900,
                                           "logit_bias": BIAS}):
                told[0] += 1
                if done.is_set() or e == "[DONE]":
                    break

        reader = threading.Thread(target=read)
        reader.start()
        s.wait_for(lambda: told[0] > 0)
        at_once([lambda: s.post(COMPLETION, {"prompt": [68] * 60, "max_tokens": 1, "echo": True,
                                             "logprobs": 1}),
                 lambda: s.post(COMPLETION, {"prompt": "hello", "max_tokens": 1})])
        done.set()
        reader.join()
        assert told[0] < 3000, told


def test_small_batches():
    """A batch smaller than such a prompt's least piece is no reason to wait for ever."""
    for parallel in ("1", "4"):
        with Server("-b", "1", "--parallel", parallel) as s:
            at_once([lambda i=i: s.post(COMPLETION, {"prompt": [60 + i] * 50, "max_tokens": 20,
                                                     "echo": i % 2 == 0, "logprobs": 1},
                                        timeout=20)
                     for i in range(5)])


def test_clear_in_a_long_step():
    """A worker waits for the engine while the net thread looks after limits of time: they do not
    get in each other's way, as the thread sanitizer sees."""
    with Server("--parallel", "1", program=FAULT) as s:
        s.process.send_signal(signal.SIGRTMIN + 15)  # 0.5 ms a token: 0.25 s a step
        for i in range(3):
            c = s.raw_post(COMPLETION, {"prompt": [67 + i] * 2500, "max_tokens": 1})
            s.wait_for(lambda: s.slots()["running"] == 1)
            start = time.monotonic()
            assert s.call("DELETE", "/cache")[0] == 200
            c.recv(100)
            c.close()
            assert time.monotonic() - start > 0.1


def test_values_of_a_body():
    """Short values take a hundred times the memory of their text: too many are refused before they
    are read, wherever they are JSON.  In a string they are text."""
    many, lists = 2097152, 262144
    chat = '{"max_tokens":1,"messages":[{"role":"user","content":"x"}'
    calls = ',{"role":"assistant","tool_calls":[%s]}]}'
    call = '{"function":{"name":"f","arguments":"[%s0]"}}'
    with Server() as s:
        s.post("/tokenize", {"content": "[" * (lists + 1) + "," * (many + 1) + '\\",[{'})
        rss = s.rss_kib()
        for text, n in (("[],", lists), ("{},", lists), ("1,", many)):
            body = '{"content":"x","unknown":[' + text * (n - 4) + "0]}"
            assert s.post("/tokenize", body)["count"] == 1
            body = '{"content":"x","unknown":[' + text * (10 << 20) + "0]}"
            assert "values" in s.error("/tokenize", body, None)["message"]
        # calls' arguments are JSON in strings: text, where they would be too many
        body = chat + calls % ",".join([call % ("[]," * 200000)] * 40)
        assert s.error(CHAT, body, "messages")["code"] == "context_length_exceeded"
        call = {"type": "function_call", "call_id": "1", "name": "f",
                "arguments": '{"a":[' + "[]," * lists + "0]}"}
        error = s.error("/v1/responses", {"max_output_tokens": 1, "input": [call]}, "input")
        assert error["code"] == "context_length_exceeded"
        if SLOW == 1:  # sanitizers keep what was freed
            assert s.rss_kib() - rss < 500 << 10, (s.rss_kib(), rss)


def test_half_sent_bodies():
    """Large bodies that are being read share a limit; small ones are read all the same."""
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 199000\r\n\r\n"
    large = {"content": "x" * 150000}
    with Server("--body-limit", "200000", "--read-timeout", "20") as s:
        for wait in (0.1, 0.5, 1, 3):  # until all of it has come, and is not in the socket
            half = [s.raw((head + " " * 190000).encode()) for _ in range(8)]
            time.sleep(wait)
            status, headers, data = s.call("POST", "/tokenize", large)
            if status == 503:
                break
            for c in half:
                c.close()
        assert status == 503, data[:100]
        assert headers["Retry-After"] == "1"
        assert "memory" in json.loads(data)["error"]["message"]
        s.post("/tokenize", {"content": "x" * 60000})
        # what has left takes no memory any more, nor does what was answered
        half[0].close()
        s.wait_for(lambda: s.call("POST", "/tokenize", large)[0] == 200)
        for c in half[1:]:
            c.sendall(b" " * 8999 + b"1")
            c.recv(100)
        for _ in range(20):
            s.post("/tokenize", large)
        for c in half[1:]:
            c.close()


def test_large_bodies_hold_up_none():
    """However many large bodies are at work: small ones are answered before."""
    with Server() as s:
        large = [s.raw_post("/tokenize", {"content": "ab " * (2 << 20)}) for _ in range(3)]
        for _ in range(5):
            assert s.post("/tokenize", {"content": "x"})["count"] == 1
            s.post(COMPLETION, {"prompt": "x", "max_tokens": 1})
        if select.select(large, [], [], 0)[0]:
            raise Late("a large one was answered before")
        for c in large:
            assert b" 200 " in c.recv(100)
            c.close()


def test_headers_of_two_meanings():
    """What a proxy before the server may read otherwise than it does is refused: where a request
    ends, and whom it is for."""
    body = b'{"content":"hi"}'
    length, coded = b"Content-Length: 16\r\n", b"10\r\n" + body + b"\r\n0\r\n\r\n"
    host, chunked = b"Host: localhost\r\n", b"Transfer-Encoding: chunked\r\n"
    with Server() as s:
        for heads, data, want in (
                (host + length, body, 200), (host + chunked, coded, 200),
                (host + length + length, body, 400),
                (host + length + b"content-length: 3\r\n", body, 400),
                (host + b"Content-Length: 3\r\n" + chunked, coded, 400),
                (host + chunked + length, coded, 400),
                (host + b"Host: evil.example\r\n" + length, body, 400),
                (b"Host: evil.example\r\n" + host + length, body, 400),
                (host + chunked + b"Transfer-Encoding: identity\r\n", coded, 400),
                *((host + b"Transfer-Encoding: " + x + b"\r\n", coded, 501)
                  for x in (b"gzip, chunked", b"identity", b"xchunked", b""))):
            c = s.raw(b"POST /tokenize HTTP/1.1\r\nConnection: close\r\n" + heads + b"\r\n" +
                      data)
            assert int(c.recv(1000).split()[1]) == want, heads
            c.close()
        # what follows may be a part of it: it is no request
        c = s.raw(b"GET /health HTTP/1.1\r\n" + host + b"Content-Length: 0\r\n" +
                  b"Content-Length: 44\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        got = all_of(c)
        assert b" 200 " not in got and got.count(b"HTTP/1.1 ") <= 1, got
        for odd in (b"Content-Length : 16", b"Content-Length:\r\n 16", b"Content-Length: 16\r\n ;",
                    b"Transfer-Encoding : chunked", b"Transfer-Encoding: chunked\r\n\tx",
                    b"X: y\r\n Content-Length: 16", b"X Y: z", b"X\x01: z", b"X\xe4: z"):
            c = s.raw(b"POST /tokenize HTTP/1.1\r\n" + host + odd + b"\r\n\r\n"
                      b"GET /v1/models HTTP/1.1\r\n" + host + b"\r\n")
            got = all_of(c)
            assert got.startswith(b"HTTP/1.1 400 ") and got.count(b"HTTP/1.1 ") == 1, (odd, got)
            told = b"control character" if odd == b"X\x01: z" else b"name"
            assert b"Connection: close" in got and told in got, (odd, got)
    with Server(env={"KVDRIVE_API_KEY": "sk-x"}) as s:  # whatever the route, and whoever asks
        for path in (b"/health", b"/v1/models"):
            got = all_of(s.raw(b"GET " + path + b" HTTP/1.1\r\n" + host + host + b"\r\n"))
            assert b" 400 " in got and b"Connection: close" in got, (path, got)
            line = f"{path.decode()}: status 400 "
            s.wait_for(lambda: any(line in x for x in s.lines))


def all_of(c):
    """What comes until the end."""
    got = b""
    try:
        while more := c.recv(4096):
            got += more
    except ConnectionResetError:
        pass
    c.close()
    return got


def test_malformed_heads_get_one_answer():
    """What is refused before it has a route has one head, and an error like others; connections
    beside it that are in the middle of theirs go on."""
    fine = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Server() as s:
        half = [s.raw(fine[:n]) for n in (3, 25, len(fine) - 2)]
        for line, heads, want, told in (
                (b"GET /health", b"", 400, "Host"), (b"POST /tokenize", b"X: y\r\n", 400, "Host"),
                *((b"POST /tokenize", b"Host: localhost\r\nContent-Length:" + n + b"\r\n", status,
                   name) for n, status, name in (
                       (b" abc", 400, "Content-Length"), (b" -1", 400, "Content-Length"),
                       (b" 0x10", 400, "Content-Length"), (b" 1 2", 400, "Content-Length"),
                       (b"", 400, "Content-Length"), (b" " + b"9" * 30, 413, "at most"))),
                (b"GET /health", b"Host: localhost\r\nCookie: " + b"c" * 16384 + b"\r\n", 431,
                 "too large")):
            for before in (b"", fine):
                got = all_of(s.raw(before + line + b" HTTP/1.1\r\n" + heads + b"\r\n"))
                assert got.count(b"HTTP/1.1 ") == (2 if before else 1), (heads[:60], got)
                head, _, body = got[got.rindex(b"HTTP/1.1 "):].partition(b"\r\n\r\n")
                assert int(head.split()[1]) == want and b"Connection: close" in head, got
                assert f"Content-Length: {len(body)}".encode() in head, got
                assert told in json.loads(body)["error"]["message"], (heads[:60], body)
        got = all_of(s.raw(b"POST /v1/messages HTTP/1.1\r\n\r\n"))
        assert json.loads(got.partition(b"\r\n\r\n")[2])["type"] == "error", got
        for c, n in zip(half, (3, 25, len(fine) - 2)):
            c.sendall(fine[n:].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
                      if n < 30 else fine[n:])
            assert b" 200 " in c.recv(100)
            c.close()
        assert s.get("/health") == {"status": "ok"}


if __name__ == "__main__":
    main(globals())
