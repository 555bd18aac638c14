#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How the server ends: told to stop, told twice, a device that fails, a step that hangs, killed;
and what a new one finds of its cache."""
import http.client
import json
import os
import pathlib
import signal
import threading
import time

from kvserver import SLOW, Directory, Server, main, text_of

COMPLETION = "/v1/completions"
FAULT = os.environ["KVDRIVE_FAULT"]
BIAS = {"261": -100}
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


def end(s, seconds):
    start = time.monotonic()
    s.process.wait(seconds * SLOW)
    s.reader.join(5)
    return s.process.returncode, time.monotonic() - start


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
        assert code == 0 and 0.4 < took < 2.5 * SLOW, (code, took)
        assert "stopping" in json.dumps(streamed[1][0][-1]), streamed[1][0][-1]
        assert whole[1][0][0] == 503, whole


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
            assert code == 0 and took < 2.3 * SLOW, (code, took)
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
        assert code == 128 + signal.SIGTERM and took < 1 * SLOW


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


def test_killed_again_and_again():
    """20 times SIGKILL: no named shared memory is used, and no files are left behind."""
    with Directory() as d, Directory() as tmp:
        before = None
        for _ in range(20):
            with Server("--cache-dir", d, env={"TMPDIR": tmp, "SQLITE_TMPDIR": tmp}) as s:
                s.exits = (-signal.SIGKILL,)
                s.post(COMPLETION, {"prompt": "again " * 200, "max_tokens": 2})
                maps = pathlib.Path(f"/proc/{s.process.pid}/maps").read_text()
                assert "/dev/shm" not in maps and "/SYSV" not in maps, maps
                s.process.kill()
                s.process.wait()
            left = (os.listdir(tmp), sorted(os.listdir(d)))
            before = before or left
            assert left == before, (before, left)


def test_memory_fails():
    """Each allocation on a request's way fails once: that request gets an error, or its connection
    ends, and the next one the same answer as ever."""
    ask = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
           "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"],
           "logit_bias": BIAS}
    with Server("--parallel", "2", "--deterministic", program=FAULT) as s:
        want = s.post("/v1/chat/completions", ask)["choices"]
        text = want[0]["message"]["content"]
        n_failed = n_good = 0
        for i in range(2000):
            s.process.send_signal(signal.SIGWINCH)
            time.sleep(0.003)
            stream = i % 2 == 1
            try:
                status, _, data = s.call("POST", "/v1/chat/completions", {**ask, "stream": stream})
                failed = status != 200 or b'"error"' in data
                assert status in (200, 500, 503), (i, status, data)
                assert failed or stream or json.loads(data)["choices"] == want, (i, data)
                if stream and not failed:
                    events = [json.loads(x[6:]) for x in data.decode().split("\n")
                              if x.startswith("data: {")]
                    assert text_of(events) == text and b"[DONE]" in data, (i, data)
            except (ConnectionError, http.client.HTTPException):
                failed = True
                assert s.process.poll() is None, i
            n_failed += failed
            n_good = 0 if failed else n_good + 1
            if n_good == 10:  # a request allocates less often than that
                break
        assert n_good == 10 and n_failed > 20, (n_good, n_failed)
        s.call("POST", "/v1/chat/completions", ask)  # the last one fails here, at the latest
        s.wait_idle(5)
        assert s.post("/v1/chat/completions", ask)["choices"] == want


def test_killed_and_started_again():
    """Same directory after SIGKILL: the conversation goes on, with the text of an unbroken run."""
    with Directory() as d:
        ask = {"prompt": "a long story " * 150, "max_tokens": 30, "logit_bias": BIAS}
        with Server("--deterministic") as s:
            want = s.post(COMPLETION, ask)["choices"]
        with Server("--deterministic", "--cache-dir", d) as s:
            s.exits = (-signal.SIGKILL,)
            assert s.post(COMPLETION, ask)["choices"] == want
            time.sleep(1.0)
            s.process.kill()
            end(s, 5)
        with Server("--deterministic", "--cache-dir", d) as s:
            a = s.post(COMPLETION, {**ask})
            u = a["usage"]
            assert u["prompt_tokens_details"]["cached_by_tier"]["disk"] == u["prompt_tokens"] - 1
            assert a["choices"] == want
            salted = s.post(COMPLETION, {**ask, "cache_salt": "x"})
            assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert salted["choices"] == want
            status, _, data = s.call("DELETE", "/cache")
            assert status == 200 and json.loads(data)["units"] == 0 and \
                json.loads(data)["removed_units"] > 0, data
            a = s.post(COMPLETION, ask)
            assert a["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert a["choices"] == want


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


if __name__ == "__main__":
    main(globals())
