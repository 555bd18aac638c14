#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What packaging/ has for the server: the dashboard asks for metrics that there are, the unit, the
container and the samples set options that there are, and what docs/server.md shows of them is what
they are.  scripts/package-check runs the unit and the container."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import promlint
from kvserver import HERE, PROGRAM, Directory, Server, main

ROOT = HERE.parent.parent
PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "kvdrive.service"
CONTAINER = PACKAGING / "Containerfile"
DOC = ROOT / "docs" / "server.md"
INSTALLED = "/usr/local/bin/kvdrive"  # by cmake --install: tests/package/consumers.sh
APT = ROOT / "scripts" / "apt-packages.txt"


def options():
    text = subprocess.run([PROGRAM, "serve", "--help-all"], check=True, capture_output=True,
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


def shown(start):
    """The lines of the indented block of docs/server.md that begins with a line that starts so."""
    lines = DOC.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    " + start))
    end = next(i for i in range(first, len(lines)) if not lines[i].startswith("    "))
    return [line[4:] for line in lines[first:end]]


def test_doc_shows_the_sample():
    sample = (PACKAGING / "kvdrive.conf").read_text().splitlines()
    assert sample[0].startswith("# SPDX")
    assert shown("# Sample for") == sample[1:]
    # what is commented out there is an option as well
    for name in re.findall(r"^# ([a-z-]+) = ", "\n".join(sample), re.M):
        assert name in options(), name


def test_doc_shows_what_print_config_prints():
    command, *lines = shown("$ KVDRIVE_PORT=")
    variable, program, *args = command.removeprefix("$ ").split()
    assert program == "kvdrive" and args[-1] == "--print-config"
    name, value = variable.split("=")
    got = subprocess.run([PROGRAM, *args], capture_output=True, text=True, check=True, cwd=ROOT,
                         env={**os.environ, name: value}).stdout.splitlines()
    at = -1
    for line in lines:  # in this order; "...": others between them
        if line != "...":
            at = got.index(line, at + 1)
    assert len(lines) > 8 and at == len(got) - 1
    secret = subprocess.run([PROGRAM, *args], capture_output=True, text=True, check=True, cwd=ROOT,
                            env={**os.environ, "KVDRIVE_API_KEY": "sk-hidden"}).stdout
    assert "api-key              = (not shown)" in secret and "sk-hidden" not in secret


def accepted(args):
    """The program takes these arguments of serve."""
    got = serve_config(*args)
    assert got.returncode == 0, (args, got.stderr)
    named = {a[2:] for a in args if a.startswith("--")}
    assert named <= options(), named


def default_grace():
    return float(re.search(r"^grace +=\s*(\S+)", serve_config().stdout, re.M).group(1))


def setting(unit, name):
    return re.findall(rf"^{name}=(.*)$", unit, re.M)


def test_unit():
    unit = UNIT.read_text()
    program, command, *args = setting(unit, "ExecStart")[0].split()
    assert program == INSTALLED and command == "serve"
    accepted(args)
    assert float(setting(unit, "TimeoutStopSec")[0]) >= default_grace() + 2
    # names that have to agree: the credential, the cache, the settings, the page of the manual
    credential, path = setting(unit, "LoadCredential")[0].split(":")
    assert args[args.index("--api-key-file") + 1] == f"%d/{credential}"
    assert args[args.index("--cache-dir") + 1] == f"%C/{setting(unit, 'CacheDirectory')[0]}"
    for path in (path, setting(unit, "EnvironmentFile")[0]):
        assert re.search(rf"^# .*install .* {re.escape(path)}$", unit, re.M), path
    page, section = re.match(r"man:(\S+)\((\d)\)", setting(unit, "Documentation")[0]).groups()
    assert (ROOT / "man" / f"{page}.{section}").exists()
    for source in re.findall(r"^#   install .* (packaging/\S+) ", unit, re.M):
        assert (ROOT / source).exists(), source
    # what no other start will make better
    final = {int(code) for code in setting(unit, "RestartPreventExitStatus")[0].split()}
    for wrong in (("--no-such",), ("-m", __file__), ("-m", __file__, "--cors-origin", "foo")):
        got = subprocess.run([PROGRAM, "serve", *wrong], capture_output=True)
        assert got.returncode in final, (wrong, got)


def test_unit_as_systemd_sees_it():
    """Nothing that it does not know, and little that the unit may do."""
    if not shutil.which("systemd-analyze"):
        print("skipped: no systemd-analyze")
        return
    with Directory() as d:
        unit = os.path.join(d, "kvdrive.service")
        with open(unit, "w") as f:  # with a program that is there
            f.write(UNIT.read_text().replace(INSTALLED, PROGRAM))
        got = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True,
                             text=True)
        assert got.returncode == 0 and not got.stdout + got.stderr, got
        got = subprocess.run(["systemd-analyze", "security", "--offline=true", "--threshold=20",
                              "--no-pager", unit], capture_output=True, text=True)
        assert got.returncode == 0 and "exposure level" in got.stdout, got
        with open(unit, "a") as f:  # it does look
            f.write("[Service]\nNoSuchSetting=1\n")
        got = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True,
                             text=True)
        assert "NoSuchSetting" in got.stderr, got


