#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What clients written for llama-server and vLLM send and read."""
import pathlib
import tempfile
import time

from kvserver import Server, main

HELLO = [{"role": "user", "content": "hello"}]
TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/completion"
A = {"97": 100}  # the tiny models' token 97 is the byte "a"


def test_native():
    with Server() as s:
        ask = {"prompt": "hello", "n_predict": 5, "logit_bias": A, "temperature": 0, "n_probs": 2}
        a = s.post(NATIVE, {**ask, "return_tokens": True})
        assert a["content"] == "aaaaa" and a["tokens"] == [97] * 5, a
        assert a["stop"] is True and a["stop_type"] == "limit" and a["stopping_word"] == "", a
        assert (a["tokens_predicted"], a["truncated"], a["index"]) == (5, False, 0), a
        n = s.post(TEXT, {"prompt": "hello", "max_tokens": 1})["usage"]["prompt_tokens"]
        assert a["tokens_evaluated"] == n and a["prompt"].endswith("hello"), a
        assert a["generation_settings"]["n_predict"] == 5, a
        assert a["generation_settings"]["n_ctx"] == 4000 and "choices" not in a, a
        probs = a["completion_probabilities"]
        assert [p["id"] for p in probs] == [97] * 5 and probs[0]["bytes"] == [97], probs
        assert all(len(p["top_logprobs"]) == 2 for p in probs), probs
        again = s.post(NATIVE, ask)
        assert again["tokens"] == [] and again["tokens_cached"] == n - 1, again
        assert again["timings"]["cache_n"] == n - 1 and again["timings"]["predicted_n"] == 5
        events = list(s.stream(NATIVE, {**ask, "stream": True}))
        assert events[-1] != "[DONE]" and events[-1]["stop"] is True, events[-1]
        assert all(not e["stop"] for e in events[:-1])
        assert "".join(e["content"] for e in events) == "aaaaa", events
        assert sum((e["tokens"] for e in events), []) == [97] * 5, events
        for more in ({}, {"stream": True}):
            body = {**ask, **more, "n_predict": 50, "stop": ["aaaa"]}
            end = list(s.stream(NATIVE, body))[-1] if more else s.post(NATIVE, body)
            assert (end["stop_type"], end["stopping_word"]) == ("word", "aaaa"), end
        bias = {"prompt": "hello", "n_predict": 50, "logit_bias": {"261": 100}}
        assert s.post(NATIVE, bias)["stop_type"] == "eos"
        assert s.post(NATIVE, {"prompt": [97, 98], "n_predict": 1})["tokens_evaluated"] == 2
        s.error(NATIVE, {"prompt": ["a", "b"]}, "prompt")
        s.error(NATIVE, {**ask, "n": 2}, "n")
        s.error(NATIVE, {**ask, "mirostat": 2}, "mirostat")


def test_bias():
    with Server() as s:
        def text(bias):
            return s.post(TEXT, {"prompt": "hello", "max_tokens": 4, "temperature": 0,
                                 "logit_bias": bias})["choices"][0]["text"]

        for bias in (A, {"a": 100}, [[97, 100]], [["a", 100]], [["97", 100]]):
            assert text(bias) == "aaaa", bias
        plain = s.post("/tokenize", {"content": "ab"})["tokens"]
        assert plain == [97, 98]
        assert set(text([["ab", 100]])) <= set("ab")
        assert "a" not in text([["ab", 100], [97, False]])
        assert "a" not in text({"ab": 100, "a": False})
        for bad in ([97], [[97]], [[97, 1, 2]], [[1.5, 1]], [[97, True]], [[97, "1"]], [[97, 101]],
                    [[264, 1]], [[-1, 1]], {"264": 1}, {"-1": 1}, {"": 1}, "a", {"a" * 1025: 1}):
            s.error(TEXT, {"prompt": "x", "logit_bias": bad}, "logit_bias")


def test_without_the_cache():
    with Server() as s:
        def cached(**more):
            u = s.post(CHAT, {"messages": HELLO, "max_tokens": 1, **more})["usage"]
            return u["prompt_tokens_details"]["cached_tokens"]

        assert cached(cache_prompt=False) == 0
        assert cached() == 0  # of the request before
        assert cached() > 0
        assert cached(cache_prompt=False) == 0
        assert cached(cache_prompt=False, cache_salt="x") == 0
        assert cached(cache_prompt=True) > 0
        s.error(CHAT, {"messages": HELLO, "cache_prompt": 1}, "cache_prompt")


def test_pieces():
    with Server() as s:
        t = s.post("/tokenize", {"content": "aá", "with_pieces": True})["tokens"]
        assert [x["piece"] for x in t] == ["a", [0xc3], [0xa1]], t


def test_input_tokens():
    with Server() as s:
        ask = {"input": "hello", "instructions": "be brief"}
        used = s.post("/v1/responses", {**ask, "max_output_tokens": 1})["usage"]["input_tokens"]
        assert s.post("/v1/responses/input_tokens", ask) == {
            "object": "response.input_tokens", "input_tokens": used}
        s.error("/v1/responses/input_tokens", {"input": 1}, "input")


