#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The official OpenAI client against the server.  Skipped where scripts/get-clients has not run."""
from kvserver import HERE, Server, main, use_clients

use_clients()

import asyncio
import json
import os
import signal
from typing import Literal

import openai
import pydantic

KEY = "sk-of-the-test"
HELLO = [{"role": "user", "content": "hello"}]
BIAS = {"261": -100}


def connect(s, key=KEY, **more):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{s.port}/v1", api_key=key, max_retries=0,
                         **more)


def server(*args):
    return Server("--alias", "tiny", *args, env={"KVDRIVE_API_KEY": KEY})


def raises(kind, function, **more):
    try:
        function()
    except kind as e:
        for name, value in more.items():
            assert getattr(e, name) == value, (name, getattr(e, name), e)
        return e
    raise AssertionError(f"no {kind.__name__}")


def test_models_and_keys():
    with server() as s:
        c = connect(s)
        assert [m.id for m in c.models.list()] == ["tiny"]
        assert c.models.retrieve("tiny").owned_by == "kvdrive"
        raises(openai.NotFoundError, lambda: c.models.retrieve("other"), code="model_not_found",
               param="model")
        raises(openai.AuthenticationError, lambda: connect(s, "sk-wrong").models.list(),
               code="invalid_api_key")


def test_chat():
    with server() as s:
        c = connect(s)
        a = c.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=12,
                                      logit_bias=BIAS, logprobs=True, top_logprobs=2)
        choice = a.choices[0]
        assert choice.finish_reason == "length" and choice.message.role == "assistant"
        assert a.usage.completion_tokens == 12 and a.usage.total_tokens == \
            a.usage.prompt_tokens + 12
        assert len(choice.logprobs.content) == 12
        assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in choice.logprobs.content)
        text, usage, role = "", None, None
        for chunk in c.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12,
                                               logit_bias=BIAS, stream=True,
                                               stream_options={"include_usage": True}):
            if not chunk.choices:
                usage = chunk.usage
                continue
            assert chunk.usage is None
            role = chunk.choices[0].delta.role or role
            text += chunk.choices[0].delta.content or ""
        assert text == choice.message.content and role == "assistant"
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
        n = c.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=1, temperature=1.2,
                                      max_tokens=8, logit_bias=BIAS)
        assert len({x.message.content for x in n.choices}) == 3


def test_stream_helper():
    with server() as s:
        c = connect(s)
        with c.chat.completions.stream(model="tiny", messages=HELLO, max_tokens=10,
                                       extra_body={"ignore_eos": True}) as stream:
            kinds = {event.type for event in stream}
            last = stream.current_completion_snapshot
        assert "content.delta" in kinds and last.choices[0].finish_reason == "length"


def test_completions():
    with server() as s:
        c = connect(s)
        a = c.completions.create(model="tiny", prompt=["one", "two"], max_tokens=6, logprobs=2,
                                 echo=True, logit_bias=BIAS)
        assert [x.index for x in a.choices] == [0, 1]
        assert a.choices[0].text.startswith("one") and a.choices[1].text.startswith("two")
        lp = a.choices[0].logprobs
        assert lp.token_logprobs[0] is None and len(lp.tokens) == len(lp.text_offset)
        text = "".join(x.choices[0].text for x in c.completions.create(
            model="tiny", prompt="one", max_tokens=6, logit_bias=BIAS, stream=True))
        assert "one" + text == a.choices[0].text


def test_errors():
    with server("--parallel", "1", "--queue", "1", "-c", "400") as s:
        c = connect(s)
        chat = c.chat.completions.create
        raises(openai.BadRequestError, lambda: chat(model="t", messages=HELLO, temperature=-1),
               param="temperature", type="invalid_request_error")
        raises(openai.BadRequestError, lambda: chat(model="t", messages=[]), param="messages")
        raises(openai.BadRequestError, lambda: chat(
            model="t", messages=[{"role": "user", "content": "x" * 3000}]),
            code="context_length_exceeded", param="messages")
        raises(openai.BadRequestError, lambda: chat(
            model="t", messages=HELLO, tools=[{"type": "function", "function": {"name": ""}}]),
            param="tools")
        raises(openai.NotFoundError, lambda: c.embeddings.create(model="t", input="x"))


