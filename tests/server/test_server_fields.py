#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fields of requests as other servers have them: what is served, what is refused and how; and that
docs/server.md lists what the code knows."""
import json
import re
import shlex

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
            got = text_of(path, s.post(path, {**ask, "structured_outputs": {"json": PAIR}}))
            assert json.loads(got)["b"] == "yes", (path, got)
            got = text_of(path, s.post(path, {**ask, "structured_outputs": {"json_object": True},
                                              "logit_bias": {**DENSE, "93": 100}}))
            assert got.startswith("{"), (path, got)
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


def test_numbers_keep_their_text():
    """Numbers beyond a double or an int64 are JSON: a schema's are exact, its literals stay as they
    are written, a field's are named where they do not fit, an unknown field's mean nothing."""
    exact = {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740993}
    big = {"type": "integer", "minimum": 18446744073709551617, "maximum": 18446744073709551617}
    with Server("--deterministic") as s:
        for schema, want in ((exact, ("9007199254740993",)), (big, ("18446744073709551617",)),
                             ({"enum": [0.1, 0.7]}, ("0.1", "0.7")),
                             ({"type": "integer", "minimum": 9223372036854775807},
                              ("9223372036854775807",))):
            for path, field, body in formats({"type": "json_schema", "schema": schema}):
                text = text_of(path, s.post(path, {**body, "logit_bias": DENSE}))
                assert text in want, (path, schema, text)
        body = ('{"prompt":"x","max_tokens":30,"logit_bias":%s,"json_schema":'
                '{"enum":[1.50,1E2,-0.0,1e999]}}' % json.dumps(DENSE))
        for seed in range(4):
            text = text_of(COMPLETION,
                           s.post(COMPLETION, body.replace("{", f'{{"seed":{seed},', 1)))
            assert text in ("1.50", "1E2", "-0.0", "1e999"), text
        for path in ASKS:
            limit = [k for k in ASKS[path] if k.startswith("max")][0]
            ask = {**ASKS[path], limit: 1}
            s.post(path, {**ask, "none_of_ours": 123456789012345678901234567890})
            s.post(path, json.dumps(ask)[:-1] + ',"none_of_ours":[-1e999,1.50]}')
            s.post(path, {**ask, limit: 1.0})
            for field, value, told in (
                    (limit, "18446744073709551616", "18446744073709551616 is not in ["),
                    (limit, "1e999", "1e999 is not in ["),
                    (limit, "1.00000000000000000001", "expected an integer"),
                    ("temperature", "1e999", "1e999 is not in [0, 100]"),
                    ("seed", "9223372036854775808", "9223372036854775808 is not in ["
                     "-9223372036854775808, 9223372036854775807]")):
                text = json.dumps({**ask, field: "@"}).replace('"@"', value)
                if path != MESSAGES or field != "temperature":
                    message = error_of(s, path, text)
                    assert message.startswith(f"{field}: ") and told in message, (path, message)
        s.post(COMPLETION, {**ASKS[COMPLETION], "max_tokens": 1, "seed": 9223372036854775807})
        e = s.post(COMPLETION, '{"prompt":"x","n":01}', want=400)["error"]["message"]
        assert e == "the body is not JSON: '1' where ',' or '}' is expected (byte 19)", e


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


ONLY = "is not supported here, only"
KING = {"role": "king", "content": "x"}
CALLS = {"role": "assistant", "content": ""}
MISPLACED = (  # path, field, value, what is named (from where it begins), what else is said
    (CHAT, "messages", [5], "messages[0]", "expected an object"),
    (CHAT, "messages", [{}], "messages[0].role", "is missing; supported here: system, developer"),
    (CHAT, "messages", [{"role": 5}], "messages[0].role", "expected a string; supported here: sys"),
    (CHAT, "messages", HELLO + [KING], "messages[1].role", f'"king" {ONLY} system, dev'),
    (CHAT, "messages", [{"role": "k" * 99}], "messages[0].role", f'"{"k" * 40}" {ONLY}'),
    (CHAT, "messages", [{"role": "user"}], "messages[0].content", "is missing"),
    (CHAT, "messages", [{"role": "user", "content": 5}], "messages[0].content", "expected a"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "image_url"}]}],
     "messages[0].content[0].type", f'"image_url" {ONLY} text'),
    (CHAT, "messages", [{"role": "user", "content": [{"text": "x"}]}],
     "messages[0].content[0].type", "is missing; supported here: text"),
    (CHAT, "messages", [{"role": "user", "content": [{"type": "text", "text": "x"},
                                                     {"type": "text", "text": 5}]}],
     "messages[0].content[1].text", "expected a string"),
    (CHAT, "messages", [{**CALLS, "tool_calls": 5}], "messages[0].tool_calls", "expected a list"),
    (CHAT, "messages", [{**CALLS, "tool_calls": [5]}], "messages[0].tool_calls[0].function.name",
     "expected a string"),
    (CHAT, "messages", [{**CALLS, "tool_calls": [{"function": {"name": "f"}}, {"function": {}}]}],
     "messages[0].tool_calls[1].function.name", "expected a string"),
    (CHAT, "messages", [{**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
     "messages[0].tool_calls[0].function.arguments", "expected a text or an object"),
    (CHAT, "tools", [5], "tools[0]", "expected an object"),
    (CHAT, "tools", [{"type": "function", "function": {"name": "f"}}, {"type": "custom"}],
     "tools[1].type", f'"custom" {ONLY} function'),
    (CHAT, "tools", [{"type": "function"}], "tools[0].function", "expected an object"),
    (CHAT, "tool_choice", "often", "tool_choice", f'"often" {ONLY} none, auto, required'),
    (CHAT, "tool_choice", 5, "tool_choice", "expected none, auto"),
    (CHAT, "response_format", {"type": "xml"}, "response_format", f'type: "xml" {ONLY} text'),
    (RESPONSES, "input", [5], "input[0]", "expected an object"),
    (RESPONSES, "input", [KING], "input[0].role", f'"king" {ONLY} user'),
    (RESPONSES, "input", [{}], "input[0].role", "is missing"),
    (RESPONSES, "input", [{"role": "tool", "content": "x"}], "input[0].role", f'"tool" {ONLY}'),
    (RESPONSES, "input", [{"role": "user"}], "input[0].content", "expected a string or a list"),
    (RESPONSES, "input", [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
     "input[0].content[0].type", f'"text" {ONLY} input_text'),
    (RESPONSES, "input", [{"type": "image"}], "input[0].type", f'"image" {ONLY} message'),
    (RESPONSES, "input", [{"type": 5}], "input[0].type", "expected a string"),
    (RESPONSES, "input", [{"type": "function_call", "name": "f"}], "input[0].call_id",
     "expected a string"),
    (RESPONSES, "input", [{"type": "function_call", "call_id": "1"}], "input[0].name",
     "expected a string"),
    (RESPONSES, "input", [{"type": "function_call", "call_id": "1", "name": "f"}],
     "input[0].arguments", "expected a string"),
    (RESPONSES, "input", [{"type": "function_call_output", "output": "x"}], "input[0].call_id",
     "expected a string"),
    (RESPONSES, "input", [{"type": "function_call_output", "call_id": "1", "output": [
        {"type": "input_image"}]}], "input[0].output[0].type", f'"input_image" {ONLY} input_text'),
    (RESPONSES, "tools", [5], "tools[0]", "expected an object"),
    (RESPONSES, "tools", [{"type": 5}], "tools[0].type", "expected a string; supported here: func"),
    (RESPONSES, "tool_choice", {"type": "web_search"}, "tool_choice.type",
     f'"web_search" {ONLY} function'),
    (RESPONSES, "tool_choice", "often", "tool_choice", f'"often" {ONLY}'),
    (MESSAGES, "messages", [5, *HELLO], "messages[0]", "expected an object"),
    (MESSAGES, "messages", [KING], "messages[0].role", f'"king" {ONLY} user, assistant, system'),
    (MESSAGES, "messages", [{"role": "user"}], "messages[0].content", "expected a string"),
    (MESSAGES, "messages", [{"role": "user", "content": [{"type": "image"}]}],
     "messages[0].content[0].type", f'"image" {ONLY} text, tool_result'),
    (MESSAGES, "messages", [{"role": "user", "content": [{"type": "text"}]}],
     "messages[0].content[0].text", "expected a string"),
    (MESSAGES, "messages", [{"role": "user", "content": [{"type": "tool_result"}]}],
     "messages[0].content[0].tool_use_id", "expected a string"),
    (MESSAGES, "messages", [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}],
     "messages[0].content[0].content[0].type", f'"image" {ONLY} text'),
    (MESSAGES, "messages", [{"role": "assistant", "content": [{"type": "thinking"}]}, *HELLO],
     "messages[0].content[0].thinking", "expected a string"),
    (MESSAGES, "messages", [{"role": "assistant", "content": [{"type": "image"}]}, *HELLO],
     "messages[0].content[0].type", f'"image" {ONLY} text, tool_use'),
    (MESSAGES, "messages", [{"role": "assistant", "content": [{"type": "tool_use"}]}, *HELLO],
     "messages[0].content[0].id", "expected a string"),
    (MESSAGES, "messages", [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "1", "name": "f", "input": "x"}]}, *HELLO],
     "messages[0].content[0].input", "expected an object"),
    (MESSAGES, "system", [{"type": "image"}], "system[0].type", f'"image" {ONLY} text'),
    (MESSAGES, "tools", [5], "tools[0]", "expected an object"),
    (MESSAGES, "tools", [{"type": "bash_20250124"}], "tools[0].type", f'"bash_20250124" {ONLY}'),
    (MESSAGES, "tools", [{"type": 5}], "tools[0].type", "expected a string"),
    (MESSAGES, "tools", [{"name": "f"}], "tools[0].input_schema", "expected a schema"),
    (MESSAGES, "tool_choice", {"type": "often"}, "tool_choice.type", f'"often" {ONLY} auto, any'),
)


def test_errors_say_where_and_what():
    """What is inside a field is named by its place there, with what stands there."""
    with Server("--chat-template", str(HERE / "data" / "hermes.jinja")) as s:
        for path, field, value, where, told in MISPLACED:
            body = {**ASKS[path], field: value}
            message = error_of(s, path, body)
            assert message.startswith(f"{where}: ") and told in message, (field, value, message)
            if path != MESSAGES:
                s.error(path, body, where)


# ---- the lists in docs/server.md -----------------------------------------------------------------

ROOT = HERE.parent.parent
SHAPES = {"chat": ("srv_chat.c", CHAT), "text": ("srv_completion.c", COMPLETION),
          "responses": ("srv_responses.c", RESPONSES), "messages": ("srv_anthropic.c", MESSAGES)}
TEXT = r'"((?:[^"\\]|\\.)*)"'
ROW = rf'\{{ "(\w+)",\s*{TEXT},\s*(?:{TEXT}|\w|\s)+ \}}'


def code(name):
    return (ROOT / "server" / name).read_text()


def words(text):
    return set(re.findall(r'"(\w+)"', text))


def rows(text):
    """Fields that are refused, with the values that are not."""
    found = re.findall(ROW, text)
    assert len(found) == text.count('{ "'), found
    return {name: values for name, values, _ in found}


def known():
    """By shape, what the code serves; and what it refuses, with the values it takes."""
    shared = words(re.search(r"define SRV_PARAM_NAMES(.*?[^\\])\n", code("srv_fields.h"), re.S)[1])
    others = rows(code("srv_others.c"))
    assert len(shared) > 15 and len(others) > 60, (shared, others)
    served, refused = {}, {}
    for shape, (file, _) in SHAPES.items():
        names = re.search(r" names\[\] = \{(.*?)\};", code(file), re.S)[1]
        assert "SRV_PARAM_NAMES" in names
        served[shape] = words(names) | shared
        own = rows(re.search(r" refused\[\] = \{(.*?)\n?\};", code(file), re.S)[1])
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


# What one route has and another has not, and changes no answer there.
INDIFFERENT = set("""access_programs background background_options cache_control client_metadata
    container context_management diagnostics image include inference_geo max_tool_calls metadata
    moderation
    prediction prompt_cache_key prompt_cache_options prompt_cache_retention return_progress
    safety_identifier service_tier speed store stream_options truncation user user_profile_id
    workspace_id""".split())


def test_routes_know_what_the_others_have():
    """A field that belongs to another route's shape is refused, not ignored."""
    served, refused = known()
    names = {shape: served[shape] | set(refused[shape]) for shape in SHAPES}
    strange = set().union(*(set().union(*names.values()) - own for own in names.values()))
    assert strange == INDIFFERENT, strange ^ INDIFFERENT


