#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What slots hold is given up for what it costs: not what one in the queue is about to use."""
import os
import threading

from kvserver import Server, main

COMPLETION = "/v1/completions"
FAULT = os.environ["KVDRIVE_FAULT"]
BIAS = {"261": -100}
MINE, OTHERS, NEW = [67] * 600, [80] * 1000, [71] * 300


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


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
        assert max(w["generated_tokens"] for w in s.slots()["slots"]) < 350, s.slots()
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


if __name__ == "__main__":
    main(globals())
