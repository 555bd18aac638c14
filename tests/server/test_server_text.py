#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text on its way in and out, in every shape of an answer: characters of several bytes and stop
strings in streams, what clients write and what controls the model, schemas that mean no good."""
import json
import random
import time

from kvserver import HERE, SLOW, Server, in_time, main

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
CHARACTERS = "aé߀ࠀ中あ한\ud7ff\ue000�😀𝄞\U0010ffff\"\\/\n\t"
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}  # no white space before a text


def server(*args, **kw):
    return Server("--chat-template", str(HERE / "data" / "hermes.jinja"), *args, **kw)


# ---- one request in all shapes: (path, body, text of a whole answer, text of an event) -----------

def chat_delta(e):
    return "".join(c["delta"].get("content") or "" for c in e["choices"])


def messages_delta(e):
    return e["delta"].get("text", "") if e["type"] == "content_block_delta" else ""


def responses_delta(e):
    return e["delta"] if e["type"] == "response.output_text.delta" else ""


def shapes(n, stop=None, schema=None, **more):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    flat = {"type": "json_schema", "name": "n", "schema": schema}
    yield (CHAT, {"messages": HELLO, "max_tokens": n, **more, **({"stop": stop} if stop else {}),
                  **({"response_format": form} if schema else {})},
           lambda a: a["choices"][0]["message"]["content"], chat_delta)
    yield (COMPLETION, {"prompt": "hello", "max_tokens": n, **more,
                        **({"stop": stop} if stop else {}),
                        **({"response_format": form} if schema else {})},
           lambda a: a["choices"][0]["text"], lambda e: "".join(c["text"] for c in e["choices"]))
    yield (MESSAGES, {"messages": HELLO, "max_tokens": n, **more,
                      **({"stop_sequences": stop} if stop else {}),
                      **({"output_config": {"format": flat}} if schema else {})},
           lambda a: "".join(b["text"] for b in a["content"]), messages_delta)
    yield (RESPONSES, {"input": "hello", "max_output_tokens": n, **more,
                       **({"stop": stop} if stop else {}),
                       **({"text": {"format": flat}} if schema else {})},
           lambda a: "".join(p["text"] for o in a["output"] for p in o["content"]),
           responses_delta)


def streamed(s, path, body, delta):
    return [delta(e) for e in s.stream(path, body) if e != "[DONE]"]


def random_text(rng):
    return "".join(rng.choice(CHARACTERS) for _ in range(rng.randrange(1, 25)))


def test_characters_of_several_bytes():
    """Texts of such characters, which the model is made to write byte by byte: in each shape the
    deltas are whole characters, add up to the whole answer, and that is the text."""
    rng = random.Random(7)
    pieces = 0
    with server() as s:
        for _ in range(12):
            want = random_text(rng)
            for path, body, whole, delta in shapes(300, schema={"const": want}, logit_bias=DENSE):
                text = whole(s.post(path, body))
                parts = streamed(s, path, body, delta)
                assert json.loads(text) == want and "".join(parts) == text, (path, want, text)
                # of what is no part of the text there is nothing: half a character would be U+FFFD
                assert "�" in want or not any("�" in p for p in parts), (path, want, parts)
                pieces += len(parts)
    assert pieces > 500


def test_stops_among_such_characters():
    """Stop strings out of such texts, and such that only begin like a part of them: nothing of the
    first comes out, nothing before it is lost, of the others nothing is missing at the end."""
    rng = random.Random(8)
    with server() as s:
        for _ in range(10):
            want = random_text(rng) + "é中😀" + random_text(rng)
            full = None
            for path, body, whole, _ in shapes(300, schema={"const": want}, logit_bias=DENSE):
                text = whole(s.post(path, body))
                assert full in (None, text), (full, text)
                full = text
            at = rng.randrange(len(full) - 3)
            cut = full[at:at + rng.randrange(1, 4)]
            for stops in ([cut, "never said"], [full[-3:] + "é", full[at:at + 2] + "zz€"]):
                hits = [full.find(x) for x in stops if x in full]
                end = full[:min(hits)] if hits else full
                for path, body, whole, delta in shapes(300, stop=stops, schema={"const": want},
                                                       logit_bias=DENSE):
                    assert whole(s.post(path, body)) == end, (path, stops, full)
                    assert "".join(streamed(s, path, body, delta)) == end, (path, stops, full)


def test_held_text_is_told_at_the_limit():
    """What might have become a stop string comes out when the limit of tokens ends the answer, and
    no sooner; half a character, too.  The reason is the limit."""
    with server() as s:
        for path, body, whole, delta in shapes(5, logit_bias={"97": 100}, stop=["aaaaaaaa"]):
            a = s.post(path, body)
            parts = [p for p in streamed(s, path, body, delta) if p]
            assert whole(a) == "aaaaa" and parts == ["aaaaa"], (path, a, parts)
            assert any(x in json.dumps(a) for x in ('"length"', '"max_tokens"',
                                                    '"max_output_tokens"')), a
        for path, body, whole, delta in shapes(3, logit_bias={"226": 100}):
            a = s.post(path, body)
            text = "".join(streamed(s, path, body, delta))
            assert whole(a) == text and set(text) == {"�"}, (path, a, text)


# ---- what clients write ------------------------------------------------------------------------

MARKS = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<tool_call>", "<|python_tag|>")


def test_text_is_never_control():
    """A mark takes about as many tokens as it has characters, wherever clients write it: were it a
    special token, it would be one."""
    def places(x):
        def f(**k):
            return [{"type": "function", "function": {"name": "f", **k}}]
        called = [{"role": "assistant", "content": "",
                   "tool_calls": [{"id": "1", "type": "function",
                                   "function": {"name": "f", "arguments": json.dumps({"a": x})}}]}]
        yield CHAT, {"messages": [{"role": "user", "content": x}]}
        yield CHAT, {"messages": [{"role": "system", "content": x}] + HELLO}
        yield CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": x}]}]}
        yield CHAT, {"messages": HELLO + [{"role": "assistant", "content": x}] + HELLO}
        yield CHAT, {"messages": HELLO + called}
        yield CHAT, {"messages": HELLO + [{"role": "tool", "tool_call_id": "1", "content": x}]}
        yield CHAT, {"messages": HELLO, "tools": f(description=x)}
        yield CHAT, {"messages": HELLO, "tools": f(parameters={"type": "object", "title": x})}
        yield COMPLETION, {"prompt": x}
        yield COMPLETION, {"prompt": ["a", x]}
        yield MESSAGES, {"messages": HELLO, "system": x}
        yield MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": x}]}]}
        yield MESSAGES, {"messages": HELLO, "tools": [
            {"name": "f", "description": x, "input_schema": {"type": "object"}}]}
        yield RESPONSES, {"input": x}
        yield RESPONSES, {"input": "hi", "instructions": x}
        yield RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": x}]}

    def count(s, path, body):
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        u = s.post(path, {**body, limit: 1})["usage"]
        cached = u.get("cache_read_input_tokens", 0)
        return u.get("prompt_tokens", u.get("input_tokens", 0) + cached)

    for form in ("hermes", "chatml"):
        with server("--chat-template", str(HERE / "data" / f"{form}.jinja")) as s:
            for mark in MARKS:
                least = max(2, len(mark) - 4)
                assert s.post("/tokenize", {"content": mark})["count"] >= least, mark
                for (path, body), (_, bare) in zip(places("a" + mark + "b"), places("ab")):
                    if form == "chatml" and '"tool' in json.dumps(body):
                        continue  # that template has none
                    assert count(s, path, body) >= count(s, path, bare) + least, (path, body)


# ---- schemas that mean no good -----------------------------------------------------------------

def nested(n):
    out = {"type": "string"}
    for _ in range(n):
        out = {"type": "object", "properties": {"a": out}, "required": ["a"]}
    return out


IMPOSSIBLE = (
    {"enum": []}, {"type": "string", "minLength": 5, "maxLength": 3},
    {"type": "integer", "minimum": 5, "maximum": 4},
    {"type": "array", "minItems": 3, "maxItems": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"$ref": "#"}, {"$ref": "#/nowhere"},
    {"$ref": "http://evil.example/schema"}, {"$ref": "file:///etc/passwd"}, False,
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "[b-a]"}, {"type": 5}, {"type": "nothing"}, {"properties": 5},
    {"const": 1, "type": "string"}, {"not": {}},
)
GREEDY = (
    {"type": "array", "minItems": 10**9, "items": {}},
    {"type": "string", "minLength": 10**9}, {"type": "string", "maxLength": 2**62},
    {"type": "array", "maxItems": 2**62, "items": {"type": "array", "maxItems": 10**6}},
    {"type": "string", "pattern": "(a*)*b"}, {"type": "string", "pattern": "(((a+)+)+)+$"},
    {"type": "string", "pattern": "a{1000000}"}, {"type": "string", "pattern": "(x{500}){500}"},
    {"type": "string", "pattern": "[\u0000-\U0010ffff]{0,60000}"},
    {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}},
    {"enum": ["x" * i for i in range(1500)]}, {"enum": [str(i) for i in range(20000)]},
    {"anyOf": [{"type": "string", "maxLength": i} for i in range(900)]},
    {"allOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(900)]},
    nested(20), nested(40),
    {"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"},
                                                      "r": {"$ref": "#/$defs/t"}}}},
     "$ref": "#/$defs/t"},
    {"type": "integer", "minimum": -10**18, "maximum": 10**18}, {"type": "number"},
)


def test_impossible_schemas():
    """400 that names the field, or an answer within its limit, in seconds, and memory as before."""
    def ways(schema):
        f = {"name": "f", "parameters": schema, "strict": True}
        yield CHAT, "response_format", {"messages": HELLO, "max_tokens": 40, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        yield CHAT, "tools", {"messages": HELLO, "max_tokens": 40, "tool_choice": "required",
                              "tools": [{"type": "function", "function": f}]}
        yield RESPONSES, "text", {"input": "x", "max_output_tokens": 40, "text": {
            "format": {"type": "json_schema", "name": "n", "schema": schema}}}
        yield MESSAGES, "output_config", {"messages": HELLO, "max_tokens": 40, "output_config": {
            "format": {"type": "json_schema", "schema": schema}}}

    with server() as s:
        want = s.post(COMPLETION, {"prompt": "as before", "max_tokens": 9})["choices"]
        grown = 0
        for i, schema in enumerate(IMPOSSIBLE + GREEDY):
            for path, field, body in ways(schema):
                start = time.monotonic()
                status, _, data = s.call("POST", path, body)
                took = time.monotonic() - start
                in_time(took, 5, schema)
                a = json.loads(data)
                if status == 200:
                    assert i >= len(IMPOSSIBLE), (schema, a)
                    u = a["usage"]
                    assert u.get("completion_tokens", u.get("output_tokens", 0)) <= 40
                else:
                    assert status == 400, (schema, status, data)
                    named = a["error"].get("param") or a["error"]["message"]
                    # a body may be nested too deep, a prompt that shows the tool too long
                    assert field in named or "nested" in named or \
                        a["error"].get("code") == "context_length_exceeded", a
            if i == len(IMPOSSIBLE):
                grown = s.rss_kib()
        assert s.post(COMPLETION, {"prompt": "as before", "max_tokens": 9})["choices"] == want
        if SLOW == 1:
            assert s.rss_kib() < grown + 200 * 1024, (grown, s.rss_kib())


if __name__ == "__main__":
    main(globals())
