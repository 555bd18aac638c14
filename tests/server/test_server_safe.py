#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may call, and what is never told."""
import json
import os
import re
import subprocess
import tempfile

from kvserver import HERE, PATIENCE, PROGRAM, TINY, Server, main

KEY = "sk-correct-horse"


def routes():
    """(method, path) of every route, from the table itself."""
    text = (HERE.parent.parent / "server" / "srv_routes.c").read_text()
    found = re.findall(r'\{ "([A-Z]+)", "([^"]+)", (true|false),', text)
    assert len(found) >= 10
    return [(m, path + "tiny" if path.endswith("/") and path != "/" else path, is_open)
            for m, path, is_open in found]


def test_key_guards_every_route():
    with Server("--alias", "tiny", env={"KVDRIVE_API_KEY": KEY}) as s:
        for method, path, is_open in routes():
            body = "{}" if method == "POST" else None
            wrong = ({}, {"Authorization": "Bearer sk-wrong-horse-x"},
                     {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Bearer {KEY[:-1]}"},
                     {"Authorization": "Bearer "}, {"Authorization": KEY}, {"x-api-key": "no"})
            for headers in wrong:
                status, got, data = s.call(method, path, body, headers=headers)
                want = 200 if is_open == "true" else 401
                assert status == want, (method, path, status, data)
                assert want == 200 or got["WWW-Authenticate"] == "Bearer"
            for headers in ({"Authorization": f"Bearer {KEY}"}, {"x-api-key": KEY},
                            {"authorization": f"bearer {KEY}"}):
                assert s.call(method, path, body, headers=headers)[0] in (200, 400)
        assert s.call("GET", "/nothing")[0] == 401  # what there is is not told either
        assert s.call("POST", "/embeddings", "{}")[0] == 401
        assert s.call("POST", "/health")[0] == 401
        config = subprocess.run([PROGRAM, "serve", "--print-config"], text=True, check=True,
                                capture_output=True, env={**os.environ, "KVDRIVE_API_KEY": KEY})
        assert KEY not in config.stdout + "".join(s.lines)
        assert "api-key" in config.stdout


def test_key_is_told_nowhere():
    """Neither the key nor what somebody takes for it is in the log or in an answer, wherever they
    put it."""
    guess = "sk-wrong-pony"
    for form in ("text", "json"):
        with Server("-v", "--log-format", form, env={"KVDRIVE_API_KEY": KEY}) as s:
            told = b""
            for word in (KEY, guess):
                for headers in ({"Authorization": f"Bearer {word}"}, {"x-api-key": word},
                                {"Authorization": f"Basic {word}"}, {"Authorization": word},
                                {"Authorization": f"Bearer {word}", "Host": word},
                                {"Authorization": f"Bearer {word}", "Origin": f"http://{word}"},
                                {"Authorization": f"Bearer {KEY}", "x-other": word}):
                    for method, path, _ in routes() + [("GET", f"/{word}", ""), ("PUT", "/x", "")]:
                        told += s.call(method, path, "{" if method == "POST" else None,
                                       headers=headers)[2]
                told += s.call("GET", f"/health?key={word}")[2]
                s.raw(f"{word} / HTTP/1.1\r\n{word}\r\n\r\n".encode()).close()
                s.raw(f"GET / {word}\r\n\r\n".encode()).close()
            good = {"Authorization": f"Bearer {KEY}"}
            s.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=good)
        assert any("status 401" in line for line in s.lines)  # it has ended, all lines are there
        for word in (KEY, guess):
            # the path of a route that is not there comes back to its caller
            assert word.encode() not in told.replace(f"/{word}".encode(), b""), word
        # and to the log, if the caller has the key, and but for the key
        paths = [line for line in s.lines if f"/{guess}" in line]
        assert paths and all("status 404" in line for line in paths), paths
        assert KEY not in "\n".join(s.lines)
        assert guess not in "\n".join(s.lines).replace(f"/{guess}", "")


def test_key_is_compared_in_one_place():
    """By the function whose work tests/unit/test_srv_key.c counts; nothing else looks into it."""
    uses = {}
    for file in (HERE.parent.parent / "server").glob("*.c"):
        for line in file.read_text().splitlines():
            if re.search(r"\bp[.]key\b|\bp->key\b", line):
                uses.setdefault(file.name, []).append(line.strip())
    assert set(uses) == {"srv_listen.c"}, uses
    for line in uses["srv_listen.c"]:
        assert "srv_same_key(" in line or re.search(r"[!&(] *[sc]->(s->)?p\.key &&", line), line
    assert sum("srv_same_key(" in line for line in uses["srv_listen.c"]) == 2, uses