def container():
    """(instruction, its words) of each line of the Containerfile, comments, as one text."""
    text = CONTAINER.read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    comments = " ".join(line[1:].strip().rstrip("\\") for line in text.splitlines()
                        if line.startswith("#"))
    return [line.split(None, 1) for line in lines if line], comments


def test_container_commands():
    lines, comments = container()
    entry = json.loads(dict(lines)["ENTRYPOINT"])
    assert entry[:2] == [INSTALLED, "serve"]
    run = re.search(r"podman run (.*?) kvdrive (-m \S+)$", comments)
    accepted(entry[2:] + run.group(2).split())
    # what the example mounts and publishes is what the image has
    words = dict(lines)
    volume, port, user = words["VOLUME"], words["EXPOSE"], words["USER"]
    assert f":{volume} " in run.group(1) and f":{port} " in run.group(1), run
    assert entry[entry.index("--cache-dir") + 1] == volume
    assert re.search(rf"^port +=\s*{port}\b", serve_config().stdout, re.M)
    stop = float(re.search(r"--stop-timeout (\d+)", run.group(1)).group(1))
    assert stop >= default_grace() + 2
    uid, gid = user.split(":")
    made = [arg for name, arg in lines if name == "RUN" and f" {volume}" in arg]
    assert len(made) == 1 and f"-m 0700 -o {uid} -g {gid} {volume}" in made[0]
    copied = [arg.split() for name, arg in lines if name == "COPY" and "--from" in arg]
    assert copied == [["--from=build", "/build/kvdrive", INSTALLED]]


def test_container_has_what_running_needs():
    """The package of each library that the program is linked to, in the image that stays; where
    this machine has the same Debian."""
    base, stays = CONTAINER.read_text().rsplit("FROM ", 1)[1].split("\n", 1)
    release = pathlib.Path("/etc/os-release").read_text()
    version = re.fullmatch(r"debian:(\d+)-slim", base).group(1)
    if "ID=debian\n" not in release or f'VERSION_ID="{version}"' not in release:
        print("skipped: not Debian", version)
        return
    has = set(re.search(r"--no-install-recommends (.*?)&&", stays, re.S).group(1).split()) - {"\\"}
    packages = set()
    needed = subprocess.run(["readelf", "-d", PROGRAM], capture_output=True, text=True, check=True)
    found = subprocess.run(["ldd", PROGRAM], capture_output=True, text=True, check=True)
    for name in re.findall(r"NEEDED.*\[(.*)\]", needed.stdout):
        path = re.search(rf"{re.escape(name)} => \S*(/lib/\S+)", found.stdout)
        if path:  # Debian knows some by /lib, some by /usr/lib
            owner = subprocess.run(["dpkg-query", "-S", "*" + path.group(1)], capture_output=True,
                                   text=True, check=True)
            packages.add(owner.stdout.split(":")[0])
    assert len(packages) > 5
    rest = {p for p in packages - has if not re.fullmatch(r"lib(c6|gcc-s1|[a-z]*san\d+)", p)}
    assert not rest and has <= packages, (packages, has)


def test_container_has_what_building_needs():
    """The packages of the build group, of which the container leaves out what it does not use."""
    text = (PACKAGING / "Containerfile").read_text()
    for line in APT.read_text().splitlines():
        if line.startswith("build ") and line.split()[1].endswith("-dev"):
            assert line.split()[1] in text, line


if __name__ == "__main__":
    main(globals())