class Trip(pydantic.BaseModel):
    """Go somewhere."""
    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]


HERMES = ("--chat-template", str(HERE / "data" / "hermes.jinja"))
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}  # no white space between what counts


def test_response_format():
    """The client makes a schema of a class, and an object of the answer."""
    with server() as s:
        c = connect(s).chat.completions
        for seed in range(4):
            a = c.parse(model="tiny", messages=HELLO, response_format=Trip, seed=seed,
                        temperature=1.5, logit_bias=DENSE)
            assert isinstance(a.choices[0].message.parsed, Trip), a
        raises(openai.LengthFinishReasonError, lambda: c.parse(
            model="tiny", messages=HELLO, response_format=Trip, max_tokens=3))


def test_tools():
    """The client's own loop: a call, its result, and on."""
    tool = openai.pydantic_function_tool(Trip)
    with server(*HERMES) as s:
        c = connect(s).chat.completions
        ask = dict(model="tiny", messages=HELLO, tools=[tool], tool_choice="required",
                   parallel_tool_calls=False, logit_bias=DENSE)
        choice = c.parse(**ask).choices[0]
        call = choice.message.tool_calls[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert isinstance(call.function.parsed_arguments, Trip), call
        with c.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds, kinds
        assert last.message.tool_calls[0].function == call.function
        messages = HELLO + [choice.message.to_dict(),
                            {"role": "tool", "tool_call_id": call.id, "content": "snow"}]
        a = c.create(model="tiny", messages=messages, tools=[tool], tool_choice="none",
                     max_tokens=5, extra_body={"ignore_eos": True})
        assert a.choices[0].message.content and not a.choices[0].message.tool_calls


WEATHER = {"type": "function", "name": "weather", "strict": True,
           "parameters": {"type": "object", "additionalProperties": False, "required": ["city"],
                          "properties": {"city": {"enum": ["Oslo", "Rome"]}}}}


def test_responses():
    with server(*HERMES) as s:
        c = connect(s).responses
        ask = dict(model="tiny", input="hello", instructions="be brief", max_output_tokens=12,
                   extra_body={"logit_bias": BIAS})
        a = c.create(**ask)
        assert a.status == "incomplete" and a.incomplete_details.reason == "max_output_tokens"
        assert a.object == "response" and a.instructions == "be brief" and a.error is None
        assert a.output_text and a.output[0].role == "assistant" and a.store is False
        assert a.usage.output_tokens == 12 and a.usage.input_tokens_details.cached_tokens == 0
        assert a.usage.total_tokens == a.usage.input_tokens + 12
        kinds, numbers, text = [], [], ""
        for e in c.create(**ask, stream=True):
            kinds.append(e.type)
            numbers.append(e.sequence_number)
            text += e.delta if e.type == "response.output_text.delta" else ""
            if e.type in ("response.output_text.done", "response.incomplete"):
                last = e
                assert getattr(e, "text", text) == text
        assert text == a.output_text == last.response.output_text
        assert numbers == list(range(len(numbers)))
        assert kinds[:4] == ["response.created", "response.in_progress",
                             "response.output_item.added", "response.content_part.added"], kinds
        assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                              "response.output_item.done", "response.incomplete"], kinds
        items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                 a.output[0].to_dict(), {"role": "user", "content": "go on"}]
        b = c.create(**{**ask, "input": items})
        assert b.usage.input_tokens > a.usage.input_tokens
        assert c.create(model="tiny", input="x", extra_body={"logit_bias": {"261": 100}}) \
            .status == "completed"
        parsed = c.parse(model="tiny", input="hello", text_format=Trip,
                         extra_body={"logit_bias": DENSE})
        assert isinstance(parsed.output_parsed, Trip), parsed


