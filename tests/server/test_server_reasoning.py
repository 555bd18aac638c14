#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reasoning, assistant prefill, and tool calls of all templates, by a model that says what it is
told to (parrot.py)."""
import json
import pathlib
import tempfile

import parrot
from kvserver import HERE, Server, main

# White space is free in calls.
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEMPLATES = HERE.parent / "data" / "tmpl" / "templates"
HELLO = [{"role": "user", "content": "hello"}]
THINK = ["<think>", "</think>"]
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "d", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "d"},
            "days": {"type": "integer", "description": "d", "minimum": 1, "maximum": 9}}}}}
CLOSED = json.loads(json.dumps(TOOL))  # without free text, which has no end of its own
CLOSED["function"]["parameters"]["properties"]["city"]["enum"] = ["Oslo", "Rome"]
# DeepSeek's marks
BAR, LOW = "\uff5c", "\u2581"


def ds(*words):
    return f"<{BAR}{LOW.join(words)}{BAR}>"


class Says(Server):
    """A server whose model says the pieces."""

    def __init__(self, pieces, *args, template, marks=(), ends="\n", again=False):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "parrot.gguf"
        parrot.write(path, pieces, marks, ends, again)
        file = TEMPLATES / f"{template}.jinja"
        if not file.exists():
            file = HERE / "data" / f"{template}.jinja"
        super().__init__("-m", str(path), "--chat-template", str(file), *args)

    def __exit__(self, *why):
        try:
            super().__exit__(*why)
        finally:
            self.folder.cleanup()


def deltas(events, field):
    return "".join(c["delta"].get(field) or "" for e in events if e != "[DONE]"
                   for c in e["choices"])


def check_reasoning(s, reasoning, text, n):
    """All three shapes, whole and streamed."""
    a = s.post(CHAT, {"messages": HELLO})
    m = a["choices"][0]["message"]
    assert (m.get("reasoning_content"), m["content"]) == (reasoning, text), m
    assert a["usage"]["completion_tokens_details"]["reasoning_tokens"] == n, a["usage"]
    events = list(s.stream(CHAT, {"messages": HELLO}))
    assert deltas(events, "reasoning_content") == (reasoning or ""), events
    assert deltas(events, "content") == text, events

    ask = {"messages": HELLO, "max_tokens": 100}
    blocks = s.post(MESSAGES, ask)["content"]
    want = [{"type": "text", "text": text}]
    if reasoning:
        want.insert(0, {"type": "thinking", "thinking": reasoning, "signature": ""})
    assert blocks == want, blocks
    events = list(s.stream(MESSAGES, ask))
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert kinds == [b["type"] for b in want], kinds
    told = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in told) == (reasoning or "")
    assert "".join(d.get("text", "") for d in told) == text
    assert sum(d["type"] == "signature_delta" for d in told) == bool(reasoning)

    output = s.post(RESPONSES, {"input": "hello"})["output"]
    assert [i["type"] for i in output] == ["reasoning", "message"][not reasoning:], output
    if reasoning:
        assert output[0]["content"] == [{"type": "reasoning_text", "text": reasoning}]
        assert output[0]["summary"] == [] and output[0]["id"].startswith("rs_")
    assert output[-1]["content"][0]["text"] == text
    events = list(s.stream(RESPONSES, {"input": "hello"}))
    kinds = ["response.reasoning_text.delta", "response.output_text.delta"]
    got = ["".join(e["delta"] for e in events if e["type"] == k) for k in kinds]
    assert got == [reasoning or "", text], got
    last = events[-1]["response"]
    strip = lambda items: [{k: v for k, v in i.items() if k != "id"} for i in items]
    assert strip(last["output"]) == strip(output)
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == n


def test_reasoning():
    """Told apart from the text, as the template marks it; the text has no marks."""
    said = ["I see", " so", "</think>", "\n\n", "Yes", " it is."]
    with Says(["<think>", "\n ", *said], template="Qwen-Qwen3-0.6B", marks=THINK) as s:
        check_reasoning(s, "I see so", "Yes it is.", 4)
        off = {"messages": HELLO, "reasoning_format": "none"}
        m = s.post(CHAT, off)["choices"][0]["message"]
        assert "reasoning_content" not in m and m["content"].endswith("Yes it is."), m
        s.error(CHAT, {"messages": HELLO, "reasoning_format": "deepseek"}, "reasoning_format")
        # a limit inside of reasoning: no text
        c = s.post(CHAT, {"messages": HELLO, "max_tokens": 4})["choices"][0]
        assert c["finish_reason"] == "length" and c["message"]["content"] == "", c
        assert c["message"]["reasoning_content"] == "I see so", c
        # a template that closes reasoning itself
        m = s.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}})
        assert "reasoning_content" not in m["choices"][0]["message"], m
    # the prompt ends inside of reasoning
    with Says(said, template="Qwen-QwQ-32B", marks=THINK) as s:
        check_reasoning(s, "I see so", "Yes it is.", 3)
    with Says(["<seed:think>", "I see", "</seed:think>", "Yes"],
              template="ByteDance-Seed-OSS") as s:
        check_reasoning(s, "I see", "Yes", 2)
    with Says(["<think>", "I see"], "--reasoning-format", "none", template="Qwen-QwQ-32B",
              marks=THINK) as s:
        m = s.post(CHAT, {"messages": HELLO})["choices"][0]["message"]
        assert "reasoning_content" not in m and m["content"].endswith("I see"), m
    # no form of reasoning: text
    with Says(["<think>", "I see"], template="SmolLM2-135M-Instruct") as s:
        check_reasoning(s, None, "<think>I see", 0)


def test_harmony():
    """gpt-oss: channels."""
    # a mark is a piece once, so an answer has one message
    with Says(["<|channel|>", "analysis", "<|message|>", "I see"],
              template="openai-gpt-oss-120b", marks=HARMONY, ends="t") as s:
        m = s.post(CHAT, {"messages": HELLO})["choices"][0]["message"]
        assert (m["reasoning_content"], m["content"]) == ("I see", ""), m
    with Says(["<|channel|>", "final", "<|message|>", "Yes"], template="openai-gpt-oss-120b",
              marks=HARMONY, ends="t") as s:
        check_reasoning(s, None, "Yes", 0)


def test_reasoning_and_grammars():
    """What a request asks for holds behind the reasoning."""
    said = ["I see", " so", "</think>", "\n\n", "Yes"]
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["up", "down"]}}}
    with Says(said, template="Qwen-QwQ-32B", marks=THINK) as s:
        m = s.post(CHAT, {"messages": HELLO, "response_format": form})["choices"][0]["message"]
        assert m["reasoning_content"] == "I see so" and json.loads(m["content"]) in ("up", "down")
        c = s.post(CHAT, {"messages": HELLO, "tools": [CLOSED], "tool_choice": "required",
                          "max_tokens": 1500, "parallel_tool_calls": False})["choices"][0]
        assert c["message"]["reasoning_content"] == "I see so", c
        assert c["message"]["tool_calls"][0]["function"]["name"] == "weather", c


def test_history_has_reasoning():
    """What an assistant's message thought goes back to templates that show it."""
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turn = [{"role": "assistant", "content": "", "reasoning_content": "I look it up.",
             "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    with Says(["Yes"], template="Qwen-Qwen3-0.6B", marks=THINK) as s:
        prompt = lambda m: s.post("/apply-template", {"messages": m})["prompt"]
        p = prompt(HELLO + turn)
        assert "<think>\nI look it up.\n</think>\n\n<tool_call>" in p, p
        other = json.loads(json.dumps(turn).replace("reasoning_content", "reasoning"))
        assert prompt(HELLO + other) == p
        n = s.post(CHAT, {"messages": HELLO + turn, "max_tokens": 1})["usage"]["prompt_tokens"]
        a = s.post(MESSAGES, {"max_tokens": 1, "messages": HELLO + [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I look it up.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "call_1", "name": "weather",
                 "input": {"city": "Oslo"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}]}]})
        assert a["usage"]["input_tokens"] + a["usage"]["cache_read_input_tokens"] == n, a["usage"]
        items = [{"role": "user", "content": "hello"},
                 {"type": "reasoning", "id": "rs_1", "summary": [],
                  "content": [{"type": "reasoning_text", "text": "I look it up."}]},
                 {"type": "function_call", "call_id": "call_1", "name": "weather",
                  "arguments": '{"city": "Oslo"}'},
                 {"type": "function_call_output", "call_id": "call_1", "output": "rain"}]
        a = s.post(RESPONSES, {"input": items, "max_output_tokens": 1})
        assert a["usage"]["input_tokens"] == n, a["usage"]
        items[1] = {"type": "reasoning", "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "I look it up."}]}
        a = s.post(RESPONSES, {"input": items, "max_output_tokens": 1})
        assert a["usage"]["input_tokens"] == n, a["usage"]
    with Says(["Yes"], template="openai-gpt-oss-120b", ends="t") as s:
        p = s.post("/apply-template", {"messages": HELLO + turn})["prompt"]
        assert "<|channel|>analysis<|message|>I look it up.<|end|>" in p, p


def test_prefill():
    """A last assistant message is continued: it is not closed, and only what is new is told."""
    begun = HELLO + [{"role": "assistant", "content": "Sure:\n"}]
    with Says(["Yes", " it is."], template="chatml") as s:
        prompt = lambda m, **k: s.post("/apply-template", {"messages": m, **k})["prompt"]
        assert prompt(begun) == prompt(HELLO) + "Sure:\n"
        assert prompt(begun, continue_final_message=False).endswith(
            "Sure:\n<|im_end|>\n<|im_start|>assistant\n")
        assert prompt(begun, add_generation_prompt=False).endswith("Sure:\n<|im_end|>\n")
        assert prompt(begun, add_generation_prompt=False, continue_final_message=True) \
            == prompt(HELLO, add_generation_prompt=False) + "Sure:\n"
        a = s.post(CHAT, {"messages": begun})
        assert a["choices"][0]["message"]["content"] == "Yes it is.", a
        n = a["usage"]["prompt_tokens"]
        assert n == s.post(CHAT, {"messages": HELLO})["usage"]["prompt_tokens"] + len("Sure:\n")
        ask = {"messages": begun, "max_tokens": 9}
        a = s.post(MESSAGES, ask)
        assert a["content"] == [{"type": "text", "text": "Yes it is."}], a
        assert s.post("/v1/messages/count_tokens", ask)["input_tokens"] == n
        # special tokens of a client stay text
        odd = HELLO + [{"role": "assistant", "content": "<|im_end|>\n"}]
        assert s.post(CHAT, {"messages": odd})["usage"]["prompt_tokens"] == n + 5
        s.error(CHAT, {"messages": begun[1:]}, "messages")
        # calls are whole, and so is a message of a response
        whole = HELLO + [{"role": "assistant", "content": "", "tool_calls": [
            {"id": "c", "function": {"name": "f", "arguments": "{}"}}]}]
        assert prompt(whole).endswith("<|im_start|>assistant\n")
        items = [{"role": m["role"], "content": m["content"]} for m in begun]
        a = s.post(RESPONSES, {"input": items})
        assert a["usage"]["input_tokens"] > n, a
    with Says(["Yes"], template="Qwen-QwQ-32B", marks=THINK, ends="\n>") as s:
        prompt = lambda **k: s.post("/apply-template", {"messages": HELLO + [
            {"role": "assistant", **k}]})["prompt"]
        bare = s.post("/apply-template", {"messages": HELLO})["prompt"]
        assert bare.endswith("<think>\n")
        assert prompt(content="So") == bare + "\n</think>\n\nSo"
        assert prompt(content="So", reasoning_content="hm") == bare + "hm\n</think>\n\nSo"
        assert prompt(content="", reasoning_content="hm") == bare + "hm"
        assert prompt(content="<think>hm</think>So") == bare + "hm\n</think>\n\nSo"
        m = s.post(CHAT, {"messages": HELLO + [{"role": "assistant", "content": "So\n"}]})
        assert m["choices"][0]["message"] == {"role": "assistant", "content": "Yes",
                                              "refusal": None}, m
        m = s.post(CHAT, {"messages": HELLO + [
            {"role": "assistant", "content": "", "reasoning_content": "So\n"}]})
        assert m["choices"][0]["message"]["reasoning_content"] == "Yes", m
    with Says(["Yes"], template="openai-gpt-oss-120b") as s:
        p = s.post("/apply-template", {"messages": begun})["prompt"]
        assert p.endswith("<|start|>assistant<|channel|>final<|message|>Sure:\n"), p
        m = s.post(CHAT, {"messages": begun})["choices"][0]["message"]
        assert m["content"] == "Yes", m


# ---- tools with every template -------------------------------------------------------------------

DS = [ds("tool", "calls", "begin"), ds("tool", "call", "begin"), ds("tool", "sep"),
      ds("tool", "call", "end"), ds("tool", "calls", "end")]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>",
           "<|constrain|>"]
