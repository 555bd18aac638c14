#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What slots hold is given up for what it costs: not what one in the queue is about to use."""
import json
import os
import threading

from kvserver import Directory, Server, main

COMPLETION = "/v1/completions"
FAULT = os.environ["KVD_TEST_FAULT"]
BIAS = {"261": -100}
MINE, OTHERS, NEW, LARGE = [67] * 600, [80] * 1000, [71] * 300, [71] * 3500


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def by_tier(c):
    """Of a whole answer; the connection ends with it."""
    data = b""
    while more := c.recv(65536):
        data += more
    c.close()
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), data
    return json.loads(body)["usage"]["prompt_tokens_details"]["cached_by_tier"]


def disk_bytes(s):
    return int(s.metric("kv_used_bytes", 'tier="disk"'))


def queue_of_two(last):
    """Two slots become idle together, the smaller with MINE; NEW waits, and behind it `last`."""
    with Server("--parallel", "2", program=FAULT) as s:
        both = s.raw_post(COMPLETION, {"prompt": [MINE, OTHERS], "max_tokens": 2900, "stream": True,
                                       "logit_bias": BIAS})
        s.wait_for(lambda: all(w["generated_tokens"] > 2 for w in s.slots()["slots"]), 30)
        got = {}

        def ask(name, prompt):
            got[name] = cached(s.post(COMPLETION, {"prompt": prompt, "max_tokens": 3,
                                                   "logit_bias": BIAS}))

        threads = []
        for i, (name, prompt) in enumerate((("new", NEW), ("last", last))):
            threads.append(threading.Thread(target=ask, args=(name, prompt)))
            threads[-1].start()
            s.wait_for(lambda n=i: s.slots()["waiting"] == n + 1)
        both.close()
        for t in threads:
            t.join()
        return got


def test_the_queue_keeps_its_prefix():
    """By size and age the first in the queue would take the slot that the second has a use for."""
    got = queue_of_two(MINE + [90] * 5)
    assert got == {"new": 0, "last": len(MINE)}, got


def test_the_other_way_round():
    """Where that is the other one, it takes what it would."""
    got = queue_of_two(OTHERS[:400] + [90] * 5)
    assert got == {"new": 0, "last": 400}, got


def test_goes_first_rather_than_lose_it():
    """The first needs the memory of a sequence that is of use to some behind it: they go before it,
    but not for ever.  What the prefix cache has is not lost, so nobody does then."""
    n_last = 12
    for more, passed in (((), 8), (("--cache-dir",), 0)):
        with Directory() as d, \
                Server("--parallel", "1", "--kv-tokens", "4096", *more, *[d for _ in more],
                       program=FAULT) as s:
            held = s.raw_post(COMPLETION, {"prompt": MINE, "max_tokens": 2900, "stream": True,
                                           "logit_bias": BIAS})
            s.wait_for(lambda: s.slots()["slots"][0]["generated_tokens"] > 2, 30)
            asks = []
            for i, prompt in enumerate([LARGE] + [MINE + [90 + k] * 5 for k in range(n_last)]):
                asks.append(s.raw_post(COMPLETION, {"prompt": prompt, "max_tokens": 2,
                                                    "logit_bias": BIAS}, "Connection: close\r\n"))
                s.wait_for(lambda n=i: s.slots()["waiting"] == n + 1)
            held.close()
            found = [by_tier(c)["device"] for c in asks]
            # whoever came behind LARGE has found nothing there, the others have
            assert found == [0] + [600] * passed + [0] + [600] * (n_last - passed - 1), found


def test_disk_keeps_what_the_queue_needs():
    """The files have room for some prompts.  One of the oldest is asked for again, behind many new
    ones: it is still there when its turn comes."""
    def ask(i, n):
        return {"prompt": [70 + i] * n, "max_tokens": 2, "logit_bias": BIAS}

    with Directory() as d:
        with Server("--cache-dir", d) as s:
            s.post(COMPLETION, ask(0, 600))
            s.call("DELETE", "/cache")
            s.post(COMPLETION, ask(0, 600))
        with Server("--cache-dir", d) as s:  # all of it is on disk once a server has ended
            one = disk_bytes(s)
        with Server("--cache-dir", d, "--kv-disk", str(3 * one + one // 2), "--parallel", "1",
                    program=FAULT) as s:
            held = s.raw_post(COMPLETION, {"prompt": [66], "max_tokens": 2000, "stream": True,
                                           "logit_bias": BIAS})
            s.wait_for(lambda: s.slots()["running"] == 1)
            asks = []
            for i in [*range(1, 9), 0, 1]:
                asks.append(s.raw_post(COMPLETION, ask(i, 600), "Connection: close\r\n"))
                s.wait_for(lambda n=len(asks): s.slots()["waiting"] == n)
            steps = s.metric("steps_total")  # what waits is looked at before a step, one in each
            s.wait_for(lambda: s.metric("steps_total") > steps + len(asks))
            held.close()
            found = [by_tier(c)["disk"] for c in asks]
            assert found[8] == 599 and sum(found) == 599, found
            held = s.raw_post(COMPLETION, {"prompt": [66], "max_tokens": 2000, "stream": True,
                                           "logit_bias": BIAS})
            s.wait_for(lambda: s.slots()["running"] == 1)
            last = s.raw_post(COMPLETION, ask(0, 600), "Connection: close\r\n")
            s.wait_for(lambda: s.slots()["waiting"] == 1)
            assert s.call("DELETE", "/cache")[0] == 200  # that is for all
            held.close()
            assert by_tier(last)["disk"] == 0


if __name__ == "__main__":
    main(globals())
