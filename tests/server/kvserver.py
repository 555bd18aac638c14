# SPDX-License-Identifier: Apache-2.0
"""A server under test: starts the program over a tiny model, talks to it as clients do, and worse.

Every test file runs its functions test_*; run FILE NAME runs one of them.
"""
import atexit
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
TINY = HERE.parent / "data" / "tiny"
PROGRAM = os.environ.get("KVDRIVE", "kvdrive")
# Sanitizers make everything slower; bounds of time stretch by this.
SLOW = float(os.environ.get("KVD_TEST_SLOW", "1"))
# Seconds that nothing takes that goes on, however busy the machine is.
PATIENCE = 600 * min(SLOW, 2)


def use_clients(name="clients"):
    """Goes on in the Python that scripts/get-clients made; without it the test is skipped."""
    if pathlib.Path(sys.executable).parents[1].name == name:
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    python = os.path.join(cache, "kvdrive", name, "bin/python")
    if not os.path.exists(python):
        print(f"skipped: no {name} (scripts/get-clients)")
        sys.exit(77)
    os.execv(python, [python, *sys.argv])


class Late(AssertionError):
    """A bound of time was missed."""


# Every tenth of a second: wakes up and works for 2 ms of processor time.
UNIT = """
import sys, time
while True:
    due = time.monotonic() + 0.1
    time.sleep(0.1)
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    print((time.monotonic() - due) / 0.002, flush=True)
"""


class Pace:
    """How many times longer than alone the machine takes for something: 1 when it is idle.
    Measured by a process beside the test, all the time, since neighbours come and go."""

    def __init__(self):
        self.seen = [(time.monotonic(), 1.0)]  # (when, how many times)
        self.process = subprocess.Popen([sys.executable, "-c", UNIT], stdout=subprocess.PIPE)
        threading.Thread(target=self.follow, daemon=True).start()
        atexit.register(self.process.kill)

    def follow(self):
        for line in self.process.stdout:
            self.seen = self.seen[-5000:] + [(time.monotonic(), max(1.0, float(line)))]

    def during(self, seconds):
        """The most within the last seconds, and one before."""
        begin = time.monotonic() - seconds - 1
        return max([x for at, x in self.seen if at >= begin] or [self.seen[-1][1]])


    def typical(self, seconds):
        """The median of the last seconds."""
        begin = time.monotonic() - seconds
        return statistics.median([x for at, x in self.seen if at >= begin] or [self.seen[-1][1]])


PACE = None


def busy_for(seconds):
    """How many times longer than alone things mostly took in the last seconds."""
    return PACE.typical(seconds) if PACE else 1.0


def limit_of(limit, seconds):
    """A bound of time as it is on this machine, which has been so busy for the last seconds."""
    return limit * SLOW * (PACE.during(seconds) if PACE else 1)


def pause(seconds):
    """Time for what goes on beside requests, as storing does; more of it on a busy machine."""
    time.sleep(limit_of(seconds, 1))


def in_time(took, limit, *what):
    """Seconds that it took are below the limit."""
    bound = limit_of(limit, took)
    if not took < bound:
        raise Late(f"{took:.3f} s, not {limit} s ({bound:.3f} s here)", *what)