def test_routes_are_documented():
    section = (ROOT / "docs" / "server.md").read_text().split("\n## Routes\n")[1].split("\n## ")[0]
    told = {tuple(x.split()) for x in re.findall(r"`((?:GET|HEAD|POST|DELETE) /[^`]*)`", section)}
    for line in section.splitlines():  # further names in the same cell are of the same method
        method = re.match(r"\| `(\w+) /", line)
        for path in re.findall(r"`(/[^`]*)`", line.split("|")[1]) if method else ():
            told.add((method[1], path))
    table = {(m, p + "NAME" if p == "/v1/models/" else p) for m, p in re.findall(
        r'\{ "([A-Z]+)", "([^"]+)",', code("srv_routes.c")) if not p.startswith("/page/")}
    assert told == table | {("GET", "/page/...")}, told ^ table


def test_examples():
    """What docs/server.md has to be typed is taken, and does what it says there."""
    page = (ROOT / "docs" / "server.md").read_text()
    found = re.findall(r"^    curl .*\n(?:^      .*\n)*", page, re.M)
    assert len(found) == 4, found
    with Server("--chat-template", str(HERE / "data" / "hermes.jinja")) as s:
        seen = set()
        for text in found:
            words = [w for w in shlex.split(text) if w != "-N"]
            assert words[0] == "curl" and words[2] == "-d" and len(words) == 4, words
            host, _, path = words[1].partition("/")
            body = json.loads(words[3])
            assert host == "localhost:8080" and "/" + path == CHAT, words
            body.update(temperature=0, logit_bias={"261": -100, "34": 8, **DENSE})
            if "stream" in body:
                events = list(s.stream(CHAT, body))
                assert events[-1] == "[DONE]" and events[-2]["choices"] == [], events[-2:]
                assert events[-2]["usage"]["completion_tokens"] == 40, events[-2]
                seen.add("stream")
                continue
            c = s.post(CHAT, body)["choices"][0]
            if "tools" in body:
                call = c["message"]["tool_calls"][0]["function"]
                assert list(json.loads(call["arguments"])) == ["city"], call
                seen.add(call["name"])
            elif "response_format" in body:
                who = json.loads(c["message"]["content"])
                assert list(who) == ["name", "born"] and 1000 <= who["born"] <= 2100, who
                seen.add("schema")
            else:
                assert c["message"]["content"] and c["finish_reason"] == "length", c
                seen.add("chat")
        assert seen == {"chat", "stream", "weather", "schema"}, seen


