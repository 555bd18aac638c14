#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a server that is busy still does in time: health, the pace of answers beside a long prompt,
signs of life of streams that have nothing to say.  KVD_LONG_PROMPT (12000) is the long prompt's
length in tokens."""
import json
import os
import signal
import subprocess
import threading
import time

from kvserver import HERE, PATIENCE, SLOW, Late, Server, busy_for, in_time, limit_of, main

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
FAULT = os.environ["KVD_TEST_FAULT"]  # its steps take at least 2 ms
LONG_PROMPT = int(os.environ.get("KVD_LONG_PROMPT", "12000"))
HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = {"prompt": [67] * 50, "max_tokens": 3500, "ignore_eos": True, "stream": True}


def share(values, part):
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


def health_times(s, n, want=200):
    """Seconds of n calls, each on a connection of its own."""
    out = []
    for _ in range(n):
        start = time.monotonic()
        assert s.call("GET", "/health")[0] == want
        out.append(time.monotonic() - start)
    return out


def test_health_at_any_load():
    """Within 100 ms beside full slots, a queue, long prompts and large bodies; and while a step
    hangs, until that is found out.  Neighbours on the machine may hold up a call in a hundred."""
    with Server("--stall-timeout", "3", program=FAULT) as s:
        s.exits = (1,)
        held = [s.raw_post(COMPLETION, ENDLESS) for _ in range(3)]
        held += [s.raw_post(COMPLETION, {**ENDLESS, "prompt": [70 + i] * 3900})
                 for i in range(20)]
        s.wait_for(lambda: s.slots()["running"] == 4)
        large = json.dumps({"content": "many words " * 250000})
        stop = threading.Event()

        def send_large():
            while not stop.is_set():
                s.call("POST", "/tokenize", large)

        threads = [threading.Thread(target=send_large) for _ in range(2)]
        for t in threads:
            t.start()
        took = health_times(s, 200)
        stop.set()
        for t in threads:
            t.join()
        in_time(share(took, 0.99), 0.1, took)
        s.process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + 2
        took = []
        while time.monotonic() < end:
            took += health_times(s, 5)
            time.sleep(0.02)
        in_time(share(took, 0.99), 0.1, took)
        s.wait_for(lambda: s.call("GET", "/health")[0] == 503, 3)
        for c in held:
            c.close()
        s.process.wait(PATIENCE)


def test_bounds_follow_the_machine():
    """Beside as many processes as take all processors twice over, a bound is longer by what they
    take; what is later than that is late."""
    alone = limit_of(1, 1)
    others = [subprocess.Popen(["yes"], stdout=subprocess.DEVNULL)
              for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        time.sleep(2)
        busy = limit_of(1, 1)
    finally:
        for p in others:
            p.kill()
            p.wait()
    print(f"a second is {alone:.1f} s, beside others {busy:.1f} s")
    if busy < 1.5 * SLOW:
        raise Late(alone, busy)
    in_time(1.4 * SLOW, 1)
    try:
        in_time(1e6 * SLOW, 1)
        raise AssertionError("a million seconds are not late")
    except Late:
        pass


def gaps_beside(s, n):
    """Gaps between tokens of three streams: before a prompt of n tokens comes, and beside it."""
    times = [[] for _ in range(3)]
    stop = threading.Event()

    def run(i):
        for _ in s.stream(COMPLETION, {**ENDLESS, "prompt": [65 + i] * 50, "max_tokens": 10**6}):
            times[i].append(time.monotonic())
            if stop.is_set():
                return

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    s.wait_for(lambda: all(len(x) > 100 for x in times))
    time.sleep(0.4)
    begin = time.monotonic()
    s.post(COMPLETION, {"prompt": [70] * n, "max_tokens": 1}, timeout=3600)
    end = time.monotonic()
    stop.set()
    for t in threads:
        t.join()
    gaps = [(a, b - a) for x in times for a, b in zip(x, x[1:])]
    return ([g for a, g in gaps if a + g < begin], [g for a, g in gaps if begin < a < end - g],
            end - begin)


def keeps_pace(rounds, *more):
    """Whether a round does."""
    ctx = LONG_PROMPT + 3000
    for _ in range(rounds):
        with Server("-b", "4096", "--rope-scale", str(ctx // 128 + 1), *more, ctx=ctx,
                    program=FAULT) as s:
            s.process.send_signal(signal.SIGRTMIN + 11)  # 0.1 ms for each token of a prompt
            quiet, beside, took = gaps_beside(s, LONG_PROMPT)
        told = [f"{n}: median {1e3 * share(x, 0.5):.2f} ms, 99 % {1e3 * share(x, 0.99):.2f} ms of "
                f"{len(x)}" for n, x in (("quiet", quiet), ("beside", beside))]
        busy = busy_for(took)
        print(f"{LONG_PROMPT} tokens in {took:.1f} s; {'; '.join(told)}; {busy:.1f} times as long")
        if share(beside, 0.5) <= 3 * share(quiet, 0.5) * busy and \
                share(beside, 0.99) <= max(3 * share(quiet, 0.99), 0.03) * busy:
            return True
    return False


def test_pace_beside_a_long_prompt():
    """The median of gaps, and the 99th percentile, at most three times what they are without.  A
    percentile on a machine with neighbours is theirs as well: 30 ms are always good, and one of
    five rounds must do.  Where the server is told that a second is short enough, they stall: a
    prompt's tokens take a time of their own, so that this holds on every machine."""
    assert keeps_pace(5)
    if busy_for(10) > 2:
        print("neighbours stall it as well: what the server does of itself cannot be told")
        return
    assert not keeps_pace(1, "--max-gap", "1000") or busy_for(10) > 2


