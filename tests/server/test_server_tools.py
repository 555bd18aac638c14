#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tools: what the template gets, calls that a model of random weights makes, what is refused."""
import json

from kvserver import HERE, Server, main

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "additionalProperties": False, "required": ["city", "days"],
        "properties": {"city": {"enum": ["Oslo", "Rome"]},
                       "days": {"type": "integer", "minimum": 1, "maximum": 9}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "strict": True,
                                           "parameters": CITY}},
         {"type": "function", "function": {"name": "clock"}}]
WEATHER = {"type": "function", "function": {"name": "weather"}}
# White space is free in calls, and a model of random weights would write nothing else.
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}


def server(*args, form="hermes", **kw):
    return Server("--chat-template", str(HERE / "data" / f"{form}.jinja"), *args, **kw)


def check_call(c):
    assert c["type"] == "function" and c["id"].startswith("call_"), c
    args = json.loads(c["function"]["arguments"])
    if c["function"]["name"] == "weather":
        assert list(args) == ["city", "days"] and args["city"] in ("Oslo", "Rome"), args
        assert isinstance(args["days"], int) and 1 <= args["days"] <= 9
    else:
        assert c["function"]["name"] == "clock" and isinstance(args, dict), c


def joined(events):
    """A stream's choice as a message, and its end."""
    text, calls, finish = "", [], None
    for e in events:
        if e == "[DONE]" or not e["choices"]:
            continue
        c = e["choices"][0]
        finish = c["finish_reason"] or finish
        text += c["delta"].get("content") or ""
        for t in c["delta"].get("tool_calls", ()):
            if "id" in t:
                assert t["index"] == len(calls) and t["function"]["arguments"] == ""
                calls.append({"id": t["id"], "type": t["type"], "function": t["function"]})
            else:
                calls[t["index"]]["function"]["arguments"] += t["function"]["arguments"]
    return text, calls, finish


def without_ids(calls):
    return [c["function"] for c in calls]


def test_required():
    for form in ("hermes", "llama3"):
        with server(form=form) as s:
            for i in range(6):
                body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 700, "seed": i,
                        "temperature": float(i % 2), "parallel_tool_calls": False,
                        "logit_bias": DENSE,
                        "tool_choice": WEATHER if i < 4 else "required"}
                c = s.post(CHAT, body)["choices"][0]
                calls = c["message"]["tool_calls"]
                if c["finish_reason"] == "length":  # an object without end
                    assert i >= 4, c
                    continue
                assert c["finish_reason"] == "tool_calls" and len(calls) == 1, c
                assert c["message"]["content"] is None, c
                check_call(calls[0])
                assert i >= 4 or calls[0]["function"]["name"] == "weather"
                text, streamed, finish = joined(s.stream(CHAT, body))
                assert text == "" and finish == "tool_calls"
                assert without_ids(streamed) == without_ids(calls)


def test_several_calls():
    """Calls follow each other while the model likes it; ids differ; choices have their own."""
    with server() as s:
        body = {"messages": HELLO, "tools": TOOLS[:1], "tool_choice": "required", "n": 2,
                "max_tokens": 900, "temperature": 1.0, "logit_bias": {"261": -100, **DENSE}}
        ids, most = [], 0
        for seed in range(3):
            for c in s.post(CHAT, {**body, "seed": seed})["choices"]:
                calls = c["message"]["tool_calls"]
                most = max(most, len(calls))
                for call in calls if c["finish_reason"] == "tool_calls" else calls[:-1]:
                    check_call(call)
                ids += [call["id"] for call in calls]
        assert len(set(ids)) == len(ids) and most > 2, (most, ids)


