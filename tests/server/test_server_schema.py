#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the server says against the schemas of those whose shapes it has: OpenAI's API description
(data/openai-openapi.json), and the official clients' types, which are made of such descriptions,
for what that file does not have.  Skipped where scripts/get-clients has not run."""
from kvserver import HERE, Server, main, use_clients

use_clients()

import functools
import inspect
import json
import os
import signal
import threading

import anthropic
import jsonschema
import openai
import openai.types.responses
import pydantic

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
BIAS = {"261": -100}
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}  # no white space between what counts
CITY = {"type": "object", "additionalProperties": False, "required": ["city"],
        "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


def with_nulls(schema):
    """OpenAPI 3.0's "nullable", which is still in there, in words of JSON Schema."""
    if isinstance(schema, list):
        return [with_nulls(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: with_nulls(v) for k, v in schema.items() if k != "nullable"}
    return {"anyOf": [out, {"type": "null"}]} if schema.get("nullable") is True else out


SCHEMAS = with_nulls(json.loads((HERE / "data" / "openai-openapi.json").read_text()))
# A chunk of a completion is said to be like a whole one, but OpenAI's have null for a reason
# until the last, and, as "stream_options" says, for usage.
SCHEMAS["CompletionChunk"] = json.loads(json.dumps(SCHEMAS["CreateCompletionResponse"]))
for fields, name in (
        (SCHEMAS["CompletionChunk"]["properties"]["choices"]["items"]["properties"],
         "finish_reason"), (SCHEMAS["CompletionChunk"]["properties"], "usage")):
    fields[name] = {"anyOf": [fields[name], {"type": "null"}]}


@functools.lru_cache(None)
def validator(name):
    return jsonschema.Draft202012Validator({"$ref": "#/components/schemas/" + name,
                                            "components": {"schemas": SCHEMAS}})


@functools.lru_cache(None)
def adapter(kind):
    return pydantic.TypeAdapter(kind)


def check(name, value):
    validator(name).validate(value)
    return value


def check_type(kind, value):
    """By a type of the clients, which take no other types of JSON's for it."""
    adapter(kind).validate_json(json.dumps(value), strict=True)
    return value


def tool_of_messages():
    return {"name": "weather", "input_schema": CITY}


def tool_of_responses():
    return {"type": "function", **TOOL["function"]}


def server(*args, **kw):
    return Server("--chat-template", str(HERE / "data" / "hermes.jinja"), *args, **kw)


CHATS = ({}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "seed": 1, "temperature": 1},
         {"tools": [TOOL], "tool_choice": "required", "logit_bias": DENSE, "max_tokens": 120},
         {"tools": [TOOL], "tool_choice": "required", "logit_bias": DENSE, "max_tokens": 60,
          "logprobs": True}, {"stop": ["a", "e"], "debug_cache": True},
         {"response_format": {"type": "json_object"}}, {"max_tokens": 0})


def test_chat():
    with server() as s:
        for more in CHATS:
            ask = {"messages": HELLO, "max_tokens": 8, "logit_bias": BIAS, **more}
            a = check("CreateChatCompletionResponse", s.post(CHAT, ask))
            assert a["usage"]["prompt_tokens_details"]["cached_tokens"] <= \
                a["usage"]["prompt_tokens"]
            for usage in (False, True):
                events = list(s.stream(CHAT, {**ask, "stream_options": {"include_usage": usage},
                                              "return_progress": usage}))
                assert events.pop() == "[DONE]" and len(events) >= 2
                for e in events:
                    check("CreateChatCompletionStreamResponse", e)
                if usage:
                    check("CompletionUsage", events[-1]["usage"])
                    assert events[-1]["usage"]["completion_tokens"] == \
                        a["usage"]["completion_tokens"]


