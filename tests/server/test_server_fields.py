#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fields of requests as other servers have them: what is served, what is refused and how."""
import json

from kvserver import HERE, Server, main

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
# What each route needs, its limit of tokens among it.
ASKS = {CHAT: {"messages": HELLO, "max_tokens": 30}, COMPLETION: {"prompt": "x", "max_tokens": 30},
        RESPONSES: {"input": "x", "max_output_tokens": 30},
        MESSAGES: {"messages": HELLO, "max_tokens": 30}}
DENSE = {"9": -100, "10": -100, "13": -100, "32": -100}  # no white space between what counts
PAIR = {"type": "object", "additionalProperties": False, "required": ["a", "b"],
        "properties": {"a": {"enum": [1, 2]}, "b": {"const": "yes"}}}


def error_of(s, path, body):
    """Its message, in whichever shape; that of OpenAI says the field once more."""
    e = s.post(path, body, want=400)["error"]
    assert "param" not in e or e["param"] is None or e["message"].startswith(e["param"] + ": "), e
    return e["message"]


def text_of(path, a):
    if path == CHAT:
        return a["choices"][0]["message"]["content"]
    if path == COMPLETION:
        return a["choices"][0]["text"]
    return a["content"][0]["text"] if path == MESSAGES else a["output"][0]["content"][0]["text"]


def formats(form):
    """(path, field, body) of all routes with a format."""
    yield CHAT, "response_format", {**ASKS[CHAT], "response_format": form}
    yield COMPLETION, "response_format", {**ASKS[COMPLETION], "response_format": form}
    yield RESPONSES, "text", {**ASKS[RESPONSES], "text": {"format": form}}
    yield MESSAGES, "output_config", {**ASKS[MESSAGES], "output_config": {"format": form}}


def test_schemas_of_formats():
    """Wherever a format has its schema, it applies; one that would have no effect is refused."""
    with Server() as s:
        for form in ({"type": "json_object", "schema": PAIR},
                     {"type": "json_schema", "schema": PAIR},
                     {"type": "json_object", "json_schema": {"schema": PAIR}},
                     {"type": "json_schema", "json_schema": {"name": "n", "schema": PAIR}},
                     {"type": "json_schema", "json_schema": None, "schema": PAIR}):
            for path, field, body in formats(form):
                got = json.loads(text_of(path, s.post(path, {**body, "logit_bias": DENSE})))
                assert got["a"] in (1, 2) and got == {"a": got["a"], "b": "yes"}, (path, form, got)
        for form in ({"type": "json_object"}, {"type": "json_object", "schema": {}},
                     {"type": "json_object", "schema": None}):
            for path, field, body in formats(form):
                text = text_of(path, s.post(path, {**body, "logit_bias": {**DENSE, "93": 100}}))
                assert text.startswith("{"), (path, form, text)
        for form, told in (
                ({"type": "json_object", "schema": {"not": {}}}, "not"),
                ({"type": "json_object", "schema": [PAIR]}, "schema: expected"),
                ({"type": "json_schema", "schema": "x"}, "schema: expected"),
                ({"type": "json_schema"}, "schema: is missing"),
                ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema"),
                ({"type": "json_schema", "json_schema": {"schema": PAIR}, "schema": PAIR},
                 "schema and json_schema"),
                ({"type": "text", "schema": PAIR}, "schema: only with"),
                ({"type": "text", "json_schema": {"schema": PAIR}}, "schema: only with"),
                ({"schema": PAIR}, "type: expected")):
            for path, field, body in formats(form):
                message = error_of(s, path, body)
                assert message.startswith(field + ": ") and told in message, (path, form, message)


if __name__ == "__main__":
    main(globals())