def test_auto():
    """Text, or calls: with Llama 3's form a call is what begins with a bracket."""
    with server() as s:
        body = {"messages": HELLO, "tools": TOOLS[:1], "max_tokens": 40, "temperature": 1.0,
                "seed": 4, "logit_bias": {"261": -100, "60": -100}}
        c = s.post(CHAT, body)["choices"][0]
        assert c["finish_reason"] == "length" and "tool_calls" not in c["message"], c
        text, calls, _ = joined(s.stream(CHAT, body))
        assert calls == [] and text == c["message"]["content"] and text
    with server(form="llama3") as s:
        for seed in range(6):
            body = {"messages": HELLO, "tools": TOOLS[:1], "max_tokens": 400, "temperature": 1.0,
                    "seed": seed, "parallel_tool_calls": False,
                    "logit_bias": {**DENSE, "123": 100 if seed % 2 else -100}}
            c = s.post(CHAT, body)["choices"][0]
            text, calls, finish = joined(s.stream(CHAT, body))
            if seed % 2:
                assert c["finish_reason"] == finish == "tool_calls" and text == "", c
                check_call(c["message"]["tool_calls"][0])
                assert without_ids(calls) == without_ids(c["message"]["tool_calls"])
            else:
                assert "tool_calls" not in c["message"] and calls == [], c
                assert text == c["message"]["content"]


def test_logprobs_and_length():
    with server() as s:
        body = {"messages": HELLO, "tools": TOOLS[:1], "tool_choice": "required",
                "max_tokens": 700, "logit_bias": DENSE, "logprobs": True, "top_logprobs": 1}
        a = s.post(CHAT, body)
        n = len(a["choices"][0]["logprobs"]["content"])
        assert n in (a["usage"]["completion_tokens"], a["usage"]["completion_tokens"] - 1)
        streamed = [t for e in s.stream(CHAT, body) if e != "[DONE]" for x in e["choices"]
                    if x["logprobs"] for t in x["logprobs"]["content"]]
        assert streamed == a["choices"][0]["logprobs"]["content"]
        for n in range(1, 60):  # cut anywhere, no text comes of a call that has begun
            c = s.post(CHAT, {**body, "max_tokens": n, "logprobs": False,
                              "top_logprobs": None})["choices"][0]
            assert c["finish_reason"] in ("length", "tool_calls"), c
            full = a["choices"][0]["message"]["tool_calls"][0]["function"]
            for call in c["message"].get("tool_calls", ())[:1]:
                assert full["name"] == call["function"]["name"]
                assert full["arguments"].startswith(call["function"]["arguments"])
        stop = s.post(CHAT, {**body, "stop": "Oslo", "messages": HELLO,
                             "logit_bias": {**DENSE, "79": 90}})["choices"][0]
        assert stop["finish_reason"] == "stop" and "Oslo" not in json.dumps(stop["message"])