# template: control tokens, what a prompt ends with, how history shows a call and a result
HERMES = '<tool_call>\n{"name": "weather", "arguments": '
FORMS = {
    "Qwen-Qwen2.5-7B-Instruct": ([], "\n", HERMES, "rain"),
    "Qwen-Qwen3-0.6B": ([], "\n", HERMES, "rain"),
    "Qwen-QwQ-32B": (THINK, "\n", HERMES, "rain"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (
        [*DS, *THINK], "\n", DS[1] + "function" + DS[2] + "weather\n```json\n", "rain"),
    "ibm-granite-granite-3.3-2B-Instruct": (
        ["<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>"], "<|end_of_role|>",
        '<|tool_call|>[{"name": "weather", "arguments": ', "rain"),
    "microsoft-Phi-4-mini-instruct": (["<|tool_call|>", "<|/tool_call|>", "<|assistant|>"],
                                      "<|assistant|>", '<|tool_call|>{"name": "weather"', "rain"),
    "mistralai-Mistral-Nemo-Instruct-2407": (
        ["[TOOL_CALLS]", "[/INST]", "[/TOOL_RESULTS]"], "[/INST]",
        '[TOOL_CALLS][{"name": "weather", "arguments": ', "rain"),
    "openai-gpt-oss-120b": (HARMONY, "t", "to=functions.weather<|channel|>commentary json", "rain"),
    "ByteDance-Seed-OSS": (["<seed:tool_call>", "</seed:tool_call>"], "\n",
                           "<seed:tool_call>\n<function=weather>\n", "rain"),
    "microsoft-Phi-3.5-mini-instruct": ([], "\n", HERMES,
                                        "<tool_response>\nrain"),
    "SmolLM2-135M-Instruct": ([], "\n", HERMES,
                              "<tool_response>\nrain"),
}
OWN = ("microsoft-Phi-3.5-mini-instruct", "SmolLM2-135M-Instruct")


def calls_of(events):
    calls = []
    for e in events:
        for c in e["choices"] if e != "[DONE]" else ():
            for t in c["delta"].get("tool_calls", ()):
                if "id" in t:
                    calls.append([t["function"]["name"], ""])
                else:
                    calls[t["index"]][1] += t["function"]["arguments"]
    return calls


def check_template(s, name, shown, result, **more):
    """Tools reach the prompt, calls are held to their schema and told, history goes back."""
    for k in ({"type": "function", "function": {"name": "weather"}}, "required"):
        body = {"messages": HELLO, "tools": [CLOSED], "tool_choice": k, "max_tokens": 600,
                "logit_bias": DENSE, "temperature": 0.7, "seed": 5, **more}
        c = s.post(CHAT, body)["choices"][0]
        calls = c["message"].get("tool_calls")
        assert calls, (name, c)
        assert c["finish_reason"] in ("tool_calls", "length"), (name, c)
        assert len(calls) == 1 if k != "required" else 1 <= len(calls) <= 16, (name, calls)
        for call in calls if c["finish_reason"] == "tool_calls" else calls[:-1]:
            args = json.loads(call["function"]["arguments"])
            assert call["function"]["name"] == "weather" and args["city"] in ("Oslo", "Rome")
            assert 1 <= args.get("days", 1) <= 9, (name, args)
        streamed = calls_of(s.stream(CHAT, body))
        assert streamed == [list(x["function"].values()) for x in calls], (name, streamed)
    text = lambda m, **k: s.post("/apply-template", {"messages": m, **k})["prompt"]
    assert "weather" in text(HELLO, tools=[TOOL]), name
    for args in ('{"city": "Oslo"}', "", '{"city": "Os', "null"):
        turn = HELLO + [
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_12345", "type": "function",
                 "function": {"name": "weather", "arguments": args}}]},
            {"role": "tool", "tool_call_id": "call_12345", "content": "rain"}]
        p = text(turn, tools=[TOOL])
        assert shown in p and result in p, (name, p)
        if args in ("", "null"):
            assert '""' not in p.split(shown)[1][:40], (name, p)
            assert "{}" in p.split(shown)[1][:60] or name == "ByteDance-Seed-OSS", (name, p)
        assert "Os" in p or not args.startswith("{"), (name, p)


