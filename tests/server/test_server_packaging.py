#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What packaging/ has for the server: the dashboard asks for metrics that there are, the unit, the
container and the samples set options that there are."""
import json
import os
import re
import shutil
import subprocess

import promlint
from kvserver import HERE, PROGRAM, Directory, Server, main

ROOT = HERE.parent.parent
PACKAGING = ROOT / "packaging"
APT = ROOT / "scripts" / "apt-packages.txt"


def options():
    text = subprocess.run([PROGRAM, "serve", "--help"], check=True, capture_output=True,
                          text=True).stdout
    return set(re.findall(r"--([a-z][a-z-]+)", text))


def serve_config(*args, env=None):
    return subprocess.run([PROGRAM, "serve", *args, "--print-config"], capture_output=True,
                          text=True, env={**os.environ, **(env or {})})


def test_dashboard():
    board = json.loads((PACKAGING / "grafana-dashboard.json").read_text())
    with Server("--attention", "sparse", "--budget", "64") as s:
        s.post("/v1/completions", {"prompt": [67, 80, 71] * 500, "max_tokens": 20,
                                   "logit_bias": {"261": -100}})
        text = ""

        def has_mass():
            nonlocal text
            text = s.call("GET", "/metrics")[2].decode()
            return "sampled_mass" in text

        s.wait_for(has_mass)
    names = {name for f in promlint.read(text).values() for name, _ in f.samples}
    labels = set(re.findall(r'([a-z_]+)="', text))
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels) >= 10
    for p in panels:
        assert p["targets"], p["title"]
        for t in p["targets"]:
            asked = set(re.findall(r"\bkvdrive_[a-z_]+", t["expr"]))
            assert asked and asked <= names, (p["title"], asked - names)
            used = re.findall(r"by \(([a-z_]+)\)", t["expr"]) + re.findall(
                r"\{\{([a-z_]+)\}\}", t["legendFormat"])
            assert set(used) <= labels, (p["title"], used)


def test_samples_are_accepted():
    env = dict(line.split("=", 1) for line in (PACKAGING / "kvdrive.env").read_text().splitlines()
               if line and not line.startswith("#"))
    for name in env:
        assert name.removeprefix("KVDRIVE_").lower().replace("_", "-") in options(), name
    got = serve_config(env=env)
    assert got.returncode == 0, got.stderr
    assert re.search(r"kv-disk\b.*50", got.stdout) and "environment" in got.stdout, got.stdout
    got = serve_config("--config", str(PACKAGING / "kvdrive.conf"))
    assert got.returncode == 0, got.stderr
    assert "/var/cache/kvdrive" in got.stdout
    with Directory() as d:  # a wrong one is not
        wrong = os.path.join(d, "wrong.conf")
        shutil.copy(PACKAGING / "kvdrive.conf", wrong)
        with open(wrong, "a") as f:
            f.write("no-such-option = 1\n")
        assert serve_config("--config", wrong).returncode != 0


def test_commands():
    unit = (PACKAGING / "kvdrive.service").read_text()
    command = re.search(r"^ExecStart=\S+/kvdrive serve (.*)$", unit, re.M).group(1)
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", (PACKAGING / "Containerfile").read_text(), re.M)
    for args in (command.split(), json.loads(entry.group(1))[2:]):
        named = [a[2:] for a in args if a.startswith("--")]
        assert named and set(named) <= options(), named
    grace = float(re.search(r"--grace S.*?default:\s+(\d+)", subprocess.run(
        [PROGRAM, "serve", "--help"], capture_output=True, text=True).stdout, re.S).group(1))
    assert float(re.search(r"TimeoutStopSec=(\d+)", unit).group(1)) >= grace + 2


def test_container_has_what_building_needs():
    """The packages of the build group, of which the container leaves out what it does not use."""
    text = (PACKAGING / "Containerfile").read_text()
    for line in APT.read_text().splitlines():
        if line.startswith("build ") and line.split()[1].endswith("-dev"):
            assert line.split()[1] in text, line


if __name__ == "__main__":
    main(globals())