def said(s, path, n, form):
    """An answer of n tokens at most that has to be a call (Llama 3: whose first byte begins one):
    texts and names of calls as they are told whole, and streamed; and why it ended."""
    required = form == "hermes"
    bias = {"logit_bias": DENSE if required else {**DENSE, "123": 100}, "seed": 3}
    function = TOOLS[0]["function"]
    if path == CHAT:
        body = {"messages": HELLO, "tools": TOOLS[:1], "max_tokens": n, **bias,
                "tool_choice": "required" if required else "auto"}
        c = s.post(path, body)["choices"][0]
        text, calls, finish = joined(s.stream(path, body))
        assert finish == c["finish_reason"]
        return ([c["message"]["content"] or "", text],
                [f["function"]["name"] for f in c["message"].get("tool_calls", [])],
                [f["function"]["name"] for f in calls], finish)
    if path == "/v1/responses":
        body = {"input": "hello", "max_output_tokens": n, **bias,
                "tools": [{"type": "function", **function}],
                "tool_choice": "required" if required else "auto"}
        events = list(s.stream(path, body))
        whole, last = s.post(path, body), events[-1]["response"]
        texts = [p["text"] for r in (whole, last) for i in r["output"] if i["type"] == "message"
                 for p in i["content"]]
        texts += [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        names = [[i["name"] for i in r["output"] if i["type"] == "function_call"]
                 for r in (whole, last)]
        assert whole["status"] == last["status"]
        why = whole["incomplete_details"]
        return texts, *names, "length" if why and why["reason"] == "max_output_tokens" else "stop"
    body = {"messages": HELLO, "max_tokens": n, **bias,
            "tools": [{"name": "weather", "input_schema": CITY}],
            "tool_choice": {"type": "any" if required else "auto"}}
    events, whole = list(s.stream(path, body)), s.post(path, body)
    texts = [b["text"] for b in whole["content"] if b["type"] == "text"]
    texts += [e["delta"]["text"] for e in events
              if e["type"] == "content_block_delta" and e["delta"]["type"] == "text_delta"]
    begun = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    return (texts, [b["name"] for b in whole["content"] if b["type"] == "tool_use"],
            [b["name"] for b in begun if b["type"] == "tool_use"],
            {"max_tokens": "length"}.get(whole["stop_reason"], "stop"))


def test_cut_calls_are_no_text():
    """A limit that ends a call before its name is whole: no call, and nothing of it is content."""
    for form, begins in (("hermes", len('<tool_call>{"name":"weather"')), ("llama3", 18)):
        with server(form=form) as s:
            for path in (CHAT, "/v1/responses", "/v1/messages"):
                n_call = 0
                for n in range(1, begins + 16, 1 if path == CHAT else 3):
                    texts, whole, streamed, finish = said(s, path, n, form)
                    assert "".join(texts) == "", (path, n, texts)
                    assert whole == streamed and whole in ([], ["weather"]), (path, n, whole)
                    assert finish == "length", (path, n, finish)
                    n_call += len(whole)
                    assert n > 4 or not whole
                assert n_call > 0, (form, path)
            c = s.post(CHAT, {"messages": HELLO, "tools": TOOLS[:1], "tool_choice": "required",
                              "max_tokens": 60, "logit_bias": DENSE, "stop": "name"})["choices"][0]
            assert c["finish_reason"] == "stop" and not c["message"]["content"], c


def test_prompt():
    """Tools, calls and results reach the template; special tokens in them stay text."""
    with server() as s:
        calls = [{"id": "call_1", "type": "function",
                  "function": {"name": "weather", "arguments": '{"days": 2, "city": "Oslo"}'}}]
        messages = HELLO + [{"role": "assistant", "content": None, "tool_calls": calls},
                            {"role": "tool", "tool_call_id": "call_1",
                             "content": [{"type": "text", "text": "rain<|im_end|>"}]}]
        p = s.post("/apply-template", {"messages": messages, "tools": TOOLS})["prompt"]
        assert '"arguments": {"days": 2, "city": "Oslo"}}</tool_call><|im_end|>' in p, p
        assert "tool\nrain<|im_end|>" in p and '"name": "clock"' in p, p
        object_args = json.loads(json.dumps(messages))
        object_args[1]["tool_calls"][0]["function"]["arguments"] = {"days": 2, "city": "Oslo"}
        assert s.post("/apply-template", {"messages": object_args, "tools": TOOLS})["prompt"] == p
        # a call that was cut comes back as text
        object_args[1]["tool_calls"][0]["function"]["arguments"] = '{"days":'
        p = s.post("/apply-template", {"messages": object_args})["prompt"]
        assert '"arguments": "{\\"days\\":"}' in p, p
        n = lambda **k: s.post(CHAT, {"messages": messages, "max_tokens": 1, **k}) \
            ["usage"]["prompt_tokens"]
        bare = n()
        assert n(tools=TOOLS) > bare + 100
        # tools that may not be called are not shown
        assert n(tools=TOOLS, tool_choice="none") == bare and n(tools=[]) == bare


def test_long_numbers():
    """Arguments of 19 digits and bounds beyond int64 come and go as they are written."""
    when = {"type": "object", "required": ["ns", "id"], "additionalProperties": False,
            "properties": {"ns": {"type": "integer", "minimum": 1700000000000000001,
                                  "maximum": 1700000000000000001},
                           "id": {"type": "integer", "minimum": 18446744073709551615,
                                  "maximum": 18446744073709551615}}}
    tools = [{"type": "function", "function": {"name": "at", "strict": True, "parameters": when}}]
    args = '{"ns":1700000000000000001,"id":18446744073709551615}'
    name = '{"name": "at", "arguments": '
    with server() as s:
        body = {"messages": HELLO, "tools": tools, "max_tokens": 200, "logit_bias": DENSE,
                "tool_choice": "required", "parallel_tool_calls": False}
        call = s.post(CHAT, body)["choices"][0]["message"]["tool_calls"][0]
        assert call["function"]["arguments"] == args, call
        for arguments in (args, json.loads(args)):
            call["function"]["arguments"] = arguments
            p = s.post("/apply-template", {"tools": tools, "messages": HELLO + [
                {"role": "assistant", "content": "", "tool_calls": [call]}]})["prompt"]
            assert name + '{"ns": 1700000000000000001, "id": 18446744073709551615}}' in p, p
            assert '"maximum": 18446744073709551615}' in p, p
        text = json.dumps({"messages": HELLO + [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {
                "name": "at", "arguments": {"x": "@"}}}]}]}).replace('"@"', "[0.1, 1e999, -0]")
        p = s.post("/apply-template", text)["prompt"]
        assert name + '{"x": [0.1, 1e999, 0]}}' in p, p


