#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the server ends: told to stop, told twice, a device that fails, a step that hangs, killed;
and what a new one finds of its cache."""
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time

from kvserver import HERE, PATIENCE, PROGRAM, TINY, Directory, Late, Server, in_time, main, text_of

COMPLETION = "/v1/completions"
FAULT = os.environ["KVD_TEST_FAULT"]
BIAS = {"261": -100}
LONG_TEXT = "a long story " * 150
LONG = {"prompt": [67] * 50, "max_tokens": 3500, "logit_bias": BIAS}


def in_thread(function):
    out = []

    def run():
        try:
            out.append(function())
        except Exception as e:
            out.append(e)

    t = threading.Thread(target=run)
    t.start()
    return t, out


def hang(s):
    """A request whose step hangs, until SIGUSR1 comes and it fails."""
    out = in_thread(lambda: s.call("POST", COMPLETION, LONG))
    s.wait_for(lambda: s.slots()["running"] == 1)
    s.process.send_signal(signal.SIGUSR2)
    time.sleep(0.1)
    return out


def end(s, seconds):
    start = time.monotonic()
    s.process.wait(PATIENCE)
    took = time.monotonic() - start
    s.reader.join(PATIENCE)
    in_time(took, seconds)
    return s.process.returncode, took


def test_stop_lets_requests_finish():
    with Server(program=FAULT) as s:
        t, out = in_thread(lambda: list(s.stream(COMPLETION, {**LONG, "max_tokens": 300})))
        s.wait_for(lambda: s.slots()["running"] == 1)
        s.process.terminate()
        time.sleep(0.1)
        try:
            s.raw()
            raise AssertionError("it still listens")
        except ConnectionRefusedError:
            pass
        code, took = end(s, 10)
        t.join()
        assert code == 0 and out[0][-1] == "[DONE]", (code, out)
        assert len(text_of(out[0]).encode()) >= 300


def test_stop_cancels_after_grace():
    with Server("--grace", "0.5", "--parallel", "1", program=FAULT) as s:
        streamed = in_thread(lambda: list(s.stream(COMPLETION, LONG)))
        s.wait_for(lambda: s.slots()["running"] == 1)
        whole = in_thread(lambda: s.call("POST", COMPLETION, LONG))
        s.wait_for(lambda: s.slots()["waiting"] == 1)
        s.process.terminate()
        code, took = end(s, 10)
        for t, _ in (streamed, whole):
            t.join()
        assert code == 0 and 0.4 < took, (code, took)
        in_time(took, 2.5)
        assert "stopping" in json.dumps(streamed[1][0][-1]), streamed[1][0][-1]
        assert whole[1][0][0] == 503, whole


def test_stop_with_a_call_at_work():
    """A worker still waits for the engine when the time to stop is over."""
    with Server("--grace", "0", program=FAULT) as s:
        hung = hang(s)
        cleared = in_thread(lambda: s.call("DELETE", "/cache"))
        time.sleep(0.2)
        s.process.terminate()
        time.sleep(2.0)
        s.process.send_signal(signal.SIGUSR1)
        code, took = end(s, 10)
        for t, _ in (hung, cleared):
            t.join()
        assert code == 0, code


def known_on_disk(d, ask, want):
    """A new server finds all but the last token of a prompt, and says the same."""
    with Server("--cache-dir", d, "--deterministic") as s:
        a = s.post(COMPLETION, ask)
        cached = a["usage"]["prompt_tokens_details"]["cached_by_tier"]["disk"]
        assert cached == a["usage"]["prompt_tokens"] - 1, a["usage"]
        assert a["choices"] == want


def test_stop_flushes():
    """What was evaluated just before the signal, and what the grace period cut off, is on disk."""
    ask = {"prompt": "said at the last moment " * 50, "max_tokens": 4, "logit_bias": BIAS}
    with Directory() as d:
        with Server("--cache-dir", d, "--deterministic", "--grace", "0.3", program=FAULT) as s:
            t, out = in_thread(lambda: list(s.stream(COMPLETION, LONG)))
            s.wait_for(lambda: s.slots()["running"] == 1)
            want = s.post(COMPLETION, ask)["choices"]
            s.process.terminate()
            code, took = end(s, 10)
            t.join()
            assert code == 0, code
            in_time(took, 2.3)
        known_on_disk(d, ask, want)


def test_second_signal_ends_at_once():
    with Server(program=FAULT) as s:
        s.exits = (128 + signal.SIGTERM,)
        t, out = in_thread(lambda: list(s.stream(COMPLETION, LONG)))
        s.wait_for(lambda: s.slots()["running"] == 1)
        s.process.terminate()
        time.sleep(0.1)
        s.process.terminate()
        code, took = end(s, 5)
        t.join()
        assert code == 128 + signal.SIGTERM, code
        in_time(took, 1)


def broken(s, sig, seconds):
    """After the signal: health 503 within a second, requests get errors, the program ends."""
    streamed = in_thread(lambda: list(s.stream(COMPLETION, LONG)))
    whole = in_thread(lambda: s.call("POST", COMPLETION, LONG))
    s.wait_for(lambda: s.slots()["running"] == 2)
    s.process.send_signal(sig)
    s.wait_for(lambda: s.call("GET", "/health")[0] == 503, seconds)
    code, took = end(s, 10)
    for t, _ in (streamed, whole):
        t.join()
    assert code == 1, code
    assert "error" in streamed[1][0][-1], streamed[1][0][-1]
    assert whole[1][0][0] in (500, 503), whole
    json.loads(whole[1][0][2])


def test_device_fails():
    with Directory() as d:
        ask = {"prompt": "what was known " * 60, "max_tokens": 4, "logit_bias": BIAS}
        with Server("--cache-dir", d, program=FAULT) as s:
            s.exits = (1,)
            want = s.post(COMPLETION, ask)
            time.sleep(1.0)  # stored blocks are flushed while it is idle
            broken(s, signal.SIGUSR1, 1)
            assert any("device has failed" in line for line in s.lines)
        with Server("--cache-dir", d) as s:  # the store is as it was
            a = s.post(COMPLETION, ask)
            n = a["usage"]["prompt_tokens"]
            assert a["usage"]["prompt_tokens_details"]["cached_by_tier"]["disk"] == n - 1
            assert a["choices"] == want["choices"]


def test_requests_of_the_failing_step():
    """All that the queue takes while a step runs are told when it fails."""
    n = 100
    with Server("--parallel", "1", "--queue", str(n), program=FAULT) as s:
        s.exits = (1,)
        calls = [hang(s)]
        calls += [in_thread(lambda: s.call("POST", COMPLETION, {"prompt": "x", "max_tokens": 1}))
                  for _ in range(n)]
        s.wait_for(lambda: s.slots()["waiting"] == n)
        assert s.call("POST", COMPLETION, {"prompt": "x"})[0] == 429
        s.process.send_signal(signal.SIGUSR1)
        for t, out in calls:
            t.join()
            status, _, data = out[0]
            assert status in (500, 503) and b"device has failed" in data, out
        assert end(s, 10)[0] == 1


def test_step_hangs():
    ask = {"prompt": "what was known " * 60, "max_tokens": 4, "logit_bias": BIAS}
    with Directory() as d:
        with Server("--stall-timeout", "1", "--cache-dir", d, "--deterministic",
                    program=FAULT) as s:
            s.exits = (1,)
            want = s.post(COMPLETION, ask)["choices"]
            time.sleep(1.0)  # stored blocks are flushed while it is idle
            broken(s, signal.SIGUSR2, 3)
        known_on_disk(d, ask, want)


def stopped(s, seconds):
    """Ctrl-Z, and fg so much later."""
    s.process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    s.process.send_signal(signal.SIGCONT)


def test_time_of_a_stop_does_not_count():
    """A process that was stopped for longer than its limits finds no step hung, no client slow or
    idle, and no grace over.  The limits hold as ever then."""
    with Server("--stall-timeout", "2.5", "--idle-timeout", "2.5", "--read-timeout", "2.5",
                "--grace", "2.5", program=FAULT) as s:
        s.process.send_signal(signal.SIGRTMIN + 15)  # 0.5 ms a token: 0.25 s a step
        ask = {"prompt": [67] * 3000, "max_tokens": 3, "logit_bias": BIAS}
        idle, half = s.raw(), s.raw(b"GET /health HTTP/1.1\r\nHost: loc")
        t, out = in_thread(lambda: s.call("POST", COMPLETION, ask))
        s.wait_for(lambda: s.slots()["running"] == 1)
        stopped(s, 3)
        half.sendall(b"alhost\r\n\r\n")
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for c in (half, idle):
            if c.recv(12) != b"HTTP/1.1 200":
                raise Late("a client had no more time after the stop")
            c.close()
        late = s.raw(b"GET")
        start = time.monotonic()
        assert late.recv(12) == b""
        assert time.monotonic() - start > 2
        late.close()
        t.join()
        assert out[0][0] == 200 and not any("--stall-timeout" in x for x in s.lines), out
        t, out = in_thread(lambda: s.call("POST", COMPLETION, {**ask, "prompt": [68] * 3000}))
        s.wait_for(lambda: s.slots()["running"] == 1)
        s.process.terminate()
        s.wait_for(lambda: any("stopping" in x for x in s.lines))
        stopped(s, 3)
        t.join()
        assert out[0][0] in (200, 503), out
        assert end(s, 10)[0] == 0


def test_end_of_the_terminal():
    """SIGHUP ends the server as SIGTERM does, unless nohup has it ignored."""
    with Server(program=FAULT) as s:
        t, out = in_thread(lambda: list(s.stream(COMPLETION, {**LONG, "max_tokens": 300})))
        s.wait_for(lambda: s.slots()["running"] == 1)
        s.process.send_signal(signal.SIGHUP)
        code, _ = end(s, 10)
        t.join()
        assert code == 0 and out[0][-1] == "[DONE]" and s.lines[-1].endswith("stopped"), s.lines
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does: programs inherit it
    try:
        with Server() as s:
            s.process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert s.get("/health") == {"status": "ok"}
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_end_of_the_terminal_of_others():
    """Commands that do not serve end by SIGHUP as by SIGTERM: at once, whatever they do."""
    for sig in (signal.SIGTERM, signal.SIGHUP):
        for command in (["run", "-f", "-"], ["perplexity", "-f", "-"],
                        ["chat", "--chat-template", str(HERE / "data" / "chatml.jinja")]):
            p = subprocess.Popen([PROGRAM, *command, "-m", str(TINY / "llama.gguf"), "-c", "100"],
                                 stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            time.sleep(0.2)
            p.send_signal(sig)
            p.stdin.close()
            assert p.wait(PATIENCE) == -sig, command


def told_of(path, body):
    """The part of a whole answer that is the same each time."""
    if path == "/v1/responses":
        return [item["content"] for item in body["output"]]
    if path == "/v1/messages":
        return [{**block, "id": None} for block in body["content"]]
    return body["choices"]


def check_stream(path, data, want, i):
    """A stream that tells of no error tells all."""
    events = [json.loads(x[6:]) for x in data.decode().split("\n") if x.startswith("data: {")]
    if path == "/v1/messages":
        deltas = [e["delta"] for e in events if "delta" in e]
        if want[0]["type"] == "text":
            assert "".join(d.get("text", "") for d in deltas) == want[0]["text"], (i, data)
        else:
            args = "".join(d.get("partial_json", "") for d in deltas)
            assert json.loads(args) == want[0]["input"], (i, data)
        assert events[-1]["type"] == "message_stop", (i, data)
    elif path == "/v1/responses":
        assert told_of(path, events[-1]["response"]) == want, (i, data)
    else:
        assert text_of(events) == want[0]["message"]["content"] and b"[DONE]" in data, (i, data)


def memory_fails(path, ask, odd_streams):
    with Server("--parallel", "2", "--deterministic", "--chat-template",
                str(HERE / "data" / "hermes.jinja"), program=FAULT) as s:
        want = told_of(path, s.post(path, ask))
        n_failed = n_good = 0
        for i in range(2000):
            s.process.send_signal(signal.SIGWINCH)
            time.sleep(0.003)
            stream = i % 2 == odd_streams
            try:
                status, _, data = s.call("POST", path, {**ask, "stream": stream})
                failed = status != 200 or b'"error":{' in data
                assert status in (200, 500, 503), (i, status, data)
                assert failed or stream or told_of(path, json.loads(data)) == want, (i, data)
                if stream and not failed:
                    check_stream(path, data, want, i)
            except (ConnectionError, http.client.HTTPException):
                failed = True
                assert s.process.poll() is None, i
            n_failed += failed
            n_good = 0 if failed else n_good + 1
            if n_good == 10:  # a request allocates less often than that
                break
        assert n_good == 10 and n_failed > 20, (path, n_good, n_failed)
        s.call("POST", path, ask)  # the last one fails here, at the latest
        s.wait_idle(5)
        assert told_of(path, s.post(path, ask)) == want


def test_memory_fails():
    """Each allocation on a request's way fails once, streamed or not: that request gets an error,
    or its connection ends, and the next one the same answer as ever."""
    hello = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    for odd_streams in (True, False):
        memory_fails("/v1/chat/completions", {
            "messages": hello, "max_tokens": 5, "logprobs": True, "top_logprobs": 2,
            "stop": ["zzz"], "logit_bias": BIAS}, odd_streams)
        memory_fails("/v1/messages", {"messages": hello, "max_tokens": 5, "logit_bias": BIAS},
                     odd_streams)
        memory_fails("/v1/responses", {"input": "hello", "max_output_tokens": 5,
                                       "logit_bias": BIAS}, odd_streams)
    # It allocates most, so each of its allocations fails in one way only.
    memory_fails("/v1/messages", {
        "messages": hello, "max_tokens": 60, "tools": [{
            "name": "f", "strict": True, "input_schema": {
                "type": "object", "additionalProperties": False, "required": ["a"],
                "properties": {"a": {"enum": ["one", "two"]}}}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "logit_bias": {"9": -100, "10": -100, "13": -100, "32": -100}}, True)


def test_killed_and_started_again():
    """Same directory after SIGKILL: the conversation goes on, with the text of an unbroken run."""
    with Directory() as d:
        ask = {"prompt": LONG_TEXT, "max_tokens": 30, "logit_bias": BIAS}
        ask_chat = {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 2}
        with Server("--deterministic") as s:
            want = s.post(COMPLETION, ask)["choices"]
        with Server("--deterministic", "--cache-dir", d) as s:
            s.exits = (-signal.SIGKILL,)
            assert s.post(COMPLETION, ask)["choices"] == want
            s.post("/v1/messages", ask_chat)
            time.sleep(1.0)
            s.process.kill()
            end(s, 5)
        with Server("--deterministic", "--cache-dir", d) as s:
            a = s.post(COMPLETION, {**ask})
            u = a["usage"]
            assert u["prompt_tokens_details"]["cached_by_tier"]["disk"] == u["prompt_tokens"] - 1
            assert a["choices"] == want
            a = s.post("/v1/messages", ask_chat)  # the other shapes say where it was, too
            u = a["usage"]
            assert u["cached_by_tier"]["disk"] == u["cache_read_input_tokens"] > 1000
            a = s.post("/v1/responses", {"input": LONG_TEXT, "max_output_tokens": 2})
            u = a["usage"]["input_tokens_details"]
            assert u["cached_by_tier"]["device"] == u["cached_tokens"] > 1000
            salted = s.post(COMPLETION, {**ask, "cache_salt": "x"})
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert salted["choices"] == want
            status, _, data = s.call("DELETE", "/cache")
            assert status == 200 and json.loads(data)["units"] == 0 and \
                json.loads(data)["removed_units"] > 0, data
            a = s.post(COMPLETION, ask)
            assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert a["choices"] == want


def mapped_or_open(pid, *beginnings):
    """Names of what a process has mapped or open, if they begin so."""
    names = [line.split(maxsplit=5)[5] for line in open(f"/proc/{pid}/maps")
             if len(line.split(maxsplit=5)) == 6]
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return [n.strip() for n in names if n.startswith(beginnings)]


def test_killed_leaves_nothing():
    """20 times: killed in an answer, or stopped.  It has no shared memory that has a name, so none
    is left; no files but those of its cache, which do not become more with the same request."""
    ask = {"prompt": "the same again " * 60, "max_tokens": 40, "ignore_eos": True, "stream": True}
    with Directory() as d, Directory() as cache:
        env = {"TMPDIR": d, "TMP": d, "TEMP": d}
        n_file = []
        for i in range(20):
            with Server("--cache-dir", cache, program=FAULT, env=env) as s:
                s.exits = (0, -signal.SIGKILL)
                c = s.raw_post(COMPLETION, ask)
                assert c.recv(100)
                s.wait_for(lambda: s.slots()["running"] == 1)
                time.sleep(0.01 * (i % 4))
                found = mapped_or_open(s.process.pid, "/dev/shm", "/SYSV", d)
                found = [n for n in found if "/tsan." not in n]  # the sanitizer's own
                assert not found, found
                assert mapped_or_open(s.process.pid, cache)  # it would be seen
                if i % 5:
                    s.process.kill()
                c.close()
            assert os.listdir(d) == [], os.listdir(d)
            n_file.append(sum(len(files) for _, _, files in os.walk(cache)))
        assert n_file[-1] <= n_file[0] + 1, n_file  # of 64 MiB


def test_tiers():
    """Less device memory than the context takes: the same text, and the host's part is told."""
    with Server("--deterministic", "--parallel", "2") as s:
        ask = [{"prompt": "tiers %d " % i * 180, "max_tokens": 20, "logit_bias": BIAS}
               for i in range(3)]
        want = [s.post(COMPLETION, a)["choices"] for a in ask]
    with Server("--deterministic", "--parallel", "2", "--kv-device", "1500K") as s:
        assert s.get("/props")["kv_resident"] is False
        assert [s.post(COMPLETION, a)["choices"] for a in ask] == want
        a = s.post(COMPLETION, ask[2])
        assert a["choices"] == want[2]
        assert a["usage"]["prompt_tokens_details"]["cached_by_tier"]["host"] > 0
        # a long prompt alone goes in parts: it tells how far it is, and can be left
        long = {"prompt": [72] * 3900, "max_tokens": 2, "stream": True, "return_progress": True}
        events = [e for e in s.stream(COMPLETION, long) if e != "[DONE]"]
        done = [e["prompt_progress"]["processed"] for e in events if "prompt_progress" in e]
        assert done and done[-1] == 3900 and done == sorted(done), events
        c = s.raw_post(COMPLETION, {**long, "cache_salt": "other"})
        told = b""
        while b"prompt_progress" not in told:
            told += c.recv(4096)
        c.close()
        s.wait_idle()
        assert s.post(COMPLETION, ask[2])["choices"] == want[2]


