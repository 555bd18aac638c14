#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The official Anthropic client against the server.  Skipped where scripts/get-clients has not run.
"""
from kvserver import HERE, Server, main, use_clients

use_clients()

import asyncio
import json
import os
import signal

import anthropic

KEY = "sk-of-the-test"
HELLO = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "additionalProperties": False, "required": ["city", "days"],
        "properties": {"city": {"enum": ["Oslo", "Rome"]},
                       "days": {"type": "integer", "minimum": 1, "maximum": 9}}}
TOOL = {"name": "weather", "description": "of a city", "input_schema": CITY}
LONG = {"261": -100}
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}  # no white space between what counts


def connect(s, key=KEY):
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{s.port}", api_key=key, max_retries=0)


def server(*args):
    return Server("--chat-template", str(HERE / "data" / "hermes.jinja"), "--alias", "tiny", *args,
                  env={"KVDRIVE_API_KEY": KEY})


def raises(kind, function, text=""):
    try:
        function()
    except kind as e:
        assert e.body["type"] == "error" and text in e.body["error"]["message"], e.body
        return e
    raise AssertionError(f"no {kind.__name__}")


def test_text():
    with server() as s:
        c = connect(s)
        ask = dict(model="tiny", max_tokens=12, messages=HELLO, system="be brief",
                   extra_body={"logit_bias": LONG})
        a = c.messages.create(**ask)
        assert a.type == "message" and a.role == "assistant" and a.model == "tiny"
        assert a.stop_reason == "max_tokens" and a.stop_sequence is None
        assert len(a.content) == 1 and a.content[0].type == "text" and a.content[0].text
        assert a.usage.output_tokens == 12 and a.usage.cache_read_input_tokens == 0
        with c.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == a.content[0].text == last.content[0].text
        assert last.stop_reason == "max_tokens" and last.usage.output_tokens == 12
        assert last.usage.cache_read_input_tokens == a.usage.input_tokens - 1
        assert last.usage.input_tokens == 1
        n = c.messages.count_tokens(model="tiny", messages=HELLO, system="be brief")
        assert n.input_tokens == a.usage.input_tokens
        kinds = [e.type for e in c.messages.create(**ask, stream=True)]
        assert kinds[:2] == ["message_start", "content_block_start"], kinds
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
        assert set(kinds[2:-3]) == {"content_block_delta"}, kinds
        # a stop sequence is told, and no text of it
        stop = a.content[0].text[5:7]
        b = c.messages.create(**ask, stop_sequences=["never", stop])
        assert b.stop_reason == "stop_sequence" and b.stop_sequence == stop
        assert "".join(x.text for x in b.content) == a.content[0].text.split(stop)[0]
        assert c.messages.create(model="tiny", max_tokens=50, messages=HELLO, extra_body={
            "logit_bias": {"261": 100}}).stop_reason == "end_turn"


def test_tools():
    with server() as s:
        c = connect(s)
        ask = dict(model="tiny", max_tokens=700, messages=HELLO, tools=[TOOL],
                   tool_choice={"type": "tool", "name": "weather",
                                "disable_parallel_tool_use": True},
                   extra_body={"logit_bias": DENSE})
        for seed in range(4):
            ask["extra_body"].update(seed=seed, temperature=seed % 2)
            a = c.messages.create(**ask)
            assert a.stop_reason == "tool_use" and len(a.content) == 1, a
            use = a.content[0]
            assert use.type == "tool_use" and use.name == "weather"
            assert use.input["city"] in ("Oslo", "Rome") and 1 <= use.input["days"] <= 9
            with c.messages.stream(**ask) as stream:
                last = stream.get_final_message()
            assert last.content[0].input == use.input and last.stop_reason == "tool_use"
        # the client's way on
        messages = HELLO + [{"role": "assistant", "content": [x.to_dict() for x in a.content]},
                            {"role": "user", "content": [
                                {"type": "tool_result", "tool_use_id": use.id,
                                 "content": [{"type": "text", "text": "snow"}]},
                                {"type": "text", "text": "and now?"}]}]
        count = lambda **k: c.messages.count_tokens(model="tiny", messages=messages, **k) \
            .input_tokens
        assert count(tools=[TOOL]) > count() + 50
        assert count(tools=[TOOL], tool_choice={"type": "none"}) == count()
        b = c.messages.create(model="tiny", max_tokens=5, messages=messages, tools=[TOOL],
                              extra_body={"logit_bias": LONG})
        assert b.stop_reason == "max_tokens" and b.content[0].type == "text"
        # several calls are several blocks; one that is cut has no input
        ask["tool_choice"] = {"type": "any"}
        ask["extra_body"] = {"logit_bias": {**DENSE, **LONG}, "seed": 3}
        many = c.messages.create(**ask)
        with c.messages.stream(**ask) as stream:
            last = stream.get_final_message()
        assert len(many.content) > 2 and many.stop_reason in ("tool_use", "max_tokens")
        assert len({x.id for x in many.content}) == len(many.content)
        for x, y in list(zip(many.content, last.content))[:-1]:
            assert x.input == y.input and x.input["city"] in ("Oslo", "Rome"), (x, y)
        ask["max_tokens"] = 45
        cut = c.messages.create(**ask)
        assert cut.stop_reason == "max_tokens" and cut.content[-1].input == {}, cut


def test_several_results():
    """Results of several calls go back in one message; the prompt has them all."""
    with server() as s:
        c = connect(s).messages
        uses = [{"type": "tool_use", "id": f"toolu_{i}", "name": "weather",
                 "input": {"city": city, "days": 3}} for i, city in enumerate(("Oslo", "Rome"))]
        results = [{"type": "tool_result", "tool_use_id": f"toolu_{i}", "is_error": i == 1,
                    "content": text} for i, text in enumerate(("snow", [
                        {"type": "text", "text": "no answer"}]))]
        messages = HELLO + [{"role": "assistant", "content": [
            {"type": "text", "text": "I ask."}, *uses]}]
        n = [c.count_tokens(model="tiny", tools=[TOOL], messages=messages + [
            {"role": "user", "content": results[:i] + [{"type": "text", "text": "so?"}]}])
            .input_tokens for i in range(3)]
        assert n == sorted(set(n)), n
        a = c.create(model="tiny", tools=[TOOL], max_tokens=9, extra_body={"logit_bias": LONG},
                     messages=messages + [{"role": "user", "content": results}])
        assert a.stop_reason == "max_tokens" and a.content, a


def test_calls_as_they_come():
    """A stream of several calls: each block is opened, told and closed before the next, and what
    the client makes of it is the whole answer."""
    with server("--deterministic") as s:
        c = connect(s).messages
        ask = dict(model="tiny", max_tokens=300, messages=HELLO, tools=[TOOL],
                   tool_choice={"type": "any"},
                   extra_body={"logit_bias": {**DENSE, **LONG}, "seed": 3, "temperature": 1})
        whole, told, at = c.create(**ask), {}, -1
        with c.stream(**ask) as stream:
            for e in stream:
                if e.type == "content_block_start":
                    at += 1
                    assert e.index == at and e.content_block.type == "tool_use", e
                elif e.type == "input_json":
                    told[at] = told.get(at, "") + e.partial_json
                elif e.type in ("content_block_delta", "content_block_stop"):
                    assert e.index == at, e
            last = stream.get_final_message()
        assert at + 1 == len(whole.content) > 2 and last.stop_reason == whole.stop_reason
        for i, (x, y) in enumerate(list(zip(whole.content, last.content))[:-1]):
            assert x.input == y.input == json.loads(told[i]), (x, y, told)


def test_limits_and_failures():
    """A full queue, too large a body and a failed device are the client's exceptions, in a stream
    as well."""
    endless = dict(model="t", messages=HELLO, max_tokens=3900, extra_body={"logit_bias": LONG},
                   stream=True)
    with Server("--parallel", "1", "--queue", "1", "--body-limit", "4000",
                program=os.environ["KVD_TEST_FAULT"]) as s:
        s.exits = (1,)
        c = connect(s).messages
        first = c.create(**endless)
        next(iter(first))
        second = c.create(**endless)
        s.wait_for(lambda: s.slots()["waiting"] == 1)
        e = raises(anthropic.RateLimitError, lambda: c.create(
            model="t", messages=HELLO, max_tokens=1))
        assert e.body["error"]["type"] == "rate_limit_error"
        assert int(e.response.headers["Retry-After"]) >= 1
        e = raises(anthropic.APIStatusError, lambda: c.create(
            model="t", max_tokens=1, messages=[{"role": "user", "content": "x" * 5000}]))
        assert e.status_code == 413 and e.body["error"]["type"] == "request_too_large", e
        s.process.send_signal(signal.SIGUSR1)
        for stream in (first, second):
            raises(anthropic.APIStatusError, lambda: [x for x in stream], "device has failed")
        s.process.wait(20)


def test_streams_beside_each_other():
    async def ask(c, i):
        async with c.messages.stream(model="tiny", messages=[{"role": "user", "content": f"I {i}"}],
                                     max_tokens=15, extra_body={"logit_bias": LONG}) as stream:
            return "".join([x async for x in stream.text_stream])

    async def ask_all(port):
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}",
                                            api_key=KEY) as c:
            return await asyncio.gather(*(ask(c, i % 6) for i in range(24)))

    with server("--deterministic") as s:
        got = asyncio.run(ask_all(s.port))
        assert all(got[i] == got[i % 6] for i in range(24)) and len(set(got)) > 1, got


def test_output_format():
    with server() as s:
        c = connect(s)
        a = c.messages.create(model="tiny", max_tokens=300, messages=HELLO,
                              output_config={"format": {"type": "json_schema", "schema": CITY}},
                              extra_body={"logit_bias": DENSE, "temperature": 1})
        got = json.loads(a.content[0].text)
        assert list(got) == ["city", "days"] and 1 <= got["days"] <= 9, got


def test_errors():
    with server("-c", "400", "--keepalive", "0.05") as s:
        raises(anthropic.AuthenticationError, lambda: connect(s, "sk-wrong").messages.create(
            model="t", max_tokens=1, messages=HELLO))
        c = connect(s)
        bad = lambda text, **k: raises(anthropic.BadRequestError, lambda: c.messages.create(
            **{"model": "t", "max_tokens": 1, "messages": HELLO, **k}), text)
        bad("tokens", messages=[{"role": "user", "content": "x" * 3000}])
        bad("messages: ", messages=[])
        bad("max_tokens: ", max_tokens=-1)
        bad("stop_sequences: ", stop_sequences=[""])
        bad("messages[0].role: ", messages=[{"role": "king", "content": "x"}])
        bad("messages[0].content[0].type: ",
            messages=[{"role": "user", "content": [{"type": "image"}]}])
        bad("messages[1].content[0].tool_use_id: ", messages=HELLO + [{"role": "user", "content": [
            {"type": "tool_result", "content": "x"}]}])
        bad("messages: ", messages=[{"role": "assistant", "content": "I"}])
        bad("tools[0].type: ", tools=[{"type": "bash_20250124", "name": "bash"}])
        bad("tools: weather: not", tools=[{**TOOL, "strict": True,
                                           "input_schema": {"not": {"type": "null"}}}])
        bad("tool_choice: ", tools=[TOOL], tool_choice={"type": "tool", "name": "clock"})
        bad("tool_choice: ", tool_choice={"type": "any"})
        bad("thinking.type: ", thinking={"type": 5})
        bad("thinking", thinking="enabled")
        bad("output_config.effort: ", output_config={"effort": "huge"})
        bad("output_config: ", tools=[TOOL],
            output_config={"format": {"type": "json_schema", "schema": CITY}})
        raises(anthropic.NotFoundError, lambda: c.messages.batches.list())
        raises(anthropic.BadRequestError, lambda: c.messages.count_tokens(
            model="t", messages=[]), "messages: ")
        c.messages.create(model="t", max_tokens=1, messages=HELLO, thinking={"type": "disabled"},
                          metadata={"user_id": "me"}, service_tier="auto")


def test_ping():
    """While a stream has nothing to say it says ping."""
    with Server("--keepalive", "0.05", "--parallel", "1",
                program=os.environ["KVD_TEST_FAULT"]) as s:
        c = connect(s)
        ask = dict(model="t", messages=HELLO, max_tokens=400, stream=True)
        busy = c.messages.create(**ask, extra_body={"logit_bias": LONG})
        next(iter(busy))
        raw = s.raw_post("/v1/messages", {**ask, "max_tokens": 2})
        data = b""
        while b"message_stop" not in data:
            data += raw.recv(65536)
        assert b'event: ping\ndata: {"type":"ping"}' in data, data
        busy.close()


if __name__ == "__main__":
    main(globals())