def test_refused_unless_harmless():
    """Every such field on every route: by its name, but for the values that ask for nothing."""
    n, ways = 0, set()
    served, refused = known()
    with Server() as s:
        for shape, fields in refused.items():
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
                    told = re.fullmatch(name + r": is not supported here; (.{6,})", message)
                    assert told and "(null)" not in message, (path, value, message)
                    ways.add(told[1])
                    n += 1
        # what one route has and another has not is not known there: no field is ignored by mistake
        assert not [x for x in s.lines if "not known" in x], s.lines
        for _ in range(2):
            s.post(COMPLETION, {**ASKS[COMPLETION], "frobnicate": 1})
        s.wait_for(lambda: sum("frobnicate" in x for x in s.lines) == 1)
        for path in RESPONSES, MESSAGES:  # what is not known is not looked at
            s.post(path, {**ASKS[path], "return_progress": "x"})
    assert n > 700 and len(ways) > 50, (n, ways)
    # what they lead to is there
    routes = set(re.findall(r'"POST", "([^"]+)"', code("srv_routes.c")))
    fields = set().union(*served.values()) | {"disable_parallel_tool_use"}
    for way in ways:
        assert set(re.findall(r"(/[a-z0-9/-]+)", way)) <= routes, way
        assert set(re.findall(r"[a-z]+(?:_[a-z]+)+", way)) <= fields, way


