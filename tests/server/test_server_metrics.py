#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""/metrics: its form, and that its numbers are those of the requests that were made."""
import json
import os
import pathlib
import re
import subprocess
import time

import promlint
from kvserver import HERE, PATIENCE, PROGRAM, TINY, Directory, Server, main

COMPLETION = "/v1/completions"
FAULT = os.environ["KVD_TEST_FAULT"]
BIAS = {"261": -100}
ENDLESS = {"prompt": [67] * 50, "max_tokens": 3500, "logit_bias": BIAS, "stream": True}


def scrape(s):
    """{"name{label=value,...}" without the prefix: number}; the form is checked each time."""
    status, headers, data = s.call("GET", "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    out = {}
    for family, f in promlint.read(data.decode()).items():
        assert family.startswith("kvdrive_")
        for (name, labels), value in f.samples.items():
            inner = ",".join(f"{k}={v}" for k, v in labels)
            out[name[8:] + (f"{{{inner}}}" if inner else "")] = value
    return out


def settled(s, name, value):
    """Numbers once one of them is what it should be: they are copied between steps."""
    got = {}

    def there():
        got.update(scrape(s))
        return got[name] == value

    try:
        s.wait_for(there, 5)
    except AssertionError:
        raise AssertionError((name, value, got[name])) from None
    return got


def test_linter_refuses():
    good = ('# HELP a_total x\n# TYPE a_total counter\na_total{l="q\\"\\\\\\n"} 1\n'
            '# HELP h x\n# TYPE h histogram\nh_bucket{le="1"} 1\nh_bucket{le="+Inf"} 2\n'
            'h_sum 3.5\nh_count 2\n')
    f = promlint.read(good)
    assert f["a_total"].samples == {("a_total", (("l", 'q"\\\n'),)): 1.0}
    bad = (("# HELP a_total x\n", ""), ("# TYPE a_total counter\n", ""),
           ("# TYPE a_total counter", "# TYPE a_total count"),
           ("a_total{", "a-total{"), ("a_total", "a"), ('\\"', '"'), ('\\\\', '\\x'),
           ('"} 1\n', '"} one\n'), ('"} 1\n', '"} -1\n'), ('"} 1\n', '"} 1 \n'),
           ("# HELP h x\n", "a_total 1\n# HELP h x\na_total 2\n"),
           ("# HELP h x\n", "# HELP h x\n# HELP h x\n"), ('le="1"} 1', 'le="1"} 3'),
           ('h_bucket{le="+Inf"} 2\n', ""), ("h_sum 3.5\n", ""), ("h_count 2", "h_count 1"),
           ("h_count 2\n", "h_count 2"), ("h_count 2\n", "h_count 2\nh 1\n"),
           ('le="+Inf"} 2\n', 'le="+Inf"} 2\nh_bucket{le="+Inf"} 2\n'))
    for old, new in bad:
        assert old in good, old
        try:
            promlint.read(good.replace(old, new))
        except ValueError:
            continue
        raise AssertionError(("this passes", old, new))


def test_names_are_escaped():
    with Server("--alias", 'a "b" \\c') as s:
        assert any('model=a-"b"-\\c' in n for n in scrape(s))


def test_counts_move():
    with Server("--parallel", "2") as s:
        zero = scrape(s)
        for name in ("requests_started_total", "prompt_tokens_total", "generated_tokens_total",
                     "inter_token_seconds_count", "kv_used_tokens"):
            assert zero[name] == 0, name
        assert zero["sequences_limit"] == 2 and zero["kv_capacity_tokens"] >= 4000
        ask = {"prompt": [67] * 300, "max_tokens": 8, "logit_bias": BIAS}
        s.post(COMPLETION, ask)
        one = settled(s, "requests_ended_total{outcome=finished}", 1)
        assert one["prompt_tokens_total"] == 300 and one["generated_tokens_total"] == 8
        assert one["cached_tokens_total{tier=device}"] == 0
        for name in ("queue", "time_to_first_token", "prefill", "request"):
            assert one[name + "_seconds_count"] == 1, name
        assert one["inter_token_seconds_count"] == 7
        assert one["queue_seconds_sum"] <= one["time_to_first_token_seconds_sum"]
        assert one["prefill_seconds_sum"] <= one["time_to_first_token_seconds_sum"]
        assert one["time_to_first_token_seconds_sum"] < one["request_seconds_sum"] < PATIENCE
        assert one["kv_used_tokens"] > 0 and one["steps_total"] >= 9
        assert one["evaluation_seconds_total{kind=decode}"] > 0
        again = s.post(COMPLETION, ask)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        two = settled(s, "requests_ended_total{outcome=finished}", 2)
        assert two["cached_tokens_total{tier=device}"] == cached == 299
        s.post(COMPLETION, {**ask, "n": 2})
        three = settled(s, "requests_ended_total{outcome=finished}", 3)
        assert three["prompt_tokens_total"] == 1200  # of all choices
        assert three["time_to_first_token_seconds_count"] == 3
        assert three["prefill_seconds_count"] == 4
        assert three["inter_token_seconds_count"] == 28 and three["generated_tokens_total"] == 32


def test_queue_and_refusals():
    with Server("--parallel", "1", "--queue", "1", program=FAULT) as s:
        held = [s.raw_post(COMPLETION, ENDLESS)]
        settled(s, "sequences_running", 1)
        held.append(s.raw_post(COMPLETION, ENDLESS))
        settled(s, "requests_waiting", 1)
        assert s.call("POST", COMPLETION, ENDLESS)[0] == 429
        assert s.call("POST", COMPLETION, {"prompt": [67] * 5000})[0] == 400
        got = scrape(s)
        assert got["requests_rejected_total{reason=queue_full}"] == 1
        assert got["requests_rejected_total{reason=too_long}"] == 1
        for c in held:
            c.close()
        got = settled(s, "requests_ended_total{outcome=canceled}", 2)
        settled(s, "sequences_running", 0)
        assert got["requests_waiting"] == 0


def test_preemption():
    with Server("--parallel", "2", "--kv-tokens", "1024", "-c", "1000") as s:
        ask = [s.raw_post(COMPLETION, {**ENDLESS, "prompt": [67 + i] * 50, "max_tokens": 700,
                                       "stream": False}) for i in range(2)]
        got = settled(s, "requests_ended_total{outcome=finished}", 2)
        for c in ask:
            assert c.recv(12) == b"HTTP/1.1 200"
            c.close()
        assert got["preemptions_total"] >= 1
        assert got["recomputed_tokens_total{reason=preempted}"] > 50


def test_windows():
    sparse = ("--attention", "sparse", "--budget", "64", "--kv-device", "1500K", "--parallel", "2")
    with Server(*sparse) as s:
        assert "sampled_mass_ratio" not in scrape(s)
        s.post(COMPLETION, {"prompt": [67, 80, 71] * 500, "max_tokens": 20, "logit_bias": BIAS})
        got = settled(s, "requests_ended_total{outcome=finished}", 1)
        assert got["sparse_tokens_total"] >= 19
        assert got["window_hits_total"] > 0 and got["window_misses_total"] > 0
        assert got["window_urgent_misses_total"] <= got["window_misses_total"]
        assert got["moved_bytes_total{from=host,to=device,use=window}"] > 0
        assert 0 < got["sampled_mass_ratio"] <= 1
        for stage in ("select", "attend", "qkv", "dense", "ffn", "logits", "seal"):
            assert got[f"stage_seconds_total{{stage={stage}}}"] > 0, stage


MOVES = ("from=host,to=device,use=window", "from=host,to=device,use=dense",
         "from=device,to=host,use=seal", "from=disk,to=host,use=read",
         "from=host,to=disk,use=store")


def seconds(got):
    """What moves took, and stalls by stage."""
    return ([got[f"moved_seconds_total{{{m}}}"] for m in MOVES],
            {s: got[f"stall_seconds_total{{stage={s}}}"]
             for s in ("disk", "store", "prefix", "fetch")})


def bytes_moved(got):
    return [got[f"moved_bytes_total{{{m}}}"] for m in MOVES]


def test_seconds_of_moves():
    """Where bytes went seconds did, no more than there were, and nowhere else."""
    ask = {"prompt": [67, 80, 71] * 500, "max_tokens": 20, "logit_bias": BIAS}
    with Server() as s:  # all is resident, and there is no cache
        s.post(COMPLETION, ask)
        moves, stalls = seconds(settled(s, "requests_ended_total{outcome=finished}", 1))
        assert moves == [0] * 5 and not any(stalls.values()), (moves, stalls)
    tiers = ("--attention", "sparse", "--budget", "64", "--kv-device", "1500K", "--parallel", "2")
    begin = time.monotonic()
    with Server(*tiers) as s:  # a host tier, no disk
        s.post(COMPLETION, ask)
        got = settled(s, "requests_ended_total{outcome=finished}", 1)
        lasted = time.monotonic() - begin
        moves, stalls = seconds(got)
        for m, n, t in zip(MOVES, bytes_moved(got), moves):
            assert (n > 0) == (t > 0), (m, n, t)
        assert moves[0] > 0 and moves[2] > 0 and moves[3] == moves[4] == 0
        assert moves[0] <= got["stage_seconds_total{stage=fetch}"], got
        assert sum(moves) < lasted, (moves, lasted)
        assert abs(stalls.pop("fetch") - moves[0] - moves[1]) < 1e-8
        assert not any(stalls.values()), stalls


def test_seconds_of_the_disk():
    """Reading and storing: a prompt that is known waits for its prefix, one that is not does not
    read; sparse steps over a host tier that is too small wait for what they miss."""
    tiers = ("--attention", "sparse", "--budget", "64", "--kv-device", "1500K", "--kv-host", "100K",
             "--kv-disk", "64M", "--parallel", "2")
    ask = {"prompt": [67, 80, 71] * 500, "max_tokens": 40, "logit_bias": BIAS}
    with Directory() as d:
        begin = time.monotonic()
        with Server(*tiers, "--cache-dir", d) as s:
            s.post(COMPLETION, ask)
            got = settled(s, "requests_ended_total{outcome=finished}", 1)
            lasted = time.monotonic() - begin
            moves, stalls = seconds(got)
            for m, n, t in zip(MOVES, bytes_moved(got), moves):
                assert n == 0 or t > 0, (m, n, t)
            assert moves[3] > 0 and moves[4] > 0, moves
            assert stalls["disk"] > 0 and stalls["store"] > 0, stalls
            assert sum(moves) < lasted, (moves, lasted)
        with Server(*tiers, "--cache-dir", d) as s:
            zero = scrape(s)
            assert seconds(zero)[1]["prefix"] == 0
            s.post(COMPLETION, ask)
            got = settled(s, "requests_ended_total{outcome=finished}", 1)
            assert got["cached_tokens_total{tier=disk}"] >= 1024, got
            assert 0 < seconds(got)[1]["prefix"] < got["request_seconds_sum"]


def test_names_are_documented():
    """Every family has its place in docs/server.md, and nothing there is not exported."""
    page = (HERE.parent.parent / "docs" / "server.md").read_text()
    rows = page[page.index("## Metrics"):page.index("Not there on a GPU")]
    told = set(re.findall(r"`([a-z_]+)(?:\{[a-z,]+\})?`(?=[^|]*\|[^|]*\|\n)", rows))
    with Server("--attention", "sparse", "--budget", "64") as s:
        s.post(COMPLETION, {"prompt": [67, 80, 71] * 500, "max_tokens": 20, "logit_bias": BIAS})
        settled(s, "requests_ended_total{outcome=finished}", 1)
        text = s.call("GET", "/metrics")[2].decode()
    assert {n[8:] for n in promlint.read(text)} == told, told


def test_plan_says_what_it_takes():
    for options in (("--parallel", "3"), ("-np", "2", "--kv-tokens", "5000", "-b", "2"),
                    ("--parallel", "2", "--kv-device", "1500K")):
        with Server(*options) as s:
            got = scrape(s)
        told = json.loads(subprocess.check_output(
            [PROGRAM, "plan", "-m", str(TINY / "llama.gguf"), "--rope-scaling", "linear",
             "--rope-scale", "64", "-c", "4000", "-t", "2", "--json", *options]))
        assert told["n_seq"] == got["sequences_limit"]
        for tier in ("device", "host"):
            took = got.get(f"kv_capacity_bytes{{tier={tier}}}", 0)
            assert took == told[f"kv_{tier}_bytes"], (options, tier, took, told)


def test_disk_and_tiers():
    ask = {"prompt": [67] * 1500, "max_tokens": 4, "logit_bias": BIAS}
    with Directory() as d:
        with Server("--cache-dir", d, "--kv-device", "1500K", "--parallel", "2") as s:
            s.post(COMPLETION, ask)
            s.wait_for(lambda: scrape(s)["disk_written_bytes_total{what=records}"] > 0, 5)
            got = scrape(s)
            assert "kv_capacity_bytes{tier=disk}" not in got
            for tier in ("device", "host"):
                used = got[f"kv_used_bytes{{tier={tier}}}"]
                assert 0 < used <= got[f"kv_capacity_bytes{{tier={tier}}}"], tier
            assert got["kv_used_bytes{tier=disk}"] >= got["disk_written_bytes_total{what=records}"]
            assert got["moved_bytes_total{from=device,to=host,use=seal}"] > 0
            assert (got["moved_bytes_total{from=host,to=disk,use=store}"] ==
                    got["disk_written_bytes_total{what=records}"] +
                    got["disk_written_bytes_total{what=index}"])
        with Server("--cache-dir", d, "--kv-device", "1500K", "--parallel", "2") as s:
            s.post(COMPLETION, ask)
            got = settled(s, "requests_ended_total{outcome=finished}", 1)
            assert got["cached_tokens_total{tier=disk}"] >= 1400, got
            assert got["moved_bytes_total{from=disk,to=host,use=read}"] > 0


def test_damage_is_counted():
    """What a damaged disk loses is evaluated again, and told."""
    tiers = ("--attention", "sparse", "--budget", "64", "--kv-device", "1500K", "--kv-host", "100K",
             "--kv-disk", "64M", "--parallel", "2")
    with Directory() as d, Server(*tiers, "--cache-dir", d) as s:
        ask = {"prompt": [67, 80, 71] * 500, "max_tokens": 4, "logit_bias": BIAS}
        s.post(COMPLETION, ask)
        s.wait_for(lambda: scrape(s)["disk_written_bytes_total{what=records}"] > 0, 5)
        got = scrape(s)
        assert got["kv_capacity_bytes{tier=disk}"] == 64 << 20
        assert got["recomputed_tokens_total{reason=lost}"] == 0
        files = [f for f in pathlib.Path(d).rglob("*") if f.is_file() and "catalog" not in f.name]
        for f in files:
            if f.stat().st_size > 65536:
                f.write_bytes(bytes(f.stat().st_size))
        s.post(COMPLETION, {**ask, "max_tokens": 40})
        got = settled(s, "requests_ended_total{outcome=finished}", 2)
        assert got["disk_load_failures_total{reason=damaged}"] > 0
        assert got["disk_load_failures_total{reason=timeout}"] == 0
        assert got["recomputed_tokens_total{reason=lost}"] >= 256


if __name__ == "__main__":
    main(globals())