def test_completion():
    with server() as s:
        for more in ({}, {"logprobs": 2}, {"logprobs": 0, "echo": True, "max_tokens": 0},
                     {"logprobs": 3, "echo": True}, {"n": 2, "prompt": ["one", "two"]},
                     {"stop": "a"}):
            ask = {"prompt": "hello", "max_tokens": 5, "logit_bias": BIAS, **more}
            a = s.post(COMPLETION, ask)
            if "echo" in more:  # a first token has no logprob: null there, as OpenAI has it
                lp = a["choices"][0]["logprobs"]
                assert lp["token_logprobs"].pop(0) is lp["top_logprobs"].pop(0) is None
            check("CreateCompletionResponse", a)
            if "echo" in more:
                continue
            for e in s.stream(COMPLETION, {**ask, "stream_options": {"include_usage": True}}):
                assert e == "[DONE]" or check("CompletionChunk", e)


def test_models_and_errors():
    with server("--body-limit", "4000", "--alias", "tiny") as s:
        check("ListModelsResponse", s.get("/v1/models"))
        check("Model", s.get("/v1/models/tiny"))
        check("ErrorResponse", s.get("/v1/models/other", want=404))
        for path in (CHAT, COMPLETION, RESPONSES, "/tokenize", "/detokenize", "/apply-template"):
            for body in ({}, "{", {"top_p": -1, "messages": 5, "prompt": "x", "input": "x"}):
                check("ErrorResponse", s.post(path, body, want=400))
        check("ErrorResponse", s.get("/v1/nothing", want=404))
        check("ErrorResponse", s.get(CHAT, want=405))
        check("ErrorResponse", s.post(CHAT, "x" * 5000, want=413))
        for path in (MESSAGES, MESSAGES + "/count_tokens"):
            check_type(anthropic.types.ErrorResponse, s.post(path, {}, want=400))
        check_type(anthropic.types.ErrorResponse, s.get(MESSAGES + "/x", want=404))
    with server(env={"KVDRIVE_API_KEY": "sk-x"}) as s:
        check("ErrorResponse", s.get("/v1/models", want=401))
        check_type(anthropic.types.ErrorResponse, s.post(MESSAGES, {}, want=401))


RESPONSE = openai.types.responses.Response
RESPONSE_EVENT = openai.types.responses.ResponseStreamEvent
SHARED = ({}, {"tools": 1, "parallel": False}, {"tools": 1, "parallel": True}, {"format": 1})


def test_responses():
    with server() as s:
        for case in SHARED:
            ask = {"input": "hello", "model": "tiny", "max_output_tokens": 40, "logit_bias": BIAS}
            if "tools" in case:
                ask.update(tools=[tool_of_responses()], tool_choice="required",
                           parallel_tool_calls=case["parallel"], logit_bias={**DENSE, **BIAS},
                           max_output_tokens=200)
            if "format" in case:
                ask["text"] = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
            a = check_type(RESPONSE, s.post(RESPONSES, ask))
            kinds = [check_type(RESPONSE_EVENT, e)["type"] for e in s.stream(RESPONSES, ask)]
            assert kinds[0] == "response.created", kinds
            assert kinds[-1] == "response." + a["status"], (kinds, a)


def test_messages():
    types = anthropic.types
    with server() as s:
        for case in SHARED:
            ask = {"messages": HELLO, "max_tokens": 40, "logit_bias": BIAS}
            if "tools" in case:
                ask.update(tools=[tool_of_messages()], logit_bias={**DENSE, **BIAS}, max_tokens=200,
                           tool_choice={"type": "any",
                                        "disable_parallel_tool_use": not case["parallel"]})
            if "format" in case:
                ask["output_config"] = {"format": {"type": "json_schema", "schema": CITY}}
            check_type(types.Message, s.post(MESSAGES, ask))
            kinds = [check_type(types.RawMessageStreamEvent, e)["type"]
                     for e in s.stream(MESSAGES, ask)]
            assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
        check_type(types.MessageTokensCount,
                   s.post(MESSAGES + "/count_tokens", {"messages": HELLO}))


LIMITS = ("max_tokens", "max_output_tokens")