def test_schemas_as_clients_send_them():
    """Schemas of Claude Code 2.1 and of zod's records are enforced: nothing is left out, so the log
    says nothing."""
    line = {"type": "string", "allOf": [{"pattern": "^[^\\n\\r]*$"},
                                        {"pattern": "^[\\s\\S]{0,3}$"}]}
    record = {"type": "object", "propertyNames": {"type": "string"}, "required": ["k"],
              "additionalProperties": {"enum": [1, 2]}}
    pair = {"type": "array", "items": [{"const": "a"}, {"const": 7}], "minItems": 2}
    p = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
         "properties": {"to": line, "map": record, "pair": pair},
         "required": ["to", "map", "pair"], "additionalProperties": False}
    with server() as s:
        tools = [{"type": "function", "function": {"name": "send", "parameters": p}}]
        for seed in range(4):
            c = s.post(CHAT, {"messages": HELLO, "tools": tools, "max_tokens": 900, "seed": seed,
                              "tool_choice": "required", "parallel_tool_calls": False,
                              "logit_bias": DENSE})["choices"][0]
            if c["finish_reason"] == "length":  # a name without end
                continue
            a = json.loads(c["message"]["tool_calls"][0]["function"]["arguments"])
            assert list(a) == ["to", "map", "pair"] and a["pair"] == ["a", 7], a
            assert len(a["to"]) <= 3 and not set("\n\r") & set(a["to"]), a
            assert "k" in a["map"] and set(a["map"].values()) <= {1, 2}, a
        assert not [x for x in s.lines if "any object" in x], s.lines
        # what cannot be enforced is told with its own place, whatever came before
        tools += [{"type": "function", "function": {"name": "b", "parameters": {
            "properties": {"m": {"type": "object", "patternProperties": {}}}}}}]
        s.post(CHAT, {"messages": HELLO, "tools": tools, "max_tokens": 1})
        told = [x for x in s.lines if "any object" in x]
        assert len(told) == 1 and "b: patternProperties is not supported (at /m)" in told[0], told


