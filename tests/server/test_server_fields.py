#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fields of requests as other servers have them: what is served, what is refused and how; and that
docs/server.md lists what the code knows."""
import json
import re

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


def test_schemas_of_their_own():
    """llama.cpp's and vLLM's fields for what a format does: the same answer, or a name."""
    with Server("--deterministic") as s:
        for path, ask in ASKS.items():
            ask = {**ask, "logit_bias": DENSE}
            for field in ("json_schema", "guided_json"):
                got = json.loads(text_of(path, s.post(path, {**ask, field: PAIR})))
                assert got == {"a": got["a"], "b": "yes"}, (path, field, got)
                for bad in ("x", [PAIR], True):
                    assert error_of(s, path, {**ask, field: bad}).startswith(field + ": expected")
                message = error_of(s, path, {**ask, field: {"not": {}}})
                assert message.startswith(field + ": ") and "not" in message, message
            message = error_of(s, path, {**ask, "json_schema": PAIR, "guided_json": PAIR})
            assert message == "guided_json: not together with json_schema", message
        for path, _, body in formats({"type": "json_object"}):
            message = error_of(s, path, {**body, "json_schema": PAIR})
            assert message.startswith("json_schema: not together with "), message
        for path, _, body in formats({"type": "text"}):
            got = json.loads(text_of(path, s.post(path, {**body, "json_schema": PAIR,
                                                         "logit_bias": DENSE})))
            assert got["b"] == "yes", (path, got)
    with Server("--chat-template", str(HERE / "data" / "hermes.jinja")) as s:
        tools = [{"type": "function", "function": {"name": "f"}}]
        s.error(CHAT, {**ASKS[CHAT], "tools": tools, "json_schema": PAIR}, "json_schema")


def test_n_predict():
    """llama.cpp's name of the limit counts where none of the others says it."""
    with Server() as s:
        n = lambda path, **k: s.post(path, {"logit_bias": {"261": -100}, **k})["usage"]
        limits = {CHAT: "max_tokens", COMPLETION: "max_tokens", RESPONSES: "max_output_tokens"}
        for path, limit in limits.items():
            ask = {k: v for k, v in ASKS[path].items() if k != limit}
            for more, want in (({"n_predict": 7}, 7), ({"n_predict": 7, limit: 3}, 3),
                               ({"n_predict": 0}, 0)):
                u = n(path, **ask, **more)
                assert u.get("completion_tokens", u.get("output_tokens")) == want, (path, more, u)
            for bad in (-2, "x", 1.5, 2**32):
                assert error_of(s, path, {**ask, "n_predict": bad}).startswith("n_predict: ")
        full = n(COMPLETION, prompt=[65] * 3970, n_predict=-1)
        assert full["completion_tokens"] == 30, full  # to the end of the context, not 16


# ---- the lists in docs/server.md -----------------------------------------------------------------

ROOT = HERE.parent.parent
SHAPES = {"chat": ("srv_chat.c", CHAT), "text": ("srv_completion.c", COMPLETION),
          "responses": ("srv_responses.c", RESPONSES), "messages": ("srv_anthropic.c", MESSAGES)}
ROW = r'\{ "(\w+)", "((?:[^"\\]|\\.)*)" \}'


def code(name):
    return (ROOT / "server" / name).read_text()


def words(text):
    return set(re.findall(r'"(\w+)"', text))


def known():
    """By shape, what the code serves; and what it refuses, with the values it takes."""
    shared = words(re.search(r"define SRV_PARAM_NAMES(.*?[^\\])\n", code("srv_fields.h"), re.S)[1])
    others = dict(re.findall(ROW, code("srv_others.c")))
    assert len(shared) > 15 and len(others) > 60, (shared, others)
    served, refused = {}, {}
    for shape, (file, _) in SHAPES.items():
        names = re.search(r" names\[\] = \{(.*?)\};", code(file), re.S)[1]
        assert "SRV_PARAM_NAMES" in names
        served[shape] = words(names) | shared
        own = dict(re.findall(ROW, re.search(r" refused\[\] = \{(.*?)\};", code(file), re.S)[1]))
        assert own and not served[shape] & set(own), shape
        refused[shape] = {name: values.replace('\\"', '"') for name, values in
                          {**others, **own}.items() if name not in served[shape]}
    return served, refused


def documented(page):
    """The same, of the page's two tables."""
    served = {shape: set() for shape in SHAPES}
    refused = {shape: {} for shape in SHAPES}
    section = page.split("\n## Fields\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        cells = [c.strip() for c in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            in_first = section.index(line) < section.index("| taken if it is |")
            for shape in SHAPES if cells[1] == "all" else cells[1].split(", "):
                for name in re.findall(r"`(\w+)`", cells[0]):
                    assert name not in served[shape] and name not in refused[shape], (shape, name)
                    if in_first:
                        served[shape].add(name)
                    else:
                        refused[shape][name] = values_of(cells[2])
    return served, refused


def values_of(cell):
    """In the form of the code's."""
    if cell.startswith("anything"):
        return "*"
    return " ".join(v.strip("`") for v in cell.split(" or ")).replace("null", "")


def test_fields_are_documented():
    page = (ROOT / "docs" / "server.md").read_text()
    assert documented(page) == known()
    for bad in (page.replace("| `top_k` | all |", "| `top_k` | chat |"),
                page.replace("| `seed` |", "| `sead` |"), page.replace("`n_probs`, ", ""),
                page.replace("| `min_keep` | all | 0 or 1 |", "| `min_keep` | all | 0 |")):
        assert bad != page and documented(bad) != known()


def test_refused_unless_harmless():
    """Every such field on every route: by its name, but for the values that ask for nothing."""
    n = 0
    with Server() as s:
        for shape, fields in known()[1].items():
            path = SHAPES[shape][1]
            ask = {k: 1 if k.startswith("max_") else v for k, v in ASKS[path].items()}
            for name, values in fields.items():
                odd = [7, "?", ["x"], {"x": 1}]
                taken = odd if values == "*" else [json.loads(v) for v in values.split()]
                taken += [float(v) for v in taken if type(v) is int]
                for value in [None] + taken:
                    s.post(path, {**ask, name: value})
                for value in () if values == "*" else odd:
                    message = error_of(s, path, {**ask, name: value})
                    assert message == name + ": is not supported here", (path, value, message)
                    n += 1
        # what one route has and another has not is not known there: no field is ignored by mistake
        assert not [x for x in s.lines if "not known" in x], s.lines
        for _ in range(2):
            s.post(COMPLETION, {**ASKS[COMPLETION], "frobnicate": 1})
        s.wait_for(lambda: sum("frobnicate" in x for x in s.lines) == 1)
    assert n > 700, n


if __name__ == "__main__":
    main(globals())