def test_every_field_of_the_clients_is_known():
    """What the official clients can ask for has an effect, needs none, or is refused by name: none
    of it is taken for a word that nobody knows."""
    ours = anthropic.Anthropic(api_key="x"), openai.OpenAI(api_key="x")
    n = 0
    with server() as s:
        for path, body, method in (
                (CHAT, {"messages": HELLO, "max_tokens": 1}, ours[1].chat.completions.create),
                (COMPLETION, {"prompt": "x", "max_tokens": 1}, ours[1].completions.create),
                (RESPONSES, {"input": "x", "max_output_tokens": 1}, ours[1].responses.create),
                (MESSAGES, {"messages": HELLO, "max_tokens": 1}, ours[0].messages.create),
                (MESSAGES + "/count_tokens", {"messages": HELLO}, ours[0].messages.count_tokens)):
            fields = set(inspect.signature(method).parameters) - {
                "extra_headers", "extra_query", "extra_body", "timeout"}
            assert len(fields) > 10, fields
            for field in fields:
                status, _, data = s.call("POST", path, {**body, field: None})
                assert status == (400 if field in body and field not in LIMITS else 200) or \
                    (path, field) == (MESSAGES, "max_tokens"), (path, field, data)
                n += 1
        s.call("POST", CHAT, {"not_ours": 1})
        s.wait_for(lambda: any("not_ours" in x for x in s.lines))
        assert not [x for x in s.lines if "not known" in x and "not_ours" not in x], s.lines
    assert n > 100, n


def test_streams_that_fail():
    """When the device fails under streams, each ends by an error in its own shape."""
    ends = {}
    asks = ((CHAT, {"messages": HELLO}), (COMPLETION, {"prompt": "x"}),
            (MESSAGES, {"messages": HELLO}), (RESPONSES, {"input": "x"}))

    def run(s, path, ask):
        limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
        ends[path] = list(s.stream(path, {**ask, "logit_bias": BIAS, limit: 3000}))

    with Server(program=os.environ["KVD_TEST_FAULT"]) as s:
        s.exits = (1,)
        threads = [threading.Thread(target=run, args=(s, *x)) for x in asks]
        for t in threads:
            t.start()
        s.wait_for(lambda: s.slots()["running"] == 4)
        s.process.send_signal(signal.SIGUSR1)
        for t in threads:
            t.join()
        s.process.wait(20)
    for path in (CHAT, COMPLETION):
        check("ErrorResponse", ends[path][-1])
    check_type(anthropic.types.ErrorResponse, ends[MESSAGES][-1])
    for e in ends[RESPONSES]:
        check_type(RESPONSE_EVENT, e)
    assert [e["type"] for e in ends[RESPONSES][-2:]] == ["error", "response.failed"]


def refuses(function, name, value):
    try:
        function(name, value)
    except (jsonschema.ValidationError, pydantic.ValidationError):
        return True
    return False


def test_checks_can_fail():
    """Each field of an answer that is left out, or has another type, is noticed where the schema
    says something about it."""
    with server() as s:
        ask = {"messages": HELLO, "max_tokens": 2, "logprobs": True}
        chat = s.post(CHAT, ask)
        chunk = next(s.stream(CHAT, ask))
        answer = s.post(RESPONSES, {"input": "x", "max_output_tokens": 2})
        message = s.post(MESSAGES, {"messages": HELLO, "max_tokens": 2})
    for function, kind, value, fields in (
            (check, "CreateChatCompletionResponse", chat,
             ("id", "object", "created", "model", "choices")),
            (check, "CreateChatCompletionStreamResponse", chunk,
             ("id", "object", "created", "model", "choices")),
            (check_type, RESPONSE, answer, ("id", "object", "created_at", "model", "output",
                                            "tools", "tool_choice", "parallel_tool_calls")),
            (check_type, anthropic.types.Message, message,
             ("id", "type", "role", "content", "model", "usage"))):
        for field in fields:
            without = {k: v for k, v in value.items() if k != field}
            assert refuses(function, kind, without), field
            assert refuses(function, kind, {**value, field: {"x": []}}), field
    assert refuses(check, "ErrorResponse", {"error": {"message": "x"}})


if __name__ == "__main__":
    main(globals())