def test_key_from_file():
    with tempfile.NamedTemporaryFile("w") as f:
        f.write(KEY + "\n")
        f.flush()
        with Server("--api-key-file", f.name) as s:
            assert s.call("GET", "/v1/models")[0] == 401
            s.get("/v1/models", headers={"Authorization": f"Bearer {KEY}"})


def test_key_file_that_others_can_read():
    """A line of warning, then it serves: containers show their secrets to all."""
    with tempfile.NamedTemporaryFile("w") as f:
        f.write(KEY + "\n")
        f.flush()
        for mode, warned in ((0o644, True), (0o600, False)):
            os.chmod(f.name, mode)
            with Server("--api-key-file", f.name) as s:
                assert s.call("GET", "/v1/models")[0] == 401
            found = [line for line in s.lines if "chmod 600" in line]
            assert len(found) == warned, s.lines
            assert all(f.name in line and "mode 0644" in line and KEY not in line
                       for line in found), found


def refused(*args, env=None):
    r = subprocess.run([PROGRAM, "serve", "-m", str(TINY / "llama.gguf"), "--port", "0", *args],
                       capture_output=True, text=True, timeout=PATIENCE,
                       env={**os.environ, **(env or {})})
    assert r.returncode not in (0, -6, -11), r
    return r.stderr


def test_only_loopback_without_key():
    assert "--without-key" in refused("--host", "0.0.0.0")
    assert "--without-key" in refused("--host", "::")
    assert "command line" in refused("--api-key", KEY)
    assert KEY not in refused("--api-key", KEY)
    assert "empty" in refused(env={"KVDRIVE_API_KEY": ""})
    assert "blanks" in refused(env={"KVDRIVE_API_KEY": "a b"})
    assert "no-such" in refused("--api-key-file", "/no-such")
    refused("--host", "no.such.host.invalid")
    with Server("--host", "0.0.0.0", "--without-key") as s:
        assert s.call("GET", "/health", headers={"Host": "box.lan:80"})[0] == 200
    with Server("--host", "0.0.0.0", env={"KVDRIVE_API_KEY": KEY}) as s:
        assert s.call("GET", "/v1/models")[0] == 401
    with Server("--host", "127.0.0.1") as s:  # the port is taken
        assert "choose another --port" in refused("--port", str(s.port))


def test_host_and_origin():
    with Server() as s:
        for host, want in (("localhost", 200), (f"localhost:{s.port}", 200), ("127.0.0.1:1", 200),
                           ("[::1]:80", 200), ("LOCALHOST", 200), ("evil.example", 403),
                           ("localhost.evil.example", 403), ("127.0.0.1.evil.example", 403),
                           ("", 403)):
            for path in ("/health", "/v1/models"):
                status, _, data = s.call("GET", path, headers={"Host": host})
                assert status == want and (want == 200 or b"--host" in data), (host, data)
        for origin, want in ((f"http://127.0.0.1:{s.port}", 200), ("http://evil.example", 403),
                             ("null", 403)):
            status, headers, data = s.call("POST", "/tokenize", {"content": "x"},
                                           headers={"Origin": origin})
            assert status == want and (want == 200 or b"--cors-origin" in data), (origin, data)
            assert not any("access-control" in h.lower() for h in headers), headers
        assert s.call("OPTIONS", "/v1/models", headers={"Origin": "http://evil.example"})[0] == 403
    with Server("--cors-origin", "https://chat.example") as s:
        ok, evil = {"Origin": "https://chat.example"}, {"Origin": "https://evil.example"}
        status, headers, _ = s.call("OPTIONS", "/v1/chat/completions", headers=ok)
        assert status == 204 and headers["Access-Control-Allow-Origin"] == ok["Origin"]
        status, headers, _ = s.call("POST", "/tokenize", {"content": "x"}, headers=ok)
        assert status == 200 and headers["Access-Control-Allow-Origin"] == ok["Origin"]
        assert s.call("POST", "/tokenize", {"content": "x"}, headers=evil)[0] == 403


