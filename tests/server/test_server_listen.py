#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where it listens: each address that clients look for by its name, and what the log says."""
import http.client
import json
import re
import socket
import threading

from kvserver import PATIENCE, Server, main

FAMILIES = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


def has(address):
    """Whether the system has it."""
    try:
        with socket.socket(FAMILIES[address]) as s:
            s.bind((address, 0))
        return True
    except OSError:
        return False


def ask(address, port, method="GET", path="/health", body=None):
    c = http.client.HTTPConnection(address, port, timeout=PATIENCE)
    c.request(method, path, body=body, headers={"Content-Type": "application/json"})
    r = c.getresponse()
    out = r.status, r.read()
    c.close()
    return out


def urls(s):
    return [m.group(1) for line in s.lines for m in [re.search(r"listening on (\S+)", line)] if m]


def test_localhost_is_both():
    """The same port of both families; streams and limits are as everywhere."""
    there = [a for a in FAMILIES if has(a)]
    with Server("--host", "localhost", "--parallel", "2", "--connections", "40") as s:
        assert urls(s) == [f"http://localhost:{s.port}"]
        for address in there + ["localhost"]:
            assert ask(address, s.port) == (200, b'{"status":"ok"}'), address
            body = json.dumps({"prompt": "ab", "max_tokens": 5, "stream": True,
                               "logit_bias": {"261": -100}})
            status, data = ask(address, s.port, "POST", "/v1/completions", body)
            assert status == 200 and data.endswith(b"data: [DONE]\n\n"), (address, data)
            assert ask(address, s.port, "POST", "/cache")[0] == 405
        done = []
        crowd = [threading.Thread(target=lambda a=a: done.append(ask(a, s.port)[0]))
                 for a in there * 30]
        for t in crowd:
            t.start()
        for t in crowd:
            t.join()
        assert done == [200] * len(crowd)


def test_connections_are_limited_on_both():
    """Who comes while there is no room waits, and gets in when there is."""
    for address in FAMILIES:
        if not has(address):
            continue
        with Server("--host", "localhost", "--connections", "3") as s:
            held = [socket.create_connection((address, s.port), timeout=PATIENCE)
                    for _ in range(3)]
            for c in held:  # they are in
                c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert c.recv(12) == b"HTTP/1.1 200", address
            late = socket.create_connection((address, s.port), timeout=0.3)
            late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            try:
                assert not late.recv(12), address
                raise AssertionError((address, "it was turned away"))
            except socket.timeout:
                pass
            held.pop().close()
            late.settimeout(PATIENCE)
            assert late.recv(12) == b"HTTP/1.1 200", address
            for c in held + [late]:
                c.close()


def test_a_port_that_somebody_has():
    """Half of localhost would lead clients to somebody else."""
    for address in FAMILIES:
        if not has(address):
            continue
        with socket.socket(FAMILIES[address]) as other:
            other.bind((address, 0))
            other.listen()
            port = other.getsockname()[1]
            try:
                with Server("--host", "localhost", "--port", str(port)):
                    raise AssertionError("it serves beside somebody else")
            except AssertionError as e:
                assert f"--port {port}: another program listens there, choose" in str(e), e
                assert "in use" in str(e), e


def test_addresses_that_are_not_there():
    for host, told in (("192.0.2.1", "no address of this machine, choose another --host"),
                       ("nobody.invalid", "--host nobody.invalid: ")):
        try:
            with Server("--host", host, "--without-key"):
                raise AssertionError(f"it listens on {host}")
        except AssertionError as e:
            assert told in str(e), e


def test_one_address():
    for address in FAMILIES:
        if not has(address):
            continue
        with Server("--host", address) as s:
            host = f"[{address}]" if ":" in address else address
            assert urls(s) == [f"http://{host}:{s.port}"], s.lines
            assert ask(address, s.port)[0] == 200
            other = next(a for a in FAMILIES if a != address)
            try:
                socket.create_connection((other, s.port), timeout=PATIENCE).close()
                raise AssertionError((address, "and", other))
            except OSError:
                pass


if __name__ == "__main__":
    main(globals())
