#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Idle sequences belong to what they hold: they stay until memory is asked for, and a prompt finds
them wherever they are."""
import os
import random
import re
import shutil
import signal
import threading

from kvserver import Directory, Server, main

COMPLETION = "/v1/completions"
FAULT = os.environ["KVD_TEST_FAULT"]
BIAS = {"261": -100}


def prompt(name, n):
    """Tokens that no other name has."""
    rng = random.Random(name)
    return [rng.randrange(1, 250) for _ in range(n)]


def ask(s, tokens, n=4, **more):
    return s.post(COMPLETION, {"prompt": tokens, "max_tokens": n, "logit_bias": BIAS, **more})


def known(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_by_tier"]


def consistent(s):
    """The routes that tell of sequences, once nothing runs: lengths by number."""
    s.wait_idle()
    slots = s.slots()
    held = {q["id"]: q["tokens"] for q in slots["slots"] + slots["parked"] if q["tokens"]}
    page = s.get("/map")
    shown = {q["id"]: q["device_tokens"] + q["host_tokens"] + q["disk_tokens"]
             for q in page["sequences"]}
    assert {i: n for i, n in shown.items() if n} == held, (shown, held)
    parked = [q["id"] for q in page["sequences"] if q["state"] == "parked"]
    assert parked == [q["id"] for q in slots["parked"]]
    assert min(parked, default=99) >= len(slots["slots"])
    used = sum(held.values())
    assert page["tokens"]["used"] == used == s.metric("kv_used_tokens")
    assert s.metric("sequences_parked") == len(parked)
    assert sum(-(-n // 256) * 256 for n in held.values()) <= page["tokens"]["capacity"]
    return held


def test_three_chats_in_two_slots():
    with Server("--parallel", "2", ctx=4096) as s:
        for name in "ABC":
            assert sum(known(ask(s, prompt(name, 1600))).values()) == 0
        for name in "ABC":
            answer = ask(s, prompt(name, 1600))
            assert known(answer) == {"device": 1599, "host": 0, "disk": 0}, (name, answer)
        assert sorted(consistent(s).values()) == [1603] * 3


def test_as_many_as_memory_holds():
    """One slot, 16 blocks: 16 conversations of a block stay.  One more takes the place of
    the one that was used least recently, and of no other."""
    with Server("--parallel", "1", ctx=4096) as s:
        for i in range(16):
            ask(s, prompt(i, 200))
        assert sorted(consistent(s).values()) == [203] * 16
        for i in range(15, -1, -1):
            assert known(ask(s, prompt(i, 200)))["device"] == 199, i
        ask(s, prompt("new", 200))
        assert len(consistent(s)) == 16
        for i, n in ((0, 199), (14, 199), (15, 0)):
            assert known(ask(s, prompt(i, 200)))["device"] == n, i
        long = prompt("long", 3800)  # needs all of it but a block
        ask(s, long)
        assert len(consistent(s)) <= 2
        assert s.metric("preemptions_total") == 0
        assert s.call("DELETE", "/cache")[0] == 200
        assert not consistent(s)


def test_conversations_grow():
    """Each turn of three chats in one slot finds all of the prompt of the turn before."""
    with Server("--parallel", "1", "--kv-tokens", "8192", ctx=4096) as s:
        chats = {name: prompt(name, 700) for name in "ABC"}
        for turn in range(3):
            for name, tokens in chats.items():
                want = len(tokens) - 300 if turn else 0
                assert known(ask(s, tokens))["device"] == want, (name, turn)
                chats[name] = tokens + prompt(f"{name}{turn}", 300)
        consistent(s)


def test_salts_keep_them_apart():
    with Server("--parallel", "1", ctx=4096) as s:
        ask(s, prompt("A", 600), cache_salt="x")
        ask(s, prompt("B", 600))
        assert known(ask(s, prompt("A", 600)))["device"] == 0
        assert known(ask(s, prompt("A", 600), cache_salt="x"))["device"] == 599
        assert known(ask(s, prompt("A", 600)))["device"] == 599


def test_below_the_device():
    """With KV in host memory conversations stay, too, but for what is not sealed."""
    with Server("--parallel", "2", "--attention", "sparse", "--budget", "64",
                "--kv-device", "1500K", ctx=4096) as s:
        assert not s.get("/props")["kv_resident"]
        for name in "ABCD":
            ask(s, prompt(name, 1600))
        consistent(s)
        for name in "ABCD":
            got = known(ask(s, prompt(name, 1600)))
            assert got["host"] >= 1600 - 256 - 64, (name, got)
        assert sum(consistent(s).values()) > 4 * 1280


def test_canceled_prompt_goes_on():
    """A client with a time-out that asks again gets further each time, with a cache directory, too,
    where that is small, gone or has the beginning of the prompt alone.  At the time-outs the prompt
    is not sealed as a whole."""
    tokens = prompt("A", 3000)
    for kind in ("none", "plain", "small", "gone"):
        with Directory() as d:
            more = [] if kind == "none" else ["--cache-dir", d]
            more += ["--kv-disk", "40K"] if kind == "small" else []
            with Server("--parallel", "2", "-b", "64", *more, program=FAULT) as s:
                if kind == "gone":
                    shutil.rmtree(d)
                    os.mkdir(d)
                if kind == "plain":
                    ask(s, tokens[:300])
                s.process.send_signal(signal.SIGRTMIN + 11)  # 0.1 ms a token
                at = [303 if kind == "plain" else 0]
                while at[-1] < 2000:
                    c = s.raw_post(COMPLETION, {"prompt": tokens, "max_tokens": 4})
                    s.wait_for(lambda: s.slots()["slots"][0]["tokens"] > at[-1] + 200)
                    c.close()
                    s.wait_idle()
                    at.append(s.slots()["slots"][0]["tokens"])
                    s.wait_for(lambda: len(canceled(s)) == len(at) - 1)
                    line = canceled(s)[-1]
                    got = [int(x) for x in re.search(r"cached (\d+)\+(\d+)\+(\d+), evaluated (\d+)",
                                                     line).groups()]
                    assert abs(sum(got[:3]) - at[-2]) <= 3 and sum(got) == at[-1], (kind, at, line)
                assert sum(known(ask(s, tokens)).values()) == at[-1], kind


def test_best_of_device_and_disk():
    """A prompt takes what is there of it on the device, and what is on disk beyond that."""
    system = prompt("system", 424)
    first, second = system + prompt("u1", 40), system + prompt("u2", 800)
    with Directory() as d:
        with Server("--parallel", "1", "--cache-dir", d) as s:
            ask(s, first)
            assert known(ask(s, second)) == {"device": 424, "host": 0, "disk": 0}
        with Server("--parallel", "1", "--cache-dir", d) as s:
            ask(s, first)
            got = known(ask(s, second + prompt("more", 100)))
            assert got == {"device": 424, "host": 0, "disk": 800}, got
            assert known(ask(s, first))["disk"] + known(ask(s, first))["device"] >= 463
            consistent(s)


def canceled(s):
    return [line for line in s.lines if ", canceled" in line]


def test_canceled_request_is_logged():
    """Its line says route, time and tokens: of a prompt that was cut, of an answer, of one that
    waited."""
    shape = re.compile(r"cmpl-\w+: /v1/completions, canceled by its client, (\d+) ms, prompt (\d+) "
                       r"\(cached (\d+)\+(\d+)\+(\d+), evaluated (\d+)\), generated (\d+)$")
    with Server("--parallel", "1", "-b", "64", program=FAULT) as s:
        s.process.send_signal(signal.SIGRTMIN + 11)  # 0.1 ms a token: 0.3 s for the prompt
        c = s.raw_post(COMPLETION, {"prompt": prompt("A", 3000), "max_tokens": 5})
        s.wait_for(lambda: s.slots()["slots"][0]["tokens"] > 100)
        d = s.raw_post(COMPLETION, {"prompt": prompt("B", 77), "max_tokens": 5})
        s.wait_for(lambda: s.slots()["waiting"] == 1)
        d.close()
        s.wait_for(lambda: len(canceled(s)) == 1)
        c.close()
        s.wait_for(lambda: len(canceled(s)) == 2)
        e = s.raw_post(COMPLETION, {"prompt": prompt("C", 50), "max_tokens": 3000, "stream": True,
                                    "logit_bias": BIAS})
        s.wait_for(lambda: s.slots()["slots"][0]["generated_tokens"] > 3, 30)
        e.close()
        s.wait_for(lambda: len(canceled(s)) == 3)
        waited, cut, answered = [[int(x) for x in shape.search(line).groups()]
                                 for line in canceled(s)]
        assert waited[1:] == [77, 0, 0, 0, 0, 0], waited
        assert cut[1] == 3000 and cut[6] == 0 and 100 <= cut[5] < 3000 and cut[0] >= 10, cut
        assert answered[1] == answered[5] == 50 and answered[6] > 3, answered


def test_random_leaves_and_returns():
    """Conversations of random lengths from several clients, which leave, come back and grow.  What
    was there is found, nothing is mixed up, and in the end all routes agree."""
    rng = random.Random(7)
    names = [f"chat{i}" for i in range(7)]
    lengths = {name: rng.randrange(40, 1500) for name in names}

    def client(s, seed, bad):
        own = random.Random(seed)
        try:
            for _ in range(25):
                name = own.choice(names)
                tokens = prompt(name, lengths[name])[:own.randrange(30, lengths[name] + 1)]
                body = {"prompt": tokens, "max_tokens": own.randrange(1, 40), "logit_bias": BIAS}
                if own.random() < 0.4:
                    c = s.raw_post(COMPLETION, {**body, "stream": own.random() < 0.5})
                    threading.Event().wait(own.random() * 0.02)
                    c.close()
                else:
                    got = s.post(COMPLETION, body)
                    want = wanted[name].get(len(tokens))
                    text = got["choices"][0]["text"]
                    if want is None:
                        wanted[name][len(tokens)] = text
                    else:  # the same prompt is answered alike, wherever its K and V came from
                        n = min(len(text), len(want))
                        assert text[:n] == want[:n], (name, len(tokens))
        except Exception as e:  # pylint: disable=broad-except
            bad.append(e)

    tiers = ("--attention", "sparse", "--budget", "64", "--kv-device", "2M", "--kv-tokens", "12288")
    for more in (("--kv-tokens", "6144"), tiers):
        wanted = {name: {} for name in names}
        with Server("--parallel", "3", "--deterministic", *more) as s:
            assert s.get("/props")["kv_resident"] == (more is not tiers)
            bad = []
            threads = [threading.Thread(target=client, args=(s, i, bad)) for i in range(5)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            assert not bad, bad[0]
            consistent(s)
            if more is not tiers:  # what is there is found whole
                for q in names:
                    ask(s, prompt(q, lengths[q]))
                    n = known(ask(s, prompt(q, lengths[q])))
                    assert sum(n.values()) == lengths[q] - 1, (q, n)


if __name__ == "__main__":
    main(globals())
