# SPDX-License-Identifier: Apache-2.0
"""Reads the text format of Prometheus (0.0.4), and refuses what breaks its rules.

read(text) gives {family: Family}; ValueError says which line is wrong.
"""
import math
import re

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|Inf)|NaN")
TYPES = ("counter", "gauge", "histogram")
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


class Family:
    def __init__(self):
        self.help = self.type = None
        self.samples = {}  # (name, ((label, value), ...)) to a number, in the order they came


def labels_of(text):
    """Pairs of what stands between the braces."""
    out, at = [], 0
    while at < len(text):
        found = LABEL.match(text, at)
        if not found:
            raise ValueError("labels")
        value = re.sub(r'\\[\\"n]', lambda m: ESCAPES[m.group(0)], found.group(2))
        out.append((found.group(1), value))
        at = found.end()
        if at < len(text):
            if text[at] != ",":
                raise ValueError("labels")
            at += 1
    names = [n for n, _ in out]
    if len(set(names)) != len(names) or any(n.startswith("__") for n in names):
        raise ValueError("label names")
    return tuple(sorted(out))


def sample_of(line):
    """(name, labels, value)"""
    found = NAME.match(line)
    if not found:
        raise ValueError("name")
    rest = line[found.end():]
    labels = ()
    if rest.startswith("{"):
        end = re.match(r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}', rest)
        if not end:
            raise ValueError("braces")
        labels = labels_of(end.group(1))
        rest = rest[end.end():]
    if not rest.startswith(" ") or not NUMBER.fullmatch(rest[1:]):
        raise ValueError("value")
    return found.group(0), labels, float(rest[1:])


def family_of(families, name):
    """The family that a sample belongs to."""
    for end in ("_bucket", "_sum", "_count"):
        base = name[:-len(end)]
        if name.endswith(end) and base in families and families[base].type == "histogram":
            return base
    return name


def read_comment(families, line):
    part = line.split(" ", 3)
    if len(part) < 4 or part[1] not in ("HELP", "TYPE") or not NAME.fullmatch(part[2]):
        raise ValueError("comment")
    f = families.setdefault(part[2], Family())
    if f.samples:
        raise ValueError(f"{part[1]} behind samples")
    if getattr(f, part[1].lower()) is not None:
        raise ValueError(f"second {part[1]}")
    if part[1] == "TYPE" and part[3] not in TYPES:
        raise ValueError("type")
    setattr(f, part[1].lower(), part[3])
    return part[2]


def read_sample(families, line, open_family):
    name, labels, value = sample_of(line)
    family = family_of(families, name)
    if family != open_family:
        raise ValueError("a sample outside its family")
    f = families[family]
    if f.help is None or f.type is None:
        raise ValueError("no HELP or no TYPE")
    if f.type == "histogram" and name == family:
        raise ValueError("a histogram's sample without its ending")
    if (name, labels) in f.samples:
        raise ValueError("the same sample twice")
    if f.type != "gauge" and not (value >= 0 and math.isfinite(value)):
        raise ValueError("a count below 0, or none")
    f.samples[name, labels] = value


def check_histogram(name, f):
    groups = {}
    for (sample, labels), value in f.samples.items():
        rest = tuple(p for p in labels if p[0] != "le")
        g = groups.setdefault(rest, {"buckets": []})
        if sample.endswith("_bucket"):
            g["buckets"].append((float(dict(labels)["le"]), value))
        else:
            g[sample[len(name):]] = value
    for g in groups.values():
        bounds = [b for b, _ in g["buckets"]]
        counts = [c for _, c in g["buckets"]]
        if not bounds or bounds[-1] != math.inf or sorted(set(bounds)) != bounds:
            raise ValueError(f"{name}: bounds")
        if sorted(counts) != counts:
            raise ValueError(f"{name}: buckets are not cumulative")
        if g.get("_count") != counts[-1] or "_sum" not in g:
            raise ValueError(f"{name}: _count or _sum")


def read(text):
    if not text.endswith("\n"):
        raise ValueError("no line feed at the end")
    families, current = {}, None
    for number, line in enumerate(text[:-1].split("\n"), 1):
        try:
            if line.startswith("#"):
                current = read_comment(families, line)
            else:
                read_sample(families, line, current)
        except ValueError as e:
            raise ValueError(f"line {number}: {e}: {line}") from None
    for name, f in families.items():
        if not f.samples:
            raise ValueError(f"{name}: no sample")
        if (f.type == "counter") != name.endswith("_total"):
            raise ValueError(f"{name}: counters, and only they, end in _total")
        if f.type == "histogram":
            check_histogram(name, f)
    return families
