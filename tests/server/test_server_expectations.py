#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/expectations.md: every expectation has its row, and the tests that a row names exist."""
import re

from kvserver import HERE, main

ROOT = HERE.parent.parent
IDS = """B19 B20 B21 B23 B24 B25 B35 B36 B38 B39 B40 B42 B43 B44 B46 B48 B50 B51 B52""".split()
NAMED = re.compile(r"`(tests/[\w./-]+): (\w+)`")
SCRIPT = re.compile(r"`(tests/[\w./-]+[.]sh)`")
MOST_EXEMPT = 3


def number_of(row_id):
    return [int(x) for x in row_id[1:].split(".")]


def problems(page):
    """What is wrong with the table, as texts."""
    out, ids, exempt = [], [], 0
    for line in page.splitlines():
        row = re.match(r"\| (B\d+|U\d+[.]\d+) \| ([^|]+) \| ([^|]+) \|$", line)
        if not row:
            if re.match(r"\|\s*[BU]\d", line):
                out.append(f"not a row: {line}")
            continue
        ids.append(row.group(1))
        named, scripts = NAMED.findall(row.group(3)), SCRIPT.findall(row.group(3))
        exempt += "does not apply" in row.group(3)
        if not (named or scripts or "does not apply" in row.group(3)) or "not yet" in line:
            out.append(f"{row.group(1)}: something has no test")
        if row.group(3).count("`tests/") != len(named) + len(scripts):
            out.append(f"{row.group(1)}: a test without its case")
        out += [f"{row.group(1)}: there is no {x}" for x in scripts if not (ROOT / x).is_file()]
        for path, case in named:
            file = ROOT / path
            if not file.is_file():
                out.append(f"{row.group(1)}: there is no {path}")
            elif not re.search(rf"^(?:def|static void) {case}\(", file.read_text(), re.M):
                out.append(f"{row.group(1)}: {path} has no {case}")
    found = [x for x in ids if x[0] == "B"]
    if found != IDS or ids != found + sorted(ids[len(found):], key=number_of):
        out.append(f"rows: {sorted(set(IDS) ^ set(found)) or 'twice, or out of order'}")
    if exempt > MOST_EXEMPT:
        out.append(f"{exempt} rows do not apply, at most {MOST_EXEMPT} may")
    return out


def test_every_row():
    page = (ROOT / "docs" / "expectations.md").read_text()
    assert not problems(page), problems(page)


def test_checker_finds():
    page = (ROOT / "docs" / "expectations.md").read_text()
    first = next(x for x in page.splitlines() if x.startswith("| B"))
    for bad in (page.replace(first + "\n", ""), page.replace(first, first + "\n" + first),
                page.replace("test_fault_cache_tamper.c", "test_no_such_file.c"),
                page.replace("tampered_loads", "no_such_case"),
                page.replace(": tampered_loads`", "`"),
                page.replace(first, re.sub(r"`tests.*`", "as everybody knows", first)),
                page.replace("old_cpu.sh", "no_such.sh"),
                page.replace("one program", "not yet: one"),
                page.replace("`tests/", "`does not apply/")):
        assert bad != page and problems(bad)


if __name__ == "__main__":
    main(globals())
