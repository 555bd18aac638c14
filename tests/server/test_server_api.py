#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Routes of the server: what they answer, what they refuse and how."""
import base64
import json
import os
import random
import re
import signal

from kvserver import HERE, PATIENCE, Server, main, text_of

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


def test_small_routes():
    with Server("--alias", "tiny") as s:
        assert s.get("/health") == {"status": "ok"}
        assert s.get("/v1/models")["data"][0]["id"] == "tiny"
        props = s.get("/props")
        assert props["total_slots"] == 4 and props["n_ctx"] == 4000, props
        assert len(s.get("/slots")["slots"]) == 4
        ids = s.post("/tokenize", {"content": "a<|im_start|>b", "with_pieces": True})
        # user text never becomes control tokens
        assert "".join(t["piece"] for t in ids["tokens"]) == "a<|im_start|>b"
        assert ids["count"] == 14, ids
        ids = s.post("/tokenize", {"content": "héllo"})["tokens"]
        assert s.post("/detokenize", {"tokens": ids})["content"] == "héllo"
        assert s.post("/apply-template", {"messages": HELLO})["prompt"] == \
            "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert s.post("/apply-template", {"messages": HELLO, "add_generation_prompt": False}) \
            ["prompt"] == "<|im_start|>user\nhello<|im_end|>\n"
        for field, value in (("tools", 5), ("chat_template_kwargs", []), ("messages", 5)):
            s.error("/apply-template", {"messages": HELLO, field: value}, field)
        for path, method, want in (("/nothing", "GET", 404), ("/health", "POST", 405),
                                   ("/v1/completions", "GET", 405), ("/cache", "POST", 405)):
            status, _, data = s.call(method, path, body="{}" if method == "POST" else None)
            assert status == want and json.loads(data)["error"]["type"], (path, status, data)


def test_other_servers_routes():
    """llama-server's other names of routes are the same routes; of what it has and we have not, the
    error says the path, and what there is instead."""
    with Server("--deterministic") as s:
        ask = {"max_tokens": 5, "logit_bias": {"261": -100}}
        for path, same, body in (("/chat/completions", CHAT, {**ask, "messages": HELLO}),
                                 ("/completions", COMPLETION, {**ask, "prompt": "hello"})):
            assert [c["index"] for c in s.post(path, body)["choices"]] == [0]
            assert s.post(path, body)["choices"] == s.post(same, body)["choices"], path
            assert text_of(s.stream(path, body)) == text_of(s.stream(same, body)) != "", path
        a = s.post("/responses", {"input": "hello", "max_output_tokens": 5})
        assert a["object"] == "response" and a["output"], a
        assert s.get("/models") == s.get("/v1/models")
        assert s.get("/v1/health") == {"status": "ok"}
        for path, told in (("/infill", "/v1/completions"),
                           ("/embedding", "no embeddings"), ("/embeddings", "no embeddings"),
                           ("/v1/embeddings", "no embeddings"), ("/pooling", "no embeddings"),
                           ("/rerank", "nothing is ranked"), ("/reranking", "nothing is ranked"),
                           ("/v1/rerank", "nothing is ranked"), ("/score", "nothing is ranked"),
                           ("/v1/reranking", "nothing is ranked"),
                           ("/v1/audio/speech", "no sound"), ("/slots/0", "--cache-dir"),
                           ("/lora-adapters", "merged (-m)"), ("/v1/load_lora_adapter", "(-m)"),
                           ("/api/chat", "/v1/chat/completions"), ("/version", "GET /props"),
                           ("/v1", "base URL"), ("/v1/v1/models", "leave /v1 out"),
                           ("/v1/v1/chat/completions", "leave /v1 out")):
            for method in ("POST", "GET"):
                status, headers, data = s.call(method, path, {} if method == "POST" else None)
                message = json.loads(data)["error"]["message"]
                assert status == 404 and headers["Allow"] is None, (path, status)
                assert message.startswith(f"there is no {path}: ") and told in message, message
        for path in ("/nothing", "/v1/nothing", "/slot/", "/v1/v2/models"):
            assert s.get(path, want=404)["error"]["message"] == f"there is no {path}"


