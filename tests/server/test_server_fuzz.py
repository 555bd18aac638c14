#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests made of random parts: fields of odd values, bytes changed, HTTP cut and glued.  The
server stays up, never says 500 or 503, and answers afterwards as before.  KVD_FUZZ_SECONDS (6)
says how long, KVD_FUZZ_SEED repeats a run."""
import json
import os
import random
import re
import threading
import time

from kvserver import HERE, PATIENCE, Server, main

SECONDS = float(os.environ.get("KVD_FUZZ_SECONDS", "6"))
SEED = int(os.environ.get("KVD_FUZZ_SEED", str(time.time_ns() % 1000000)))
ASK = {"prompt": "as before", "max_tokens": 12, "logit_bias": {"261": -100}}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens",
         "/v1/responses", "/tokenize", "/detokenize", "/apply-template", "/completions",
         "/chat/completions", "/responses", "/v1/responses/input_tokens", "/completion")
ROUTES = re.findall(r'\{ "([A-Z]+)", "([^"]+)",',
                    (HERE.parent.parent / "server" / "srv_routes.c").read_text())
GETS = tuple(path for method, path in ROUTES if method == "GET") + ("/v1/models/x", "/nothing")
FIELDS = ("prompt messages max_tokens max_completion_tokens temperature top_p top_k min_p n seed "
          "logit_bias stop stream stream_options logprobs top_logprobs echo presence_penalty "
          "frequency_penalty repetition_penalty repeat_last_n ignore_eos return_progress "
          "debug_cache cache_salt best_of suffix tools tool_choice parallel_tool_calls tool_calls "
          "response_format content tokens system stop_sequences output_config "
          "input instructions text max_output_tokens n_predict json_schema guided_json grammar "
          "typical_p top_n_sigma xtc_probability xtc_threshold dry_multiplier dry_base "
          "dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
          "add_special with_pieces add_generation_prompt chat_template_kwargs model user "
          "unknown_one").split()
STATUS = {200, 204, 400, 401, 403, 404, 405, 411, 413, 414, 417, 429, 431, 501, 505}


def value(rng, depth=0):
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice((0, 1, 2, 3, -1, 7, 100, 2**31, 2**32, -2**63, 2**63 - 1, 5e-324, 1e308))
    if kind == 2:
        return rng.random() * 3 - 0.5
    if kind in (3, 4):
        return rng.randrange(12)
    if kind < 8:
        return rng.choice(("", "a", "hello there " * rng.randrange(1, 20), "é\u0000\ud7ff😀", "<s>",
                           "<|im_start|>", "\\", "\ufffd" * 5, "x" * 300))
    if kind < 10:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(FIELDS + ["role", "text", "type", "261", "5", "include_usage"]):
            value(rng, depth + 1) for _ in range(rng.randrange(5))}


def message(rng):
    m = {"role": rng.choice(("user", "system", "assistant", "tool", "developer", "king")),
         "content": rng.choice(("hi", "", [{"type": "text", "text": "part"}], None, 5))}
    if rng.random() < 0.2:
        m[rng.choice(FIELDS)] = value(rng)
    if rng.random() < 0.1:
        m["tool_calls"] = [{"function": {"name": "f", "arguments": value(rng)}}]
    if rng.random() < 0.1:
        m["content"] = [rng.choice((
            {"type": "text", "text": "part"}, {"type": "tool_use", "id": "1", "name": "f",
                                               "input": {}},
            {"type": "tool_result", "tool_use_id": "1", "content": "x"}))]
    return m


def tool(rng):
    schema = {"type": rng.choice(("object", "string", 5)), "properties": {"a": value(rng)}}
    return {"type": "function", "function": {"name": rng.choice("fgh"), "parameters": schema,
                                             "strict": rng.random() < 0.5}}


def body(rng):
    """A request that may well be served, with some fields of odd values."""
    path = rng.choice(PATHS)
    limit = "max_output_tokens" if "responses" in path else "max_tokens"
    b = {limit: rng.randrange(8)}
    if "completions" in path:
        b["n"] = rng.choice((1, 1, 2))
    if "chat" in path or "template" in path or "messages" in path:
        b["messages"] = [message(rng) for _ in range(rng.randrange(1, 4))]
    elif "detok" in path:
        b["tokens"] = [rng.randrange(264) for _ in range(rng.randrange(20))]
    elif "tok" in path:
        b["content"] = "some text"
    elif "responses" in path:
        b["input"] = rng.choice(("text", [{**message(rng), "type": rng.choice((
            "message", "function_call", "function_call_output", "reasoning")), "call_id": "c",
            "name": "f", "arguments": "{}", "output": "x"} for _ in range(rng.randrange(1, 4))]))
    else:
        b["prompt"] = rng.choice(("text", ["a", "b"], [1, 2, 3], [[1], [2, 3]], "long " * 200))
    if rng.random() < 0.2:
        b["tools"] = [tool(rng) for _ in range(rng.randrange(1, 3))]
        b["tool_choice"] = rng.choice(("auto", "none", "required"))
        if "messages" in path:
            b["tools"] = [{"name": t["function"]["name"],
                           "input_schema": t["function"]["parameters"]} for t in b["tools"]]
            b["tool_choice"] = {"type": rng.choice(("auto", "any", "none"))}
    for _ in range(rng.randrange(4)):
        b[rng.choice(FIELDS)] = value(rng)
    if not isinstance(b.get(limit), int) or b[limit] > 50:  # such answers are long, not odd
        b["max_completion_tokens" if "completions" in path else limit] = 5
    return path, json.dumps(b).encode()


def mutate(rng, data):
    data = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.choice((b"[", b"{", b"}", b'"', b"\\u", b"\xff", b"\x00", b"1e999",
                                      b"\r\n", b",", b": ", b"-", b"null"))
        elif kind == 2:
            del data[at:at + rng.randrange(1, 9)]
        else:
            piece = data[at:at + rng.randrange(1, 30)]
            data[at:at] = piece
    return bytes(data)


def request(rng):
    """The bytes of a request, and whether it is HTTP as it should be."""
    path, data = body(rng)
    if rng.random() < 0.3:
        data = mutate(rng, data)
    if rng.random() < 0.1:
        head = f"{rng.choice(('GET', 'DELETE', 'PUT', 'HEAD'))} " \
               f"{rng.choice(GETS + ('/cache',))} HTTP/1.1\r\nHost: localhost\r\n"
        data = b""
    else:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    raw = (head + "Connection: close\r\n\r\n").encode() + data
    return (mutate(rng, raw), False) if rng.random() < 0.25 else (raw, True)


def send(s, rng):
    raw, good = request(rng)
    c = s.raw()
    try:
        c.settimeout(PATIENCE if good else 0.1)
        c.sendall(raw)
        if rng.random() < 0.1:
            return  # leaves
        answer = b""
        while True:
            more = c.recv(65536)
            if not more:
                break
            answer += more
        if answer:
            status = int(answer.split(b" ", 2)[1])
            assert status in STATUS, (raw[:600], answer[:400])
        assert answer or not good, raw[:600]
    except OSError:
        assert not good, raw[:600]
    finally:
        c.close()


def test_random_requests():
    print(f"KVD_FUZZ_SEED={SEED}", flush=True)
    assert {path for method, path in ROUTES if method == "POST"} == set(PATHS)
    assert {path for method, path in ROUTES if method == "DELETE"} == {"/cache"}
    with Server("--read-timeout", "1", "--parallel", "3", "--chat-template",
                str(HERE / "data" / "hermes.jinja"), ctx=1200) as s:  # the longest answers end soon
        want = s.post("/v1/completions", ASK)["choices"]
        end, wrong, count = time.monotonic() + SECONDS, [], [0]

        def work(seed):
            rng = random.Random(seed)
            try:
                while time.monotonic() < end and not wrong:
                    send(s, rng)
                    count[0] += 1
            except Exception as e:
                wrong.append(e)

        threads = [threading.Thread(target=work, args=(SEED + i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if wrong:
            raise wrong[0]
        s.wait_idle(10)
        assert s.post("/v1/completions", ASK)["choices"] == want
        print(f"{count[0]} requests")


if __name__ == "__main__":
    main(globals())
