#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The binary interface of include/kvdrive.h against the golden one: functions, types of callbacks,
values of enums, places and sizes of fields.  A program that was compiled with the golden header
runs with a library of today if nothing is gone or changed: what is new may only come behind what
there was, in structs that say their size.  Says of a difference whether it is such an addition.
usage: abi.py CC [--update]   (run in the source root); --check-itself: finds made-up changes"""
import pathlib
import re
import subprocess
import sys
import tempfile

HEADER = pathlib.Path("include/kvdrive.h")
GOLDEN = pathlib.Path("tests/golden/abi.txt")


def squeeze(text):
    """White space where C needs it."""
    return re.sub(r"\s*([*(),;=\[\]])\s*", r"\1", re.sub(r"\s+", " ", text)).strip()


def parse(header):
    """(texts of functions and callbacks, {struct: fields}, names of enumerators)"""
    code = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    code = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", code, flags=re.M)
    texts = ["function " + squeeze(f.replace("KVD_MUST_USE", ""))
             for f in re.findall(r"KVD_API\s+([^;{]*\))\s*;", code)]
    texts += ["callback " + squeeze(f)
              for f in re.findall(r"typedef\s+([^;{}]*\(\s*\*\s*\w+\s*\)[^;]*);", code)]
    structs = {}
    for name, body in re.findall(r"typedef struct (\w+)\s*\{([^{}]*)\}\s*\w+\s*;", code):
        structs[name] = [re.search(r"(\w+)\s*(\[[^\]]*\])*\s*$", part).group(1)
                         for field in body.split(";") if field.strip()
                         for part in field.split(",")]
    enumerators = [e for body in re.findall(r"enum(?: \w+)?\s*\{([^{}]*)\}", code)
                   for e in re.findall(r"(KVD_\w+)\s*(?:=[^,]*)?(?:,|$)", body.strip())]
    return texts, structs, enumerators


def measure(cc, header):
    """Lines of the interface, of a header's text."""
    texts, structs, enumerators = parse(header)
    lines = [f'printf("enumerator {e} %lld\\n", (long long){e});' for e in enumerators]
    for name, fields in structs.items():
        lines.append(f'printf("struct {name} %zu %zu{" sized" * (fields[0] == "struct_size")}\\n", '
                     f'sizeof({name}), _Alignof({name}));')
        for i, f in enumerate(fields):
            lines.append(f'printf("field {name} {i} {f} at %zu of %zu bytes{{}}\\n", '
                         f'offsetof({name}, {f}), sizeof((({name} *)0)->{f}));')
    with tempfile.TemporaryDirectory() as d:
        (pathlib.Path(d) / "kvdrive.h").write_text(header)
        source = pathlib.Path(d) / "abi.c"
        source.write_text('#include <stdio.h>\n#include "kvdrive.h"\nint main(void)\n{\n' +
                          "\n".join(lines).replace("{}", "") + "\n}\n")
        subprocess.run([cc, "-std=c11", f"-I{d}", "-o", f"{d}/abi", str(source)], check=True)
        out = subprocess.run([f"{d}/abi"], check=True, capture_output=True, text=True).stdout
    major = re.search(r"#define KVD_VERSION_MAJOR (\d+)", header).group(1)
    return [f"soname libkvdrive.so.{major}"] + sorted(texts) + out.splitlines()


def differences(was, now):
    """(what breaks programs that are there, what is new)"""
    breaks, new = [], []
    sizes = {x.split()[1]: x.split() for x in now if x.startswith("struct ")}
    for line in was:
        word = line.split()
        if line in now:
            continue
        grown = sizes.get(word[1]) if word[0] == "struct" and word[-1] == "sized" else None
        if grown and int(grown[2]) >= int(word[2]) and grown[3:] == word[3:]:
            new.append(f"{word[1]} has grown from {word[2]} to {grown[2]} bytes")
        else:
            breaks.append(f"gone or changed: {line}")
    for line in now:
        if line not in was and not line.startswith("struct "):
            new.append(line)
    for line in new:
        word = line.split()
        if word[0] == "field" and f"struct {word[1]} " in "\n".join(was) and \
                not any(x.startswith(f"struct {word[1]} ") and x.endswith(" sized") for x in was):
            breaks.append(f"a field more in a struct that does not say its size: {line}")
    return breaks, new


CHANGES = (  # (what, with what, whether it breaks)
    ("int        sys;", "long       sys;", True),
    ("KVD_E_INVAL =\n                              -1,", "KVD_E_INVAL =\n -11,", True),
    ("KVD_API void        kvd_free(void *p);", "", True),
    ("KVD_API void        kvd_free(void *p);", "KVD_API void kvd_free(void *p, size_t n);", True),
    ("KVD_API void        kvd_free(void *p);", "KVD_API int kvd_free(void *p);", True),
    ("KVD_ROPE_LINEAR,", "KVD_ROPE_OTHER, KVD_ROPE_LINEAR,", True),
    ("    uint32_t         n_thread;", "    uint64_t         n_thread;", True),
    ("const char *shape, *shape_weights;", "const char *shape_weights, *shape;", True),
    ("const char *shape, *shape_weights;", "const char *shape, *shape_weights, *more;", False),
    ("char       msg[KVD_ERR_MSG_BYTES];", "char       msg[KVD_ERR_MSG_BYTES]; int more;", True),
    ("#define KVD_ERR_MSG_BYTES 512", "#define KVD_ERR_MSG_BYTES 256", True),
    ("typedef bool (*kvd_progress_fn)(void *ctx,", "typedef bool (*kvd_progress_fn)(", True),
    ("KVD_API void        kvd_free(void *p);",
     "KVD_API void kvd_free(void *p); KVD_API int kvd_more(int x);", False),
    ("    KVD_LOG_ERROR\n", "    KVD_LOG_ERROR, KVD_LOG_WORSE\n", False),
    ("void *p);", "void  * p );", None),
    ("    KVD_LOG_ERROR\n", "    KVD_LOG_ERROR /* the end */\n", None),
)


def check_itself(cc):
    header = HEADER.read_text()
    was = measure(cc, header)
    for old, new, breaking in CHANGES:
        assert old in header, f"the header has no {old!r} to change"
        breaks, added = differences(was, measure(cc, header.replace(old, new, 1)))
        found = True if breaks else False if added else None
        assert found == breaking, (old, new, breaks, added)
    print(f"{len(CHANGES)} made-up changes are told apart")


def main():
    cc = sys.argv[1]
    if "--check-itself" in sys.argv:
        check_itself(cc)
        return
    now = measure(cc, HEADER.read_text())
    if "--update" in sys.argv:
        GOLDEN.write_text("\n".join(now) + "\n")
        return
    was = GOLDEN.read_text().splitlines()
    breaks, new = differences(was, now)
    for line in breaks + new:
        print(line)
    if breaks:
        sys.exit("FAILED: programs that were compiled before would break; if that must be, a new "
                 "major version says so (before 1.0: the changelog), then abi.py CC --update")
    if new:
        sys.exit("FAILED: additions that the golden interface lacks: abi.py CC --update")
    kinds = [x.split()[0] for x in now]
    print(f"{kinds.count('function')} functions, {kinds.count('struct')} structs and "
          f"{kinds.count('enumerator')} enumerators as they were")


if __name__ == "__main__":
    main()