def test_methods_that_are_taken():
    """405 says what would not be: each path's own method, and nothing without a key."""
    text = (HERE.parent.parent / "server" / "srv_routes.c").read_text()
    table = re.findall(r'\{ "([A-Z]+)", "([^"]+)",', text)
    with Server() as s:
        for method, path in table:
            taken = [m for m, p in table if p == path]
            path += "tiny" if path == "/v1/models/" else ""
            for other in {"GET", "POST", "DELETE", "PUT", "HEAD"} - set(taken):
                status, headers, data = s.call(other, path)
                assert (status, headers["Allow"]) == (405, ", ".join(taken)), (other, path, status)
                if other != "HEAD":
                    told = f"{path} does not take {other}, but {', '.join(taken)}"
                    assert json.loads(data)["error"]["message"] == told, data
            if method == "GET":
                assert s.call(method, path)[1]["Allow"] is None
        assert s.call("PUT", "/nothing")[1]["Allow"] is None
        for path in ("/health", "/v1/health", "/"):  # those that look whether it is there
            (_, want, data), (status, got, none) = s.call("GET", path), s.call("HEAD", path)
            assert status == 200 and data and none == b"", (path, status, none)
            assert {k: v for k, v in got.items() if k != "Date"} == \
                {k: v for k, v in want.items() if k != "Date"}, (path, got.items())
    with Server(env={"KVDRIVE_API_KEY": "sk-x"}) as s:
        status, headers, _ = s.call("PUT", "/v1/models")
        assert status == 401 and headers["Allow"] is None


def test_model_by_name():
    with Server("--alias", "tiny") as s:
        assert s.get("/v1/models/tiny") == s.get("/v1/models")["data"][0]
        for name in ("", "tin", "tiny2", "tiny/x", "Tiny", "%01", "%74iny%20", "a%22b", "%ff"):
            e = s.get(f"/v1/models/{name}", want=404)["error"]
            assert e["code"] == "model_not_found" and e["param"] == "model", (name, e)
        assert "%00" in s.get("/v1/models/tiny%00", want=400)["error"]["message"]
        assert 'no model "a"b"' in s.get("/v1/models/a%22b", want=404)["error"]["message"]
    with Server("--alias", "org/a b") as s:  # as it is, and as clients write it
        for name in ("org/a-b", "org%2Fa%2Db"):
            assert s.get(f"/v1/models/{name}")["id"] == "org/a-b"
        assert s.get("/v1/models/tiny", want=404)["error"]["code"] == "model_not_found"


def test_completion():
    with Server() as s:
        body = {"prompt": "hello there", "max_tokens": 12, "logit_bias": {"261": -100}}
        a = s.post(COMPLETION, body)
        assert a["object"] == "text_completion" and a["choices"][0]["finish_reason"] == "length"
        assert a["usage"]["completion_tokens"] == 12
        assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        events = list(s.stream(COMPLETION, {**body, "stream_options": {"include_usage": True}}))
        assert events[-1] == "[DONE]"
        assert text_of(events) == a["choices"][0]["text"]
        usage = events[-2]
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == \
            a["usage"]["prompt_tokens"] - 1  # all but the last
        assert all(e["usage"] is None for e in events[:-2])
        assert a["timings"]["prompt_n"] == a["usage"]["prompt_tokens"]
        events = list(s.stream(COMPLETION, body))
        assert all("usage" not in e for e in events[:-1])


def test_chat():
    with Server() as s:
        body = {"messages": HELLO, "max_tokens": 9, "logit_bias": {"261": -100}}
        a = s.post(CHAT, body)
        m = a["choices"][0]["message"]
        assert a["object"] == "chat.completion" and m["role"] == "assistant"
        events = list(s.stream(CHAT, body))
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert text_of(events) == m["content"]
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        assert s.post(CHAT, {**body, "messages": parts})["choices"][0]["message"] == m
        system = [{"role": "developer", "content": "be brief"}] + HELLO
        assert "system\nbe brief" in s.post("/apply-template", {"messages": system})["prompt"]


