#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What agents send beside their prompts, as Codex and Claude Code: what changes nothing is taken,
what cannot be is left out with a line of the log, or refused by its name."""
import json
import pathlib

from kvserver import HERE, Directory, Server, main

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = MESSAGES + "/count_tokens"
HELLO = [{"role": "user", "content": "hello"}]
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}
NO_END = {"261": -100}
SHELL = {"type": "object", "additionalProperties": False, "required": ["cmd"],
         "properties": {"cmd": {"enum": ["ls", "pwd"]}}}


def server(*args, **kw):
    return Server("--chat-template", str(HERE / "data" / "hermes.jinja"), *args, **kw)


def function(name, **more):
    return {"type": "function", "name": name, "description": f"does {name}", "parameters": SHELL,
            **more}


# A request of Codex 0.147: all of its fields, fewer tools.
CODEX = {
    "model": "m", "instructions": "You are an agent.",
    "input": [{"type": "message", "role": "developer", "id": "msg_1",
               "content": [{"type": "input_text", "text": "rules"}]},
              {"type": "message", "role": "user", "id": "msg_2",
               "content": [{"type": "input_text", "text": "list the files"}]}],
    "tools": [function("exec_command", strict=False),
              {"type": "namespace", "name": "agents", "description": "other agents",
               "tools": [function("spawn"), function("wait"),
                         {"type": "custom", "name": "free"}]},
              {"type": "namespace", "name": "mcp__files__", "tools": [function("read")]},
              {"type": "web_search", "external_web_access": False},
              {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}],
    "tool_choice": "auto", "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "text": {"verbosity": "low"}, "client_metadata": {"turn_id": "t"},
    "max_output_tokens": 200, "logit_bias": DENSE,
}


def test_codex():
    with server() as s:
        first = s.post(RESPONSES, CODEX)
        assert first["reasoning"] == CODEX["reasoning"] and first["tools"] == CODEX["tools"]
        shown = s.post("/apply-template", {"messages": HELLO, "tools": [{"x": 1}]})["prompt"]
        assert '{"x": 1}' in shown
        text = lambda: "\n".join(s.lines)
        s.wait_for(lambda: "verbosity" in text())
        for left in ("web_search", "custom"):
            line = f"requests have tools of type {left}, which are left out"
            assert sum(line in x for x in s.lines) == 1, text()
        # what would have to run is refused by name, and so is what is no tool
        s.error(RESPONSES, {**CODEX, "tool_choice": {"type": "web_search"}}, "tool_choice.type")
        s.error(RESPONSES, {**CODEX, "tool_choice": {"type": "custom", "name": "apply_patch"}},
                "tool_choice.type")
        for tools, where in (([{"name": "f"}], "tools[0].type"),
                             ([{"type": "namespace"}], "tools[0].name"),
                             ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
                             ([{"type": "namespace", "name": "n", "tools": [{}]}],
                              "tools[0].tools[0].type"),
                             ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}],
                              "tools[0].tools[0].name")):
            s.error(RESPONSES, {**CODEX, "tools": tools}, where)
        for field, value, where in (("reasoning", {"effort": "huge"}, "reasoning.effort"),
                                    ("reasoning", {"mode": "pro"}, "reasoning.mode"),
                                    ("reasoning", 5, "reasoning"),
                                    ("text", {"verbosity": "loud"}, "text.verbosity"),
                                    ("include", [5], "include[0]")):
            s.error(RESPONSES, {**CODEX, field: value}, where)
        s.post(RESPONSES, {**CODEX, "include": ["message.output_text.logprobs", "x.y"],
                           "service_tier": "flex", "reasoning": {"generate_summary": "concise"}})
        assert sum("output_text.logprobs" in x for x in s.lines) == 1, text()


def call_of(answer):
    return next(x for x in answer["output"] if x["type"] == "function_call")


def test_namespaces():
    """A function in a namespace is called and comes back by both of its names."""
    with server() as s:
        for space, flat in (("agents", "agents__spawn"), ("mcp__files__", "mcp__files__spawn")):
            tools = [{"type": "namespace", "name": space, "description": "of agents",
                      "tools": [function("spawn")]}]
            ask = {**CODEX, "tools": tools, "tool_choice": "required"}
            answer = s.post(RESPONSES, ask)
            call = call_of(answer)
            assert (call["namespace"], call["name"]) == (space, "spawn"), call
            assert json.loads(call["arguments"])["cmd"] in ("ls", "pwd")
            names = [(e.get("item", e).get("namespace"), e.get("item", e)["name"])
                     for e in s.stream(RESPONSES, ask)
                     if "name" in e.get("item", e) and e["type"].startswith("response.")]
            assert names == [(space, "spawn")] * 3, names
            # the next turn, as the client sends it
            again = [*CODEX["input"], call, {"type": "function_call_output", "output": "a.txt",
                                             "call_id": call["call_id"]}]
            s.post(RESPONSES, {**ask, "input": again, "tool_choice": "auto"})
            chat = {"messages": HELLO, "tools": [
                {"type": "function", "function": {"name": flat, "parameters": SHELL,
                                                  "description": "of agents\n\ndoes spawn"}}]}
            n = s.post(RESPONSES, {"input": "hello", "tools": tools, "max_output_tokens": 0})
            shown = s.post("/apply-template", chat)["prompt"]
            assert n["usage"]["input_tokens"] == s.post("/v1/chat/completions", {
                **chat, "max_tokens": 0})["usage"]["prompt_tokens"], shown
        s.error(RESPONSES, {**CODEX, "input": [{**call, "namespace": 5}]}, "input[0].namespace")
        clash = [function("agents__spawn"), CODEX["tools"][1]]
        s.post(RESPONSES, {**CODEX, "tools": clash}, want=400)


def test_events_say_the_request_once():
    """instructions and tools are in the last event alone."""
    with server() as s:
        events = list(s.stream(RESPONSES, {**CODEX, "max_output_tokens": 3}))
        by = {e["type"]: e["response"] for e in events if "response" in e}
        for kind in "response.created", "response.in_progress":
            assert by[kind]["instructions"] is None and by[kind]["tools"] == [], by[kind]
            assert by[kind]["reasoning"] == CODEX["reasoning"]
        last = events[-1]["response"]
        assert last["instructions"] == CODEX["instructions"] and last["tools"] == CODEX["tools"]
        assert json.dumps(events).count("You are an agent.") == 1


def tool(name, **more):
    return {"name": name, "description": f"does {name}", "input_schema": SHELL, **more}


# A request of Claude Code 2.1: all of its fields, fewer tools.
CLAUDE = {
    "model": "m", "max_tokens": 200, "stream": False, "logit_bias": DENSE,
    "system": [{"type": "text", "text": "You are an agent.",
                "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "list the files"}]},
                 {"role": "system", "content": [{"type": "text", "text": "# Environment"}]}],
    "tools": [tool("Bash"), tool("Placeholder", defer_loading=True)],
    "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"}, "diagnostics": {"previous_message_id": None},
}
NOT_IN_COUNT = ("max_tokens", "stream", "logit_bias", "metadata", "diagnostics")
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def count(s, **more):
    body = {k: v for k, v in {**CLAUDE, **more}.items() if k not in NOT_IN_COUNT}
    return s.post(COUNT, body)["input_tokens"]


def test_claude_code():
    with server() as s:
        first = s.post(MESSAGES, CLAUDE)
        assert first["usage"]["input_tokens"] == count(s)
        for thinking in ({"type": "enabled", "budget_tokens": 4096}, {"type": "disabled"},
                         {"type": "adaptive", "display": "summarized"}, {"type": "between_tools"}):
            s.post(MESSAGES, {**CLAUDE, "thinking": thinking})
        assert count(s, tools=[tool("Bash"), SEARCH]) == count(s, tools=[tool("Bash")])
        line = "requests have tools of type web_search_20250305, which are left out"
        assert sum(line in x for x in s.lines) == 1, s.lines
        bad = lambda text, **more: told(s, text, {**CLAUDE, **more})
        bad("tools[0].type: ", tools=[SEARCH], tool_choice={"type": "tool", "name": "web_search"})
        bad("tools[0].type: ", tools=[{"type": "bash_20250124", "name": "bash"}])
        image = {"type": "image", "source": {"type": "base64", "data": "",
                                             "media_type": "image/png"}}
        bad('messages[0].content[0].type: "image" is not supported here',
            messages=[{"role": "user", "content": [image]}])
        bad('messages[0].content[0].content[0].type: "image" is not supported here', messages=[
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                          "content": [image]}]}])
        bad("thinking.type: ", thinking={"budget_tokens": 5})
        bad("output_config.effort: ", output_config={"effort": "huge"})
        edit = lambda **e: {"context_management": {"edits": [e]}}
        bad("context_management.edits[0]: ", **edit(type="clear_tool_uses_20250919"))
        bad("context_management.edits[0]: ", **edit(type="compact_20260112"))
        bad("context_management.edits: ", context_management={"edits": 5})
        for keep in None, {"type": "all"}, {"type": "thinking_turns", "value": 1}:
            kept = {"keep": keep}
            s.post(MESSAGES, {**CLAUDE, **edit(type="clear_thinking_20251015", **kept)})


def told(s, text, body):
    e = s.post(MESSAGES, body, want=400)["error"]
    assert e["message"].startswith(text), (text, e)


def test_deferred_tools():
    """A deferred tool is offered from where the conversation refers to it, until it is removed."""
    with server() as s:
        deferred = tool("Fetch", defer_loading=True)
        tools = [tool("Bash"), deferred]
        one, both = count(s, tools=[tool("Bash")]), count(s, tools=[tool("Bash"), tool("Fetch")])
        assert count(s, tools=tools) == one < both
        assert count(s, tools=[*tools, {"type": "tool_search_tool_regex_20251119",
                                        "name": "search"}]) == both
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash",
                                                 "input": {"cmd": "ls"}}]}
        result = lambda *parts: {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": list(parts)}]}
        said = {"type": "text", "text": "tool Fetch can be called now"}
        refers = {"type": "tool_reference", "tool_name": "Fetch"}
        plain = count(s, tools=[tool("Bash"), tool("Fetch")],
                      messages=[*HELLO, use, result(said)])
        assert count(s, tools=tools, messages=[*HELLO, use, result(refers)]) == plain
        change = lambda kind: {"type": kind, "tool": {"type": "tool_reference", "name": "Fetch"}}
        for role in "user", "system":
            added = [*HELLO, {"role": role, "content": [change("tool_addition"),
                                                        {"type": "text", "text": "hm"}]}]
            removed = [*HELLO, {"role": role, "content": [
                change("tool_addition"), change("tool_removal"), {"type": "text", "text": "hm"}]}]
            bare = [*HELLO, {"role": role, "content": "hm"}]
            assert count(s, tools=tools, messages=added) == \
                count(s, tools=[tool("Bash"), tool("Fetch")], messages=bare)
            assert count(s, tools=tools, messages=removed) == \
                count(s, tools=[tool("Bash")], messages=bare)
        alone = [*HELLO, {"role": "system", "content": [change("tool_addition")]}]
        assert count(s, tools=tools, messages=alone) == \
            count(s, tools=[tool("Bash"), tool("Fetch")], messages=HELLO)


def test_message_start_says_what_is_cached():
    with Server() as s:
        ask = {"messages": [{"role": "user", "content": "x" * 700}], "max_tokens": 4,
               "logit_bias": NO_END}
        for cached in False, True:
            events = list(s.stream(MESSAGES, ask))
            begins, ends = events[0]["message"]["usage"], events[-2]["usage"]
            for name in "input_tokens", "cache_read_input_tokens":
                assert begins[name] == ends[name], (begins, ends)
            assert (begins["cache_read_input_tokens"] > 700) == cached, begins
            assert begins["output_tokens"] == 0 and ends["output_tokens"] == 4


THINKS = "{% for v in [enable_thinking, thinking, reasoning_effort, thinking_budget] %}" \
         "{{ '-' if v is not defined else v }} {% endfor %}{{ messages[0]['content'] }}"


def test_effort_reaches_the_template():
    with Directory() as d:
        template = pathlib.Path(d) / "thinks.jinja"
        template.write_text(THINKS)
        with Server("--chat-template", str(template)) as s:
            for path, more, want in (
                    (CHAT, {}, "- - - - "), (CHAT, {"reasoning_effort": "low"}, "- - low - "),
                    (CHAT, {"reasoning_effort": "minimal"}, "- - low - "),
                    (CHAT, {"reasoning_effort": "xhigh"}, "- - high - "),
                    (CHAT, {"reasoning_effort": "none"}, "False False - - "),
                    (CHAT, {"reasoning_effort": "none",
                            "chat_template_kwargs": {"enable_thinking": True}}, "True False - - "),
                    (MESSAGES, {"thinking": {"type": "disabled"}}, "False False - - "),
                    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}},
                     "True True - 2048 "),
                    (MESSAGES, {"thinking": {"type": "adaptive"},
                                "output_config": {"effort": "max"}}, "- - high - "),
                    (RESPONSES, {"reasoning": {"effort": "medium"}}, "- - medium - ")):
                ask = {"input": "hello"} if path == RESPONSES else {"messages": HELLO}
                text = {"prompt": want + "hello", "max_tokens": 1}
                known = s.post("/v1/completions", text)["usage"]["prompt_tokens"]
                limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
                u = s.post(path, {**ask, limit: 0, **more})["usage"]
                cached = u.get("cache_read_input_tokens") or (
                    u.get("prompt_tokens_details") or u["input_tokens_details"])["cached_tokens"]
                n = u.get("prompt_tokens") or u["input_tokens"] + (
                    cached if path == MESSAGES else 0)
                assert (n, cached) == (known, known - 1), (path, more, n, cached, want)


def test_chat_takes_what_changes_nothing():
    with Server() as s:
        s.post(CHAT, {"messages": HELLO, "max_tokens": 1, "store": True, "service_tier": "flex",
                      "metadata": {"a": "b"}, "stream_options": {"include_usage": True},
                      "verbosity": "high", "reasoning_effort": "high"})
        s.wait_for(lambda: any("verbosity" in x for x in s.lines))
        s.error(CHAT, {"messages": HELLO, "verbosity": "loud"}, "verbosity")
        assert not [x for x in s.lines if "not known" in x], s.lines


def test_tokenizer_as_vllm_has_it():
    with Server() as s:
        info = s.get("/tokenizer_info")
        end = info["eos_token"]
        assert isinstance(end, str) and "im_start" in info["chat_template"], info
        assert info["vocab_size"] == 264 and info["model_max_length"] == 4000, info
        t = s.post("/tokenize", {"prompt": "ab", "add_special_tokens": False,
                                 "return_token_strs": True})
        assert t["tokens"] == s.post("/tokenize", {"content": "ab"})["tokens"], t
        assert t["count"] == len(t["tokens"]) == len(t["token_strs"]) and t["max_model_len"] == 4000
        assert "".join(t["token_strs"]) == "ab"
        assert s.post("/detokenize", {"tokens": t["tokens"]})["prompt"] == "ab"
        with_special = s.post("/tokenize", {"prompt": "ab"})["tokens"]
        assert with_special == s.post("/tokenize", {"content": "ab", "add_special": True})["tokens"]
        one = s.post("/tokenize", {"prompt": end, "add_special_tokens": False})["tokens"]
        assert len(one) == 1, one
        for text in (end + "x", "x" + end, end + end):
            many = s.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
            assert len(many) > 2 and one[0] not in many, (text, many)
        assert len(s.post("/tokenize", {"content": end})["tokens"]) > 1
        assert s.post("/tokenize", {"prompt": "", "add_special_tokens": False})["tokens"] == []
        s.error("/tokenize", {"prompt": "x", "content": "x"}, "prompt")


if __name__ == "__main__":
    main(globals())