def test_refuses():
    f = lambda **k: {"type": "function", "function": {"name": "f", **k}}
    strict = {"strict": True, "parameters": {"not": {"type": "null"}}}
    with server() as s:
        for field, value, more in (
                ("tools", {}, {}), ("tools", "x", {}), ("tools", [f(name="")], {}),
                ("tools", [f(), f()], {}), ("tools", [f(**strict)], {}),
                ("tools", [f()] * 1025, {}),
                ("tool_choice", "often", {"tools": TOOLS}), ("tool_choice", 5, {"tools": TOOLS}),
                ("tool_choice", {"type": "function", "function": {"name": "g"}}, {"tools": TOOLS}),
                ("tool_choice", "required", {}), ("tool_choice", WEATHER, {}),
                ("tool_choice", "required", {"tools": []}),
                ("parallel_tool_calls", "no", {"tools": TOOLS}),
                ("response_format", {"type": "json_object"}, {"tools": TOOLS})):
            e = s.error(CHAT, {"messages": HELLO, field: value, **more}, field)
        e = s.error(CHAT, {"messages": HELLO, "tools": [f(**strict)]}, "tools")
        assert "f: not" in e["message"], e
        ask = {"input": "hello", "max_output_tokens": 1,
               "tools": [{"type": "function", "name": "f"}]}
        s.post("/v1/responses", {**ask, "tool_choice": {"type": "function", "name": "f"}})
        s.error("/v1/responses", {**ask, "tool_choice": {"type": "custom", "name": "f"}},
                "tool_choice.type")
        deep = {"name": "f", "arguments": '{"a":' * 100 + "1" + "}" * 100}
        s.post("/apply-template", {"messages": HELLO + [{"role": "assistant", "content": "",
                                                         "tool_calls": [{"function": deep}]}]})
        # without "strict" a schema that cannot be applied takes any object
        c = s.post(CHAT, {"messages": HELLO, "tools": [f(parameters={"not": {}})], "max_tokens": 90,
                          "tool_choice": "required", "logit_bias": DENSE})["choices"][0]
        assert c["message"]["tool_calls"][0]["function"]["name"] == "f", c
        for _ in range(2):  # which the log says once for each such schema
            s.post(CHAT, {"messages": HELLO, "tools": [f(parameters={"not": {}})], "max_tokens": 1})
        told = [line for line in s.lines if "its arguments are any object" in line]
        assert len(told) == 1 and "f: not" in told[0], told
        # json with tools that may not be called
        s.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": "none", "max_tokens": 3,
                      "response_format": {"type": "json_object"}})
        for tools, told in (([f(), f()], "tools: two functions 'f'"),
                            ([f(**strict)], "tools: f: not is not supported (at its root)")):
            assert s.error(CHAT, {"messages": HELLO, "tools": tools}, "tools")["message"] == told


def test_templates_without_calls():
    """SmolLM2's has no form of calls: the server describes tools, and says so once in the log."""
    templates = HERE.parent / "data" / "tmpl" / "templates"
    of = lambda name: Server("--chat-template", str(templates / f"{name}.jinja"))
    with of("SmolLM2-135M-Instruct") as s:
        p = s.post("/apply-template", {"messages": HELLO, "tools": TOOLS[:1]})["prompt"]
        assert p == (
            "<|im_start|>system\n# Tools\n\nYou may call these functions. Each line describes one, "
            "with the JSON schema of its parameters:\n" +
            json.dumps(TOOLS[0]["function"], separators=(",", ":")) +
            "\n\nTo call a function, write its name and arguments in this form, and nothing behind "
            'it:\n<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER":"VALUE"}}\n'
            "</tool_call>\n"
            "The result comes in the next message. Answer in plain text when no function is needed."
            "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"), p
        system = [{"role": "system", "content": "Be brief."}]
        p = s.post("/apply-template", {"messages": system + HELLO, "tools": TOOLS})["prompt"]
        assert p.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n"), p
        ask = {"messages": HELLO, "tools": TOOLS, "tool_choice": WEATHER, "max_tokens": 200,
               "logit_bias": DENSE}
        for _ in range(2):
            calls = s.post(CHAT, ask)["choices"][0]["message"]["tool_calls"]
            assert len(calls) == 1
            check_call(calls[0])
        s.wait_for(lambda: sum("has no form of calls" in x for x in s.lines) == 1)
        n = lambda **k: s.post(CHAT, {"messages": HELLO, "max_tokens": 1, **k}) \
            ["usage"]["prompt_tokens"]
        assert n(tools=TOOLS, tool_choice="none") == n(tools=[]) == n()
    for name in ("Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"):  # docs/structured.md names them
        with of(name) as s:
            c = s.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": WEATHER,
                              "max_tokens": 200, "reasoning_format": "none",
                              "logit_bias": DENSE})["choices"][0]
            check_call(c["message"]["tool_calls"][0])


if __name__ == "__main__":
    main(globals())