def test_responses_tools():
    with server(*HERMES) as s:
        c = connect(s).responses
        ask = dict(model="tiny", input="hello", tools=[WEATHER], parallel_tool_calls=False,
                   tool_choice="required", extra_body={"logit_bias": DENSE})
        a = c.create(**ask)
        call = a.output[0]
        assert a.status == "completed" and len(a.output) == 1 and call.type == "function_call"
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        kinds, args = set(), ""
        with c.stream(**ask) as stream:
            for e in stream:
                kinds.add(e.type)
                args += e.delta if e.type == "response.function_call_arguments.delta" else ""
            last = stream.get_final_response()
        assert args == call.arguments == last.output[0].arguments
        assert "response.function_call_arguments.done" in kinds, kinds
        on = [{"role": "user", "content": "hello"}, call.to_dict(),
              {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}]
        b = c.create(**{**ask, "input": on, "tool_choice": "none"}, max_output_tokens=4)
        assert b.output[0].type == "message" and b.usage.input_tokens > 0
        named = c.create(**{**ask, "tool_choice": {"type": "function", "name": "weather"}})
        assert named.output[0].arguments == call.arguments


def test_responses_parallel_calls():
    """Several calls at once, whole and streamed alike; their results go back, and on it goes."""
    with server("--deterministic", *HERMES) as s:
        c = connect(s).responses
        ask = dict(model="tiny", input="hello", tools=[WEATHER], tool_choice="required",
                   parallel_tool_calls=True, max_output_tokens=300,
                   extra_body={"logit_bias": {**DENSE, **BIAS}, "temperature": 1})
        for seed in range(20):  # until there are some
            ask["extra_body"]["seed"] = seed
            a = c.create(**ask)
            if len(a.output) > 3:
                break
        calls = [x for x in a.output if x.type == "function_call" and x.status == "completed"]
        assert len(calls) > 2 and len({x.call_id for x in calls}) == len(calls), a
        assert all(json.loads(x.arguments)["city"] in ("Oslo", "Rome") for x in calls)
        begun, ended, deltas = [], [], {}
        for e in c.create(**ask, stream=True):
            if e.type == "response.output_item.added":
                begun.append(e.output_index)
                assert begun == list(range(len(begun))) and len(ended) == len(begun) - 1
            elif e.type == "response.function_call_arguments.delta":
                deltas[e.output_index] = deltas.get(e.output_index, "") + e.delta
                assert e.output_index == begun[-1], e
            elif e.type == "response.output_item.done":
                ended.append(e.item)
        assert [x.arguments for x in ended[:len(calls)]] == [x.arguments for x in calls]
        for i, x in enumerate(ended):  # the last may be cut, before its name even: that is text
            assert x.type == "message" and i + 1 == len(ended) or \
                deltas.get(i, "") == x.arguments, (deltas, ended)
        count = lambda items: c.create(model="tiny", input=items, max_output_tokens=1) \
            .usage.input_tokens
        items = [{"role": "user", "content": "hello"}] + [x.to_dict() for x in calls[:2]]
        n = [count(items)]
        for x in calls[:2]:
            items.append({"type": "function_call_output", "call_id": x.call_id,
                          "output": [{"type": "input_text", "text": "snow"}]})
            n.append(count(items))
        assert n == sorted(set(n)), n
        b = c.create(**{**ask, "input": items, "tool_choice": "auto"})
        assert b.status in ("completed", "incomplete") and b.usage.input_tokens > n[-1]