def test_lengths():
    with Server() as s:
        bias = {"261": -100}
        n = lambda **k: s.post(COMPLETION, {"prompt": "abc", "logit_bias": bias, **k}) \
            ["usage"]["completion_tokens"]
        assert n() == 16  # OpenAI's default
        assert n(max_tokens=3) == 3
        assert n(max_tokens=3, max_completion_tokens=5) == 5  # the newer one wins
        assert n(max_tokens=0) == 0
        a = s.post(COMPLETION, {"prompt": [65] * 3990, "max_tokens": 100, "logit_bias": bias})
        assert a["usage"]["completion_tokens"] == 10  # the context is full
        long = [{"role": "user", "content": "x" * 4000}]
        for path, body, field in ((COMPLETION, {"prompt": [65] * 4000}, "prompt"),
                                  (COMPLETION, {"prompt": ["a", [65] * 4000]}, "prompt"),
                                  (CHAT, {"messages": long}, "messages"),
                                  (RESPONSES, {"input": "x" * 4000}, "input"),
                                  (RESPONSES, {"input": long}, "input")):
            e = s.error(path, body, field)
            assert e["code"] == "context_length_exceeded", (path, field)
            assert "at most 4000 (-c of the server)" in e["message"], e
        s.error(COMPLETION, {"prompt": ""}, "prompt")
    with Server("--kv-tokens", "512") as s:
        e = s.error(COMPLETION, {"prompt": [65] * 600}, "prompt")
        assert "600 tokens" in e["message"] and "512 (--kv-tokens of the server)" in e["message"], e
        line = next(line for line in s.lines if "KV cache" in line)
        assert "4 sequences (--parallel) of at most 4000 tokens (-c), 512 tokens" in line, line


def test_log_of_requests():
    """What a request has taken, once it has finished; of a stream that an error ends, that."""
    with Server(program=os.environ["KVD_TEST_FAULT"]) as s:
        s.exits = (1,)
        ask = {"prompt": [67] * 50, "max_tokens": 3, "logit_bias": {"261": -100}}
        s.post(COMPLETION, ask)
        assert list(s.stream(COMPLETION, ask))[-1] == "[DONE]"
        took = "prompt 50 (cached 0+0+0), generated 3"
        s.wait_for(lambda: sum(": /v1/completions, " in line for line in s.lines) == 2)
        lines = [line for line in s.lines if ": /v1/completions, " in line]
        assert took in lines[0] and "prompt 50 (cached 49+0+0), generated 3" in lines[1], lines
        events = s.stream(COMPLETION, {**ask, "max_tokens": 3000})
        next(events)
        s.process.send_signal(signal.SIGUSR1)
        last = list(events)[-1]
        assert "the device has failed" in last["error"]["message"], last
        s.process.wait(PATIENCE)
        s.reader.join(10)
        line = [line for line in s.lines if ": /v1/completions, " in line][2]
        assert "ended by an error" in line and "generated" not in line, line


def test_choices_and_seeds():
    with Server("--deterministic") as s:
        body = {"prompt": "hello", "n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12,
                "logit_bias": {"261": -100}}
        a = s.post(COMPLETION, body)
        texts = [c["text"] for c in a["choices"]]
        assert [c["index"] for c in a["choices"]] == [0, 1, 2]
        assert len(set(texts)) == 3, texts
        assert [c["text"] for c in s.post(COMPLETION, body)["choices"]] == texts
        assert s.post(COMPLETION, {**body, "n": 1, "seed": 8})["choices"][0]["text"] == texts[1]
        assert a["usage"]["prompt_tokens"] < 6 and a["usage"]["completion_tokens"] == 36
        many = s.post(COMPLETION, {"prompt": ["hello", "world", "again"], "max_tokens": 4})
        for i, prompt in enumerate(("hello", "world", "again")):
            one = s.post(COMPLETION, {"prompt": prompt, "max_tokens": 4})
            assert one["choices"][0]["text"] == many["choices"][i]["text"]
        assert 10 < many["usage"]["prompt_tokens"] < 16
        events = list(s.stream(COMPLETION, body))
        for i in range(3):
            assert "".join(c["text"] for e in events[:-1] for c in e["choices"]
                           if c["index"] == i) == texts[i]