def test_cache_directory_is_removed():
    """It is noticed while nothing is asked for, said in /health and the log, and got over: at once
    by DELETE /cache, which removes nothing of what is gone."""
    with Directory() as parent:
        d = os.path.join(parent, "cache")
        with Server("--cache-dir", d) as s:
            ask = {"prompt": list(range(40, 240)) * 3, "max_tokens": 1}
            s.post("/v1/completions", ask)
            assert s.get("/health") == {"status": "ok"}
            shutil.rmtree(d)
            s.wait_for(lambda: "cache" in s.get("/health"), 20)
            health = s.get("/health")
            assert health["status"] == "ok" and health["cache"] == "paused", health
            assert "the cache directory was removed" in health["cache_error"], health
            assert any("the cache directory was removed" in x for x in s.lines), s.lines[-5:]
            s.post("/v1/completions", ask)  # requests are answered all the same
            os.mkdir(d, 0o700)
            status, _, data = s.call("DELETE", "/cache")
            assert status == 200 and json.loads(data) == {
                "removed_units": 0, "removed_bytes": 0, "units": 0, "bytes": 0}, data
            s.wait_for(lambda: s.get("/health") == {"status": "ok"}, 20)
            assert any("the cache directory is back" in x for x in s.lines), s.lines[-5:]
            s.post("/v1/completions", ask)
            s.wait_for(lambda: any(x.endswith(".kvd") for x in os.listdir(d)), 20)
            status, _, data = s.call("DELETE", "/cache")
            assert status == 200 and json.loads(data)["removed_units"] > 0, data


if __name__ == "__main__":
    main(globals())