def test_headers_that_web_pages_may_send():
    """Of those that a preflight asks for the ones of the official clients, and nothing else;
    without a question the usual ones."""
    stainless = [f"x-stainless-{x}" for x in ("arch", "lang", "os", "package-version", "runtime",
                                              "retry-count", "runtime-version", "timeout")]
    with Server("--cors-origin", "https://chat.example") as s:
        def told(asked=None):
            asked = {} if asked is None else {"Access-Control-Request-Headers": asked}
            status, headers, _ = s.call("OPTIONS", "/v1/chat/completions",
                                        headers={"Origin": "https://chat.example", **asked})
            assert status == 204
            return headers["Access-Control-Allow-Headers"].split(", ")

        usual = ["authorization", "content-type", "x-api-key", "anthropic-version"]
        for names in (["authorization", "content-type", *stainless], [
                "anthropic-dangerous-direct-browser-access", "anthropic-beta",
                "openai-organization", "openai-project", "openai-beta", "user-agent"], usual):
            assert told(",".join(names)) == told(" , ".join(names)) == names
        assert told() == told("x-evil, cookie") == told("") == usual
        assert told("x-evil,content-type,x-stainless-,x-stainless-a(b,x-stainless-a;b,"
                    "content-type2,content") == ["content-type"]
        many = told(",".join(f"x-stainless-{i:0>100}" for i in range(20)) + ",authorization")
        assert len(", ".join(many)) < 512 and many[-1] == "authorization" and len(many) == 5, many


def test_paths_in_the_log():
    """That of a route that is not there, and of no other: so long, and as characters that can be
    nothing else; never a query."""
    with Server() as s:
        for path, told in (("/no/such", "/no/such"), ("/no?secret=1", "/no"),
                           ("/no%3Fsecret=1", "/no"), ("/a%22%0Ab%5C%7F%C3%A9%20c",
                                                       r"/a\x22\x0ab\x5c\x7f\xc3\xa9\x20c"),
                           ("/%1b[31m", r"/\x1b[31m"), ("/" + "x" * 300, "/" + "x" * 79)):
            s.call("GET", path)
            want = f' no route "{told}'
            s.wait_for(lambda: any(want in line and "status 404" in line for line in s.lines))
        s.call("GET", "/v1/completions?secret=1")
        s.call("GET", "/v1/models/secret?secret=1")
        s.wait_for(lambda: any("/v1/models/: status 404" in line for line in s.lines))
        assert "secret" not in "".join(s.lines)
        assert max(len(line) for line in s.lines if "no route" in line) < 180, s.lines
        assert any('xxx...": status 404' in line for line in s.lines), s.lines


def test_origins_that_browsers_send():
    """What none sends would allow nobody: refused by name.  The model is not there, which is told
    of what is accepted."""
    def told(origin):
        r = subprocess.run([PROGRAM, "serve", "-m", "/no-such", "--cors-origin", origin],
                           capture_output=True, text=True, timeout=PATIENCE)
        return r.returncode, r.stderr

    for origin in ("*", "null", "https://chat.example", "http://localhost:3000", "http://[::1]:81",
                   "http://[fe80::1:2]", "http://127.0.0.1", "https://a-b.c_d.example:65535",
                   "https://xn--bcher-kva.example", "tauri://localhost", "chrome-extension://abc",
                   "http://a:443", "https://a:80", "http://a:8080"):
        code, text = told(origin)
        assert code == 1 and "--model /no-such" in text and "origin" not in text, (origin, text)
    for origin in ("foo", "", "chat.example", "chat.example:80", "//chat.example", "https://",
                   "https:/chat.example", "https://chat.example/", "https://chat.example/path",
                   "https://chat.example?x", "https://chat.example#x", "https://u@chat.example",
                   "https://u:p@chat.example", "https://chat.example:", "https://chat.example:0",
                   "https://chat.example:08", "https://chat.example:65536", "https://a:123456",
                   "https://chat.example:x", "https://*.example", "https://a,https://b",
                   "https://a https://b", " https://a", "https://a ", "HTTPS://chat.example",
                   "https://Chat.example", "https://b\u00fccher.example", "1http://a", "file://",
                   "http://[::1", "http://[]", "http://[::1]x", "http://[::g]", "http://::1",
                   "NULL", "**", "https://chat.example:443", "http://chat.example:80"):
        code, text = told(origin)
        assert code == 2 and f"--cors-origin '{origin}'" in text, (origin, code, text)
        assert "https://chat.example" in text or "leave" in text, text