# What users of other servers send first: path, field, value, what the error says of it.
WAYS = (
    (CHAT, "grammar", "root ::= x", "use a JSON schema: response_format of type json_schema, or"),
    (CHAT, "guided_choice", ["a", "b"], '{"enum": [...]}'),
    (CHAT, "guided_regex", "a+", '"pattern"'),
    (CHAT, "guided_grammar", "x", "use a JSON schema"),
    (CHAT, "structured_outputs", {"regex": "a"}, "regex: is not supported here, only json and"),
    (CHAT, "structured_outputs", {"json": PAIR, "json_object": True}, "expected one of them"),
    (CHAT, "structured_outputs", {"json": "x"}, "json: expected a schema, an object"),
    (CHAT, "n_probs", 5, "use logprobs with top_logprobs"),
    (CHAT, "mirostat", 2, "use temperature"),
    (CHAT, "input", "x", "it belongs to /v1/responses: use messages"),
    (CHAT, "prompt", "x", "it belongs to /v1/completions: use messages"),
    (CHAT, "system", "x", "use a message of role system"),
    (CHAT, "max_output_tokens", 5, "use max_tokens"),
    (CHAT, "reasoning_format", "deepseek", "only auto, none"),
    (COMPLETION, "messages", HELLO, "it belongs to /v1/chat/completions"),
    (COMPLETION, "input", "x", "in /v1/completions prompt"),
    (COMPLETION, "tools", [{}], "/v1/chat/completions"),
    (RESPONSES, "messages", HELLO, "input in /v1/responses"),
    (RESPONSES, "max_tokens", 5, "use max_output_tokens"),
    (RESPONSES, "previous_response_id", "resp_1", "each request brings all"),
    (RESPONSES, "response_format", {"type": "json_object"}, "text.format in /v1/responses"),
    (MESSAGES, "stop", "x", "use stop_sequences"),
    (CHAT, "logit_bias", "x", 'an object of biases by token, {"15": -100}, or a list of pairs'),
    (CHAT, "logit_bias", [[15]], "entry 0 of the list is not [token or text, bias]"),
    (CHAT, "logit_bias", {"": 1}, '"" is none of this model\'s tokens, 0 to '),
    (CHAT, "logit_bias", {"264": 1}, "0 to 263 (/tokenize"),
    (CHAT, "logit_bias", {"15": True}, "the bias of token 15 is not a number in [-100, 100]"),
    (CHAT, "model", 5, "the server has one model"),
    (CHAT, "messages", None, "is missing: expected a list of 1 to 8192 messages"),
    (CHAT, "messages", [], "expected a list of 1 to 8192 messages"),
    (CHAT, "top_logprobs", 2, "only with logprobs: true"),
    (COMPLETION, "prompt", None, "is missing: expected a text, a list of texts, or of tokens"),
    (COMPLETION, "prompt", [1, 264], "entry 1 is none of this model's tokens, 0 to 263"),
    (RESPONSES, "input", None, "is missing: expected a string or a list of items"),
    (MESSAGES, "messages", None, "is missing: expected a list of messages"),
    (MESSAGES, "max_tokens", None, "is missing: expected the most tokens"),
    (MESSAGES, "messages", [{"role": "assistant", "content": "x"}], "needs one before it"),
    ("/tokenize", "content", None, "is missing: expected a string"),
    ("/tokenize", "prompt", 5, "expected a string"),
    ("/tokenize", "messages", HELLO, "/v1/messages/count_tokens"),
    ("/tokenize", "parse_special", True, "leave it out"),
    ("/detokenize", "tokens", None, "is missing: expected a list of tokens"),
    ("/detokenize", "tokens", [264], "entry 0 is none of this model's tokens, 0 to 263"),
    ("/apply-template", "messages", None, "is missing: expected a list"),
    ("/apply-template", "chat_template", "x", "--chat-template FILE"),
)