def test_stops():
    """Over random stop strings cut out of what is said: streamed or not, the text ends before the
    first one, nothing of it shows, nothing before it is lost."""
    rng = random.Random(5)
    with Server() as s:
        body = {"prompt": "hello", "max_tokens": 60, "temperature": 1.2, "seed": 3,
                "logit_bias": {"261": -100}}
        full = s.post(COMPLETION, body)["choices"][0]["text"]
        for _ in range(40):
            at = rng.randrange(len(full) - 4)
            stops = [full[at:at + rng.randrange(1, 5)], "never\x00said", full[at:at + 2] + "zz"]
            want = full[:min(full.find(x) for x in stops if x in full)]
            a = s.post(COMPLETION, {**body, "stop": stops})["choices"][0]
            assert a["text"] == want and a["finish_reason"] == "stop", (stops, a, want)
            events = list(s.stream(COMPLETION, {**body, "stop": stops}))
            assert text_of(events) == want
        # what may begin a stop string is held back, and told when the answer ends
        held = full[-3:] + "no"
        assert s.post(COMPLETION, {**body, "stop": held})["choices"][0]["text"] == full
        assert text_of(s.stream(COMPLETION, {**body, "stop": held})) == full


def test_logprobs():
    with Server("--precise", "--deterministic") as s:
        body = {"prompt": "hello", "max_tokens": 6, "logit_bias": {"261": -100}}
        a = s.post(COMPLETION, {**body, "logprobs": 3})["choices"][0]["logprobs"]
        assert len(a["tokens"]) == len(a["token_logprobs"]) == len(a["top_logprobs"]) == 6
        for lp, top in zip(a["token_logprobs"], a["top_logprobs"]):
            assert lp <= max(top.values()) + 1e-5 and max(top.values()) < 0 and 1 <= len(top) <= 3
        chat = {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
        c = s.post(CHAT, chat)["choices"][0]["logprobs"]["content"]
        assert len(c) == 5 and all(len(t["top_logprobs"]) == 2 for t in c)
        assert all(t["top_logprobs"][0]["logprob"] == t["logprob"] for t in c)
        streamed = [t for e in s.stream(CHAT, chat) if e != "[DONE]" for x in e["choices"]
                    if x["logprobs"] for t in x["logprobs"]["content"]]
        assert streamed == c
        # echo: every token of the prompt but the first has a logprob, whatever is cached
        e = s.post(COMPLETION, {**body, "prompt": "hello" * 40, "echo": True, "logprobs": 1,
                                "max_tokens": 2})["choices"][0]
        assert e["text"].startswith("hello" * 40)
        lp = e["logprobs"]["token_logprobs"]
        assert lp[0] is None and all(x <= 0 for x in lp[1:])
        n = s.post("/tokenize", {"content": "hello" * 40})["count"]
        assert len(lp) == n + 2
        # the same numbers one token at a time
        ids = s.post("/tokenize", {"content": "hello" * 40})["tokens"]
        for i in (1, 7, 50):
            one = s.post(COMPLETION, {"prompt": ids[:i], "max_tokens": 1, "logprobs": 0,
                                      "logit_bias": {str(ids[i]): 100}})["choices"][0]
            assert abs(one["logprobs"]["token_logprobs"][0] - lp[i]) < 1e-4, (i, one, lp[i])
        a = s.post(COMPLETION, {"prompt": "hello", "echo": True, "max_tokens": 0, "logprobs": 0})
        assert a["choices"][0]["text"] == "hello"


def test_penalties_and_bias():
    with Server() as s:
        body = {"prompt": "hello", "max_tokens": 20}
        forced = s.post(COMPLETION, {**body, "logit_bias": {"97": 100}})["choices"][0]["text"]
        assert forced == "a" * 20
        varied = s.post(COMPLETION, {**body, "logit_bias": {"97": 5, "98": 4.9, "99": 4.8},
                                     "frequency_penalty": 2})["choices"][0]["text"]
        assert len(set(varied)) > 1


def test_samplers_of_peers():
    """llama.cpp's fields reach the sampler on every route, and the options are their defaults."""
    bias = {str(ord(c)): 100 - 10 * i for i, c in enumerate("abcd")}
    with Server() as s:
        body = {"prompt": "hello", "max_tokens": 24, "temperature": 50, "top_k": 4, "top_p": 1,
                "min_p": 0, "logit_bias": bias, "seed": 3}

        def text(**more):
            return s.post(COMPLETION, {**body, **more})["choices"][0]["text"]
        assert len(set(text())) > 2, text()
        assert set(text(top_n_sigma=1e-4)) == {"a"}
        assert set(text(typical_p=1e-6)) == {"a"}
        # probabilities of about 1 and e^-10: at least the second is above the threshold
        assert not set(text(xtc_probability=1, xtc_threshold=1e-7)) & {"a"}
        assert "a" in text(xtc_probability=1, xtc_threshold=0.6)
        dry = {"temperature": 0, "dry_multiplier": 100, "dry_allowed_length": 1}
        assert set(text(temperature=0)) == {"a"}
        # a pair that was there does not come again, unless "a" breaks every sequence
        said = text(**dry, dry_sequence_breakers=[])
        assert len(set(said)) > 1 and "aaa" not in said, said
        assert set(text(**dry, dry_sequence_breakers=["a"])) == {"a"}
        assert set(text(**dry, dry_penalty_last_n=0)) == {"a"}
        same = {k: body[k] for k in ("temperature", "top_k", "top_p", "min_p", "logit_bias")}
        for path, ask in ((CHAT, {"messages": HELLO, "max_tokens": 9}),
                          ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
                          ("/v1/responses", {"input": "x", "max_output_tokens": 9})):
            for more in {"typical_p": 1e-6}, {"top_n_sigma": 1e-4}:
                assert '"aaaaaaaaa"' in json.dumps(s.post(path, {**ask, **same, **more})), path
    with Server("--top-nsigma", "0.0001") as s:
        got = s.post(COMPLETION, body)["choices"][0]["text"]
        assert set(got) == {"a"}, got
    with Server("--dry-multiplier", "100", "--dry-allowed-length", "1",
                "--dry-sequence-breaker", "none") as s:
        got = s.post(COMPLETION, {**body, "temperature": 0})["choices"][0]["text"]
        assert "aaa" not in got, got


WRONG = [  # field, value
    ("max_tokens", -2), ("max_tokens", "many"), ("max_tokens", 1.5), ("temperature", -0.1),
    ("temperature", "hot"), ("temperature", 1e9), ("top_p", 1.1), ("top_p", -1), ("min_p", 2),
    ("top_k", 0.5), ("n", 0), ("n", 1000), ("stream", "yes"), ("seed", "x"),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("stop", [""]), ("stop", [1]),
    ("stop", ["x"] * 17), ("stop", "x" * 300), ("logit_bias", {"": 1}), ("logit_bias", [1]),
    ("logit_bias", {"1": 101}), ("logit_bias", {"264": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(i % 264) + "": 1 for i in range(264)} | {"999999": 1}),
    ("model", 3), ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", "x" * 257),
    ("stream_options", 1), ("typical_p", 1.5), ("top_n_sigma", -2), ("xtc_probability", 2),
    ("xtc_threshold", "x"), ("dry_multiplier", -1), ("dry_base", 0.5), ("dry_allowed_length", -1),
    ("dry_penalty_last_n", -2), ("dry_sequence_breakers", "x"), ("dry_sequence_breakers", [""]),
    ("dry_sequence_breakers", [1]), ("dry_sequence_breakers", ["x" * 65]),
    ("dry_sequence_breakers", ["x"] * 65),
]


def test_refuses_by_name():
    with Server() as s:
        for field, value in WRONG:
            s.error(COMPLETION, {"prompt": "x", field: value}, field)
            s.error(CHAT, {"messages": HELLO, field: value}, field)
        s.error(COMPLETION, {}, "prompt")
        s.error(COMPLETION, {"prompt": 5}, "prompt")
        s.error(COMPLETION, {"prompt": [1, 999999]}, "prompt")
        s.error(COMPLETION, {"prompt": ["a", 5]}, "prompt")
        s.error(COMPLETION, {"prompt": ["a"] * 65}, "prompt")
        s.error(COMPLETION, {"prompt": "x", "best_of": 3}, "best_of")
        s.error(COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix")
        s.error(CHAT, {"messages": HELLO, "top_logprobs": 3}, "top_logprobs")
        s.error(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs")
        for bad in (None, [], "hi", [5], [{}], [{"role": "king", "content": "x"}],
                    [{"role": "user"}], [{"role": "user", "content": 5}]):
            e = s.post(CHAT, {"messages": bad}, want=400)["error"]
            assert e["param"].startswith("messages"), e
        for field, value in (("audio", {}), ("function_call", "f"),
                             ("modalities", ["audio"]), ("prediction", {}), ("functions", [{}]),
                             ("chat_template", "{{ x }}")):
            e = s.error(CHAT, {"messages": HELLO, field: value}, field)
            assert "not supported" in e["message"]
        s.post(CHAT, {"messages": HELLO, "max_tokens": 1, "tools": [], "audio": None, "user": "me",
                      "store": False, "response_format": {"type": "text"}, "seed": None})
        for bad in ("json", {}, {"type": "xml"}, {"type": "json_schema"},
                    {"type": "json_schema", "json_schema": {"name": "n", "schema": []}},
                    {"type": "json_schema", "json_schema": {"schema": {"not": {"type": "null"}}}},
                    {"type": "json_schema", "json_schema": {"schema": {"enum": []}}}):
            s.error(CHAT, {"messages": HELLO, "response_format": bad}, "response_format")
        s.error("/tokenize", {"content": 5}, "content")
        s.error("/detokenize", {"tokens": [1, "x"]}, "tokens")
        # lists have limits, up to which they are taken
        bias = {str(i): 0.5 for i in range(1025)}
        stop = ["x" * 255 + chr(65 + i) for i in range(16)]
        for field, value, told in (("logit_bias", bias, "1025 entries, at most 1024"),
                                   ("stop", stop + ["y"], "more than 16 strings"),
                                   ("stop", ["x" * 257], "256 bytes")):
            for path, ask in ((COMPLETION, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
                e = s.error(path, {**ask, field: value}, field)
                assert told in e["message"], e
        s.post(COMPLETION, {"prompt": "x", "max_tokens": 1, "stop": stop,
                            "logit_bias": {str(i): 0.5 for i in range(264)}})
        # unknown fields have no effect and are logged once
        for _ in range(3):
            s.post(COMPLETION, {"prompt": "x", "max_tokens": 1, "frobnicate\n": 1})
        assert sum("frobnicate" in line for line in s.lines) == 1


PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "maxLength": 5},
                         "age": {"type": "integer", "minimum": 10, "maximum": 99},
                         "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["a", "b"]}}}}


def check_person(text):
    who = json.loads(text)
    assert list(who) == ["name", "age", "tags"], who
    assert isinstance(who["name"], str) and len(who["name"]) <= 5
    assert isinstance(who["age"], int) and 10 <= who["age"] <= 99
    assert len(who["tags"]) <= 2 and set(who["tags"]) <= {"a", "b"}


def test_response_format():
    """A model of random weights answers JSON that fits, drawn or likeliest, whole or as a stream,
    several at once and beside answers that are free."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    with Server("--deterministic") as s:
        for i in range(6):
            body = {"messages": HELLO, "response_format": form, "max_tokens": 1500, "n": 2,
                    "temperature": float(i % 2), "seed": i, "ignore_eos": i == 3}
            a = s.post(CHAT, body)
            for c in a["choices"]:
                assert c["finish_reason"] == "stop", c
                check_person(c["message"]["content"])
            events = [e for e in s.stream(CHAT, dict(body, n=1)) if e != "[DONE]"]
            text = "".join(e["choices"][0]["delta"].get("content", "") for e in events
                           if e["choices"])
            assert text == a["choices"][0]["message"]["content"], text
        a = s.post(COMPLETION, {"prompt": "x", "response_format": form, "max_tokens": 1500})
        check_person(a["choices"][0]["text"])
        a = s.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_object"},
                          "max_tokens": 200})
        text = a["choices"][0]["message"]["content"]
        assert text.strip().startswith("{"), text
        if a["choices"][0]["finish_reason"] == "stop":
            json.loads(text)
        assert s.post(COMPLETION, {"prompt": "x", "max_tokens": 4})["usage"]["completion_tokens"]


def test_bodies():
    """jsontestsuite: what must be refused is 400; everything else is 400 as well, being no request,
    but never 500, and the server goes on."""
    with Server() as s:
        for line in (HERE / "data" / "jsontestsuite.txt").read_text().splitlines():
            name, _, data = line.partition(" ")
            data = base64.b64decode(data)
            for path in (COMPLETION, CHAT, MESSAGES, MESSAGES + "/count_tokens", RESPONSES,
                         "/tokenize", "/detokenize", "/apply-template"):
                status, _, out = s.call("POST", path, body=data)
                assert status == 400 and json.loads(out)["error"]["message"], (name, status, out)
            if name.startswith("n_"):
                assert b"not JSON" in out or b"nested" in out or b"empty" in out, (name, out)
            # as part of a request: what is JSON has no effect, what is not is refused; a key with a
            # zero byte in it is refused, since the library has no such keys
            if name != "y_object_escaped_null_in_key":
                status, _, out = s.call("POST", COMPLETION, body=b'{"prompt":"x","max_tokens":1,'
                                        b'"none_of_ours":' + data + b"}")
                if name.startswith("y_"):
                    assert status == 200, (name, status, out)
                elif status != 400:
                    assert status == 200 and not name.startswith("n_"), (name, status, out)
        for deep in ("[" * 100000, '[{"":' * 50000, '{"a":' * 100 + "1" + "}" * 100):
            assert s.call("POST", COMPLETION, body=deep)[0] == 400
        assert s.get("/health") == {"status": "ok"}


def test_cache_by_content():
    """A, B, A, B alternate; a salt sees only its own; an emptied cache knows nothing."""
    with Server("--parallel", "2") as s:
        a, b = "alpha " * 50, "beta " * 60
        cached = lambda p, **k: s.post(COMPLETION, {"prompt": p, "max_tokens": 2, **k}) \
            ["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached(a) == 0 and cached(b) == 0
        n_a, n_b = (s.post("/tokenize", {"content": x})["count"] for x in (a, b))
        for _ in range(3):
            assert cached(a) == n_a - 1 and cached(b) == n_b - 1
        assert cached(a, cache_salt="me") == 0
        assert cached(a, cache_salt="me") == n_a - 1
        assert cached(a, cache_salt="you") == 0
        r = s.post(COMPLETION, {"prompt": a[:150] + "XYZ" + a[150:], "max_tokens": 1,
                                "cache_salt": "you", "debug_cache": True})
        d = r["debug_cache"]
        assert 100 < d["first_differing_token"] < 150 and "XYZ" in d["text"], d
        status, _, data = s.call("DELETE", "/cache")
        assert status == 200, data
        assert cached(a) == 0 and cached(b) == 0 and cached(a, cache_salt="you") == 0


def test_messages():
    """Anthropic's shape: system and blocks become the same prompt; errors are in that shape."""
    with Server() as s:
        ask = {"messages": HELLO, "max_tokens": 9, "logit_bias": {"261": -100}}
        a = s.post(MESSAGES, {**ask, "system": [{"type": "text", "text": "be brief"}]})
        system = [{"role": "system", "content": "be brief"}]
        chat = s.post(CHAT, {**ask, "messages": system + HELLO})
        assert a["content"][0]["text"] == chat["choices"][0]["message"]["content"], (a, chat)
        u = a["usage"]
        assert u["input_tokens"] == chat["usage"]["prompt_tokens"] and u["output_tokens"] == 9
        text, kinds = "", []
        for e in s.stream(MESSAGES, {**ask, "system": "be brief"}):
            kinds.append(e["type"])
            text += e["delta"].get("text", "") if e["type"] == "content_block_delta" else ""
        assert text == a["content"][0]["text"] and kinds[-1] == "message_stop", kinds
        for body, word in (
                ({}, "max_tokens"), ([], "JSON"), ({**ask, "top_p": 2}, "top_p"),
                ({**ask, "mcp_servers": [1]}, "mcp_servers"), ({**ask, "tools": [5]}, "tools"),
                ({**ask, "tool_choice": "any"}, "tool_choice")):
            e = s.post(MESSAGES, body, want=400)
            assert e["type"] == "error" and e["error"]["type"] == "invalid_request_error", e
            assert word in e["error"]["message"], e
        assert s.get(MESSAGES + "/none", want=404)["error"]["type"] == "not_found_error"
        assert s.get(MESSAGES, want=405)["type"] == "error"


def test_responses():
    """OpenAI's newer shape: the same prompt as a chat's; what would need a memory is refused."""
    with Server() as s:
        ask = {"input": "hello", "max_output_tokens": 9, "logit_bias": {"261": -100}}
        a = s.post(RESPONSES, ask)
        chat = s.post(CHAT, {"messages": HELLO, "max_tokens": 9, "logit_bias": {"261": -100}})
        text = a["output"][0]["content"][0]["text"]
        assert text == chat["choices"][0]["message"]["content"], (a, chat)
        assert a["output"][0]["status"] == a["status"] == "incomplete"
        numbers = {"a": 0.1, "b": [0.3, 5e-324, 0.1234567890123456, 1e300]}  # as short as can be
        shown = s.call("POST", RESPONSES, {**ask, "temperature": 0.8, "top_p": 0.95,
                                           "metadata": numbers})[2].decode()
        assert '"temperature":0.8,' in shown and '"top_p":0.95,' in shown, shown
        assert '"a":0.1,' in shown.replace("}", ",") and json.loads(shown)["metadata"] == numbers
        events = list(s.stream(RESPONSES, ask))
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert "".join(e.get("delta", "") for e in events) == text
        last = events[-1]["response"]
        assert last["output"][0]["content"] == a["output"][0]["content"]
        for field, value in (("store", True), ("previous_response_id", "resp_1"),
                             ("conversation", "c"), ("background", True), ("top_logprobs", 3),
                             ("truncation", "auto")):
            e = s.error(RESPONSES, {**ask, field: value}, field)
            assert "not supported" in e["message"], e
        for field, value in (("input", []), ("input", 5), ("input", None), ("instructions", 5),
                             ("max_output_tokens", -1), ("text", {"format": {"type": "xml"}}),
                             ("include", "x"), ("tools", 5), ("tool_choice", {}),
                             ("tool_choice", "required"),
                             ("text", {"format": {"type": "json_schema", "schema": {"enum": []}}})):
            s.error(RESPONSES, {**ask, field: value}, field)
        s.post(RESPONSES, {**ask, "store": False, "previous_response_id": None, "include": [],
                           "truncation": "disabled", "metadata": {"a": "b"}, "reasoning": {}})


def test_progress():
    with Server("--parallel", "1") as s:
        events = list(s.stream(COMPLETION, {"prompt": [66] * 2000, "max_tokens": 1,
                                            "return_progress": True}))
        steps = [e["prompt_progress"] for e in events if e != "[DONE]" and "prompt_progress" in e]
        assert steps[-1]["processed"] == steps[-1]["total"] == 2000, steps
        assert [p["processed"] for p in steps] == sorted(p["processed"] for p in steps)


if __name__ == "__main__":
    main(globals())