def test_why_in_the_log():
    """What an error is about, else its kind, and the route; nothing of what was sent."""
    with Server("--parallel", "1") as s:
        for call, told in (
                ((s.call, "POST", "/v1/chat/completions", {"messages": [{"role": "sec ret"}]}),
                 '/v1/chat/completions: status 400 ("messages[0].role"), '),
                ((s.call, "POST", "/v1/messages", {"messages": 5, "max_tokens": 1}),
                 '/v1/messages: status 400 ("messages"), '),
                ((s.call, "POST", "/tokenize", "secret"),
                 "/tokenize: status 400 (invalid_request_error), "),
                ((s.call, "POST", "/v1/completions", {"prompt": [67] * 5000}),
                 '/v1/completions: status 400 ("prompt"), '),
                ((s.call, "GET", "/health", None, {"Origin": "http://secret"}),
                 "/health: status 403 (permission_error), "),
                ((s.call, "OPTIONS", "/v1/models", None, {"Origin": "http://secret"}),
                 "/v1/models: status 403 (permission_error), "),
                ((s.call, "PUT", "/v1/models/secret"),
                 "/v1/models/: status 405 (invalid_request_error), ")):
            assert call[0](*call[1:])[0] >= 400
            s.wait_for(lambda: any(f" info {told}" in line for line in s.lines))
        assert "sec" not in "".join(s.lines)


def test_prompts_stay_out_of_the_log():
    with Server("-v", "--log-format", "json") as s:
        s.post("/v1/completions", {"prompt": "my secret plan", "max_tokens": 3})
        s.call("POST", "/v1/completions", '{"prompt":"my secret plan"')
        s.call("GET", "/my%22path?of=my-secret-plan")
        s.wait_for(lambda: any("no route" in line for line in s.lines))
        assert "secret" not in "".join(s.lines)
        for line in s.lines:
            if not line.startswith("kvdrive:"):
                assert {"time", "level", "message"} == set(json.loads(line))


def test_odd_methods_and_paths():
    """Whatever they are and however long: refused, and of what comes back only the path is the
    caller's, of nobody else's memory anything."""
    with Server() as s:
        for n in (1, 7, 8, 9, 20, 39, 40, 41, 47, 48, 60, 200, 1000, 5000):
            for method, path, want in (("M" * n, "/v1/models", 405), ("M" * n, "/", 405),
                                       ("GET", "/" + "p" * n, 404), ("GET", "/health" * n, 404),
                                       ("M" * n, "/" + "p" * n, 404)):
                if (method, path) == ("GET", "/health"):
                    continue
                c = s.raw(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close"
                          "\r\n\r\n".encode())
                data = b""
                try:
                    while more := c.recv(4096):
                        data += more
                except OSError:
                    pass  # too long for the library
                c.close()
                if not data and n >= 5000:
                    continue
                head, _, body = data.partition(b"\r\n\r\n")
                status = int(head.split()[1])
                assert status == want or (status in (414, 431) and n >= 1000), (n, head)
                text = body.decode().replace(path, "").strip("\0")
                if status == want:
                    message = json.loads(body)["error"]["message"]
                    assert message.startswith(("there is no ", path)) and len(message) < 512
                    told = re.sub("there is no | does not take |, but [A-Z, ]+$", "", message)
                    assert set(told) <= set(path + method), message
                assert len(text) < 600, text
        assert s.get("/health") == {"status": "ok"}


def test_odd_requests():
    """Requests that are none are refused, and the server goes on."""
    with Server() as s:
        for data in (b"\r\n\r\n", b"GET\r\n\r\n", b"GET /health\r\n\r\n",
                     b"\x00" * 100 + b"\r\n\r\n",
                     b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", b"A" * 20000,
                     b"GET http://evil/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET /%2e%2e/etc HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
                     b"Content-Length: 99999999999999999999\r\n\r\n",
                     b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
                     b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"):
            c = s.raw(data)
            c.settimeout(2)
            try:
                answer = c.recv(1000)
                assert b"200 OK" not in answer.split(b"\r\n")[0], (data[:50], answer)
            except OSError:
                pass
            c.close()
            assert s.get("/health") == {"status": "ok"}
        assert s.call("GET", "/health?x=1")[0] == 200


if __name__ == "__main__":
    main(globals())