def test_ways_on():
    """An error says what to send instead, in this server's words."""
    with Server() as s:
        for path, field, value, told in WAYS:
            message = error_of(s, path, {**ASKS.get(path, {}), field: value})
            assert message.startswith(field + ": ") and told in message, (path, field, message)


def test_what_clients_send_for_nothing():
    """Values by which clients of llama.cpp and vLLM say that they ask for nothing."""
    with Server("--predict", "9", ctx=300) as s:
        never = {"logit_bias": {"261": -100}}
        for path, limits in ((CHAT, ("max_tokens", "max_completion_tokens", "n_predict")),
                             (COMPLETION, ("max_tokens", "max_completion_tokens", "n_predict")),
                             (RESPONSES, ("n_predict",))):
            ask = {k: v for k, v in ASKS[path].items() if not k.startswith("max_")}
            for limit in limits:  # to the end of the context
                used = s.post(path, {**ask, **never, limit: -1})["usage"]
                assert used["total_tokens"] == 300, (path, limit, used)
                assert f"{limit}: -2 is not in [-1" in error_of(s, path, {**ask, limit: -2})
        drawn = {"prompt": "x", "max_tokens": 12, "temperature": 2, **never}
        texts = {s.post(COMPLETION, {**drawn, "seed": -1})["choices"][0]["text"] for _ in range(3)}
        assert len(texts) == 3, texts
        for path, ask in ASKS.items():
            for field, value in (("reasoning_format", "auto"), ("reasoning_format", "none"),
                                 ("logit_bias", []), ("logit_bias", {})):
                s.post(path, {**ask, field: value})


if __name__ == "__main__":
    main(globals())