def two_calls(s, name):
    """Two calls in one message, and their results, are both in the prompt."""
    call = lambda city, i: {"id": i, "type": "function", "function": {
        "name": "weather", "arguments": json.dumps({"city": city})}}
    turn = HELLO + [{"role": "assistant", "content": "I look.", "tool_calls": [
        call("Oslo", "call_a"), call("Rome", "call_b")]},
        {"role": "tool", "tool_call_id": "call_a", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_b", "content": "sun"}]
    p = s.post("/apply-template", {"messages": turn, "tools": [TOOL]})["prompt"]
    for word in ("Oslo", "Rome", "rain", "sun"):
        assert word in p, (name, word, p)
    assert "I look." in p or name.startswith("mistral"), (name, p)


def test_every_template():
    for name, (marks, ends, shown, result) in FORMS.items():
        thinks = "</think>" in marks  # and has to be told when to stop
        said = ["hm", "</think>", "\n\n", "Yes"] if thinks else ["Yes"]
        with Says(said, template=name, marks=marks, ends=ends) as s:
            check_template(s, name, shown, result, **({} if thinks else {
                "reasoning_format": "none"}))
            two_calls(s, name)
            own = [x for x in s.lines if "has no form of calls" in x]
            assert len(own) == (name in OWN), (name, own)


def test_calls_in_text():
    """Text, then two calls, as a model of each form writes them by itself; whole and streamed."""
    one, two = '{"city": "Oslo"}', '{"city":"Rome"}'
    obj = lambda args: f'{{"name": "weather", "arguments": {args}}}'
    for name, marks, ends, said in (
            ("Qwen-Qwen2.5-7B-Instruct", [], "\n",
             ["I look.", "\n<tool_call>", "\n" + obj(one), "\n</tool_call>\n", "<tool_call>\n",
              obj(two), "\n</tool_call>"]),
            ("SmolLM2-135M-Instruct", [], "\n",
             ["I look.", "\n<tool_call>", "\n" + obj(one), "\n</tool_call>\n", "<tool_call>\n",
              obj(two), "\n</tool_call>"]),
            ("ibm-granite-granite-3.3-2B-Instruct",
             ["<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>"], "<|end_of_role|>",
             ["I look.", "<|tool_call|>", "[" + obj(one), ", ", obj(two), "]"][:3] +
             [", " + obj(two), "]\n"]),
            ("mistralai-Mistral-Nemo-Instruct-2407", ["[TOOL_CALLS]", "[/INST]"], "[/INST]",
             ["I look.", "[TOOL_CALLS]", "[" + obj(one)[:-1] + ', "id": "abcdefgh1"}',
              ", " + obj(two), "]\n"]),
            ("ByteDance-Seed-OSS", [], "\n",
             ["I look.", "\n<seed:tool_call>\n", "<function=weather>\n<parameter=city>Oslo",
              "</parameter>\n</function>\n", "</seed:tool_call>\n<seed:tool_call>",
              "<function=weather><parameter=city>Rome", "</parameter></function>",
              "</seed:tool_call>"])):
        with Says(said, template=name, marks=marks, ends=ends) as s:
            body = {"messages": HELLO, "tools": [TOOL]}
            c = s.post(CHAT, body)["choices"][0]
            m = c["message"]
            assert all(x["function"]["arguments"].endswith("}") for x in m["tool_calls"]), (name, m)
            got = [(x["function"]["name"], json.loads(x["function"]["arguments"]))
                   for x in m["tool_calls"]]
            assert got == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})], (name, m)
            assert m["content"] == "I look." and c["finish_reason"] == "tool_calls", (name, c)
            events = list(s.stream(CHAT, body))
            assert deltas(events, "content") == "I look.", name
            assert calls_of(events) == [list(x["function"].values()) for x in m["tool_calls"]]


def test_bounds():
    """A function that is named is called once; of many calls 16 come."""
    said = ["\n<tool_call>", '{"name":"weather","arguments":{"city":"a"}}', "</tool_call>\n"]
    with Says(said, template="Qwen-Qwen2.5-7B-Instruct", again=True) as s:
        ask = {"messages": HELLO, "tools": [TOOL], "max_tokens": 2000}
        for choice, most in (({"type": "function", "function": {"name": "weather"}}, 1),
                             ("required", 16), ("auto", 16)):
            c = s.post(CHAT, {**ask, "tool_choice": choice})["choices"][0]
            assert c["finish_reason"] == "tool_calls", c
            n = len(c["message"]["tool_calls"])
            assert n == most, (choice, n)


if __name__ == "__main__":
    main(globals())