class Server:
    """kvdrive serve on a free port; stopped when the block is left."""

    def __init__(self, *args, model="llama", env=None, program=None, ctx=4000):
        command = [program or PROGRAM, "serve", "-m", str(TINY / f"{model}.gguf"), "--port", "0",
                   "--rope-scaling", "linear", "--rope-scale", "64", "-c", str(ctx), "-t", "2",
                   "--chat-template", str(HERE / "data" / "chatml.jinja"), "--temp", "0", *args]
        self.lines = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                                        env={**os.environ, **(env or {})})
        self.port = None
        self.up = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            found = re.search(r"listening on http://[^ \"]*:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                self.up.set()
        self.up.set()

    def __enter__(self):
        self.up.wait(PATIENCE)
        if self.port is None:
            self.process.kill()
            raise AssertionError("the server did not start: " + "\n".join(self.lines))
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        self.reader.join(10)
        if kind is not None:
            print("\n".join(self.lines[-30:]), file=sys.stderr)
        elif self.process.returncode not in self.exits:
            raise AssertionError(f"exit {self.process.returncode}: " + "\n".join(self.lines[-30:]))

    exits = (0,)

    # -- calls ---------------------------------------------------------------------------

    def call(self, method, path, body=None, headers=None, timeout=PATIENCE):
        """(status, headers, bytes)"""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        c.request(method, path, body=body, headers={"Content-Type": "application/json",
                                                    **(headers or {})})
        r = c.getresponse()
        data = r.read()
        c.close()
        return r.status, r.headers, data

    def post(self, path, body, want=200, **kw):
        status, _, data = self.call("POST", path, body, **kw)
        assert status == want, (status, data[:400])
        return json.loads(data)

    def get(self, path, want=200, **kw):
        status, _, data = self.call("GET", path, **kw)
        assert status == want, (status, data[:400])
        return json.loads(data)

    def error(self, path, body, field, want=400):
        """The answer is an error that names the field."""
        e = self.post(path, body, want=want)["error"]
        assert e["param"] == field, (body, e)
        assert e["message"] and e["type"], e
        return e

    def stream(self, path, body, **kw):
        """Every event's data, as it arrives: objects, then "[DONE]"."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        c.request("POST", path, body=json.dumps({**body, "stream": True}),
                  headers={"Content-Type": "application/json"})
        r = c.getresponse()
        assert r.status == 200, r.read()
        assert r.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for line in r:
            line = line.decode().rstrip("\n")
            if line.startswith("data: "):
                data = line[6:]
                yield data if data == "[DONE]" else json.loads(data)
            else:
                assert line == "" or line.startswith((":", "event: ")), line
        c.close()

    def raw(self, data=b""):
        s = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        s.sendall(data)
        return s

    def raw_post(self, path, body, more=""):
        text = json.dumps(body).encode()
        return self.raw(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}"
                        f"Content-Length: {len(text)}\r\n\r\n".encode() + text)

    def metric(self, name, labels=""):
        """Of /metrics: kvdrive_NAME, with labels as they stand there between braces."""
        start = f"kvdrive_{name}" + (f"{{{labels}}}" if labels else "") + " "
        text = self.call("GET", "/metrics")[2].decode()
        return float(next(l for l in text.splitlines() if l.startswith(start))[len(start):])

    def slots(self):
        return self.get("/slots")

    def wait_idle(self, seconds=1.0):
        """Until no slot runs and nobody waits; it must come within so many seconds."""
        start = time.monotonic()
        while True:
            s = self.slots()
            if s["running"] == 0 and s["waiting"] == 0:
                return
            took = time.monotonic() - start
            if took >= limit_of(seconds, took):
                raise Late(f"not idle after {seconds} s", s)
            time.sleep(0.01)

    def wait_for(self, what, seconds=None):
        """Until it is so; a bound of time, where one is given, is what is tested."""
        start = time.monotonic()
        while not what():
            took = time.monotonic() - start
            if seconds is None and took >= PATIENCE:
                raise AssertionError("it did not come")
            if seconds is not None and took >= limit_of(seconds, took):
                raise Late(f"it did not come within {seconds} s")
            time.sleep(0.005)

    def rss_kib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1))

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def text_of(events):
    """Text of one choice of a stream of /v1/completions or chat chunks."""
    out = ""
    for e in events:
        if e == "[DONE]":
            continue
        for c in e["choices"]:
            out += c["text"] if "text" in c else c["delta"].get("content", "")
    return out


class Directory:
    """A temporary directory."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="kvd-server-")
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path)


TRIES = 4


def one_in_time(name, function):
    for i in range(1, TRIES + 1):
        try:
            return function()
        except Late as e:
            print(f"late {name}, {i}. time: {e}", flush=True)
            if i == TRIES:
                raise


def main(tests):
    """Runs functions named test_* of a module's globals, or those that arguments name.  Neighbours
    on the machine may stop us for longer than PACE sees: one of TRIES must keep a bound of time."""
    global PACE
    PACE = Pace()
    signal.alarm(int(1700 * min(SLOW, 2) + float(os.environ.get("KVD_FUZZ_SECONDS", "0"))))
    wanted = sys.argv[1:]
    failed = 0
    for name, function in list(tests.items()):
        if not name.startswith("test_") or (wanted and name not in wanted):
            continue
        start = time.monotonic()
        try:
            one_in_time(name, function)
            print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as e:  # one failure does not hide the others
            failed += 1
            import traceback
            traceback.print_exc()
            print(f"FAIL {name}: {e}", flush=True)
    sys.exit(1 if failed else 0)