def test_progress():
    with Server() as s:
        for path, limit in ((NATIVE, "n_predict"), (TEXT, "max_tokens"), (CHAT, "max_tokens")):
            start = {"messages": HELLO} if path == CHAT else {"prompt": "hello " * 90}
            s.post(path, {**start, limit: 1})
            for cached in (True, False):
                events = s.stream(path, {**start, limit: 1, "stream": True,
                                         "return_progress": True, "cache_prompt": cached})
                seen = [e["prompt_progress"] for e in events if "prompt_progress" in e]
                assert seen[0]["processed"] == seen[0]["cache"], (path, seen)
                assert (seen[0]["cache"] > 0) == cached, (path, seen)
                assert seen[-1]["processed"] == seen[-1]["total"], (path, seen)


def test_models():
    with Server("--alias", "my own model") as s:
        m = s.get("/v1/models")["data"][0]
        assert m["id"] == "my-own-model" and m["max_model_len"] == m["meta"]["n_ctx"] == 4000, m
        assert s.get("/v1/models/my-own-model") == m
        p = s.get("/props")
        assert p["model_alias"] == "my-own-model" and p["model_path"].endswith(".gguf"), p
        assert p["default_generation_settings"]["n_ctx"] == 4000, p
        assert p["eos_token"] == s.get("/tokenizer_info")["eos_token"], p
        assert p["build_info"] == "kvdrive-" + p["version"], p
        for path, ask in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})):
            a = s.post(path, {**ask, "max_tokens": 1})
            assert a["system_fingerprint"].startswith("kvdrive-") and a["timings"], a
        ask = {"messages": HELLO, "max_tokens": 1, "debug_cache": True}
        a = s.post("/v1/messages", ask)
        assert "timings" not in a and "debug_cache" in a, a
        events = list(s.stream("/v1/messages", {**ask, "stream": True}))
        assert events and not [e for e in events if "timings" in e], events


def test_template_defaults():
    with tempfile.TemporaryDirectory() as d:
        form = pathlib.Path(d) / "form.jinja"
        form.write_text("{{ enable_thinking is defined and enable_thinking }} "
                        "{{ enable_thinking is defined }} {{ date_string }}"
                        "{% for m in messages %}{{ m.content }}{% endfor %}")
        for word, want in (("auto", "False False"), ("on", "True True"), ("off", "False True")):
            with Server("--chat-template", str(form), "--reasoning", word) as s:
                days = [time.strftime("%d %b %Y")]
                got = s.post("/apply-template", {"messages": HELLO})["prompt"]
                days.append(time.strftime("%d %b %Y"))
                assert got in [f"{want} {day}hello" for day in days], got
                own = {"enable_thinking": word == "off", "date_string": "x"}
                got = s.post("/apply-template", {"messages": HELLO, "chat_template_kwargs": own})
                assert got["prompt"] == f"{word == 'off'} True xhello", got


def test_refusals_in_history():
    """A turn that was refused comes back as clients keep it: by its member, or as a part."""
    with Server() as s:
        def rendered(turn):
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", **turn},
                     {"role": "user", "content": "y"}]
            return s.post("/apply-template", {"messages": turns})["prompt"]

        said = rendered({"content": "no"})
        assert "no" in said
        assert rendered({"content": None, "refusal": "no"}) == said
        assert rendered({"content": [{"type": "refusal", "refusal": "no"}]}) == said
        s.error("/apply-template", {"messages": [{"role": "user", "content": None,
                                                  "refusal": "no"}]}, "messages[0].content")
        parts = [{"type": "refusal", "text": "no"}]
        s.error("/apply-template", {"messages": [{"role": "assistant", "content": parts}]},
                "messages[0].content[0].refusal")


def test_special():
    for allowed in (False, True):
        with Server(*(["--parse-special"] if allowed else [])) as s:
            end = s.get("/tokenizer_info")["eos_token"]
            ask = {"content": end + "a", "parse_special": True}
            raw = {"prompt": end + "a", "max_tokens": 1, "parse_special": True}
            if not allowed:
                for path, body in (("/tokenize", ask), (TEXT, raw), (NATIVE, raw)):
                    s.error(path, body, "parse_special")
                s.error(CHAT, {"messages": HELLO, "parse_special": True}, "parse_special")
                s.error("/tokenize", {"prompt": end, "add_special_tokens": False,
                                      "parse_special": True}, "parse_special")
                s.error("/tokenize", {"prompt": "a", "parse_special": 1}, "parse_special")
                assert len(s.post("/tokenize", {**ask, "parse_special": False})["tokens"]) > 2
                continue
            tokens = s.post("/tokenize", ask)["tokens"]
            assert len(tokens) == 2 and tokens[1] == 97, tokens
            a, b = (s.post(NATIVE, {**raw, "parse_special": x})["tokens_evaluated"]
                    for x in (True, False))
            assert b > a <= 3, (a, b)


if __name__ == "__main__":
    main(globals())