def test_responses_errors():
    with server("-c", "400", "--parallel", "1", "--queue", "1", *HERMES) as s:
        raises(openai.AuthenticationError,
               lambda: connect(s, "sk-wrong").responses.create(model="t", input="x"))
        c = connect(s).responses
        bad = lambda param, **k: raises(openai.BadRequestError, lambda: c.create(
            **{"model": "t", "input": "x", **k}), param=param, type="invalid_request_error")
        bad("input", input=[])
        bad("input[1].type", input=[{"role": "user", "content": "x"}, {"type": "item_reference",
                                                                  "id": "x"}])
        bad("previous_response_id", previous_response_id="resp_1")
        bad("tool_choice.type", tools=[WEATHER, {"type": "web_search"}],
            tool_choice={"type": "web_search"})
        bad("tool_choice", tools=[WEATHER], tool_choice={"type": "function", "name": "clock"})
        bad("max_output_tokens", max_output_tokens=-1)
        bad("store", store=True)
        raises(openai.BadRequestError, lambda: c.create(model="t", input="x" * 3000),
               code="context_length_exceeded", param="input")
        raises(openai.NotFoundError, lambda: c.retrieve("resp_1"))
        raises(openai.NotFoundError, lambda: c.delete("resp_1"))


def test_limits_and_failures():
    """A full queue, too large a body and a failed device are the client's exceptions, in a stream
    as well."""
    endless = dict(model="t", prompt="x", max_tokens=3900, logit_bias=BIAS, stream=True)
    with Server("--parallel", "1", "--queue", "1", "--body-limit", "4000",
                program=os.environ["KVD_TEST_FAULT"]) as s:
        s.exits = (1,)
        c = connect(s)
        first = c.completions.create(**endless)
        next(iter(first))
        second = c.completions.create(**endless)
        s.wait_for(lambda: s.slots()["waiting"] == 1)
        e = raises(openai.RateLimitError, lambda: c.completions.create(
            model="t", prompt="x"), type="rate_limit_error")
        assert int(e.response.headers["Retry-After"]) >= 1
        raises(openai.APIStatusError, lambda: c.completions.create(
            model="t", prompt="x" * 5000), status_code=413)
        s.process.send_signal(signal.SIGUSR1)
        for stream in (first, second):
            e = raises(openai.APIError, lambda: [x for x in stream])
            assert "device has failed" in e.message, e
        s.process.wait(20)


def test_responses_beside_each_other():
    """By the client that does not block: streams of texts and of calls, each gets its own."""
    async def ask(c, i):
        more = dict(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False) \
            if i % 2 else dict(max_output_tokens=20)
        out = ""
        async for e in await c.responses.create(
                model="tiny", input=f"client {i}", stream=True,
                extra_body={"logit_bias": DENSE if i % 2 else BIAS}, **more):
            out += e.delta if e.type.endswith(".delta") else ""
        return out

    async def ask_all(port):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY) as c:
            return await asyncio.gather(*(ask(c, i % 6) for i in range(24)))

    with server("--deterministic", *HERMES) as s:
        got = asyncio.run(ask_all(s.port))
        assert all(got[i] == got[i % 6] for i in range(24)), got
        assert all(json.loads(got[i])["city"] in ("Oslo", "Rome") for i in (1, 3, 5)), got
        assert len(set(got)) >= 3, got


def test_many_at_once():
    async def ask(c, i):
        a = await c.completions.create(model="tiny", prompt=f"client {i}", max_tokens=10,
                                       logit_bias=BIAS)
        return a.choices[0].text

    async def ask_all(port):
        c = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY)
        return await asyncio.gather(*(ask(c, i % 8) for i in range(48)))

    with server("--deterministic") as s:
        got = asyncio.run(ask_all(s.port))
        assert all(got[i] == got[i % 8] for i in range(48)), got
        assert len(set(got)) > 1, got


def test_keepalive_is_ignored():
    """Comments between events do not trouble the client."""
    with Server("--keepalive", "0.05", "--parallel", "1",
                program=os.environ["KVD_TEST_FAULT"]) as s:
        c = connect(s)
        busy = c.completions.create(model="t", prompt="x", max_tokens=400, stream=True,
                                    logit_bias=BIAS)
        next(iter(busy))
        text = "".join(x.choices[0].text for x in c.completions.create(
            model="t", prompt="y", max_tokens=5, stream=True, logit_bias=BIAS))
        assert text
        busy.close()


if __name__ == "__main__":
    main(globals())