def signs(s, path, body, sign, n, seconds):
    """A stream that says a sign n times within so many seconds, and no text before."""
    c = s.raw_post(path, {**body, "stream": True})
    start, data = time.monotonic(), b""
    while data.count(sign) < n:
        more = c.recv(65536)
        assert more, data
        if not data:
            assert b" 200 OK" in more, more
            in_time(time.monotonic() - start, 0.1, more)
        data += more
    in_time(time.monotonic() - start, seconds, data)
    assert b"hello" not in data and b"delta" not in data.replace(b'"delta":{"role"', b""), data
    c.close()


COMMENT, PING = b": keepalive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
STREAMS = ((CHAT, {"messages": HELLO}, COMMENT), (COMPLETION, {"prompt": "x"}, COMMENT),
           (RESPONSES, {"input": "x"}, COMMENT),
           (MESSAGES, {"messages": HELLO, "max_tokens": 9}, PING))


def test_signs_of_life_while_queued():
    with Server("--keepalive", "0.1", "--parallel", "1", program=FAULT) as s:
        busy = s.raw_post(COMPLETION, ENDLESS)
        s.wait_for(lambda: s.slots()["running"] == 1)
        for path, body, sign in STREAMS:
            signs(s, path, body, sign, 3, 1.5)
        busy.close()


def test_signs_of_life_while_text_is_held_back():
    """Text that may be the beginning of a stop string; a call of which nothing can be told yet,
    since a model may write as much white space in it as it likes."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    functions = [{"name": "weather", "parameters": parameters}]
    tools = {
        CHAT: {"tools": [{"type": "function", "function": functions[0]}],
               "tool_choice": "required"},
        RESPONSES: {"tools": [{"type": "function", **functions[0]}], "tool_choice": "required"},
        MESSAGES: {"tools": [{"name": "weather", "input_schema": parameters}],
                   "tool_choice": {"type": "any"}}}
    with Server("--keepalive", "0.1", "--chat-template", str(HERE / "data" / "hermes.jinja"),
                program=FAULT) as s:
        for path, body, sign in STREAMS:
            most = {"max_output_tokens" if path == RESPONSES else "max_tokens": 2000}
            stop = "stop_sequences" if path == MESSAGES else "stop"
            signs(s, path, {**body, **most, stop: ["a" * 250], "logit_bias": {"97": 100}}, sign,
                  2, 1.5)
            if path in tools:
                signs(s, path, {**body, **most, **tools[path], "logit_bias": {"10": 100}}, sign,
                      3, 2.5)
        s.wait_idle()


if __name__ == "__main__":
    main(globals())
