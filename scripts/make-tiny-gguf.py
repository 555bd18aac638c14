#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/data/gguf: small GGUF files for the parser's tests.

good-*.gguf come from the gguf package where it can write them (pip install gguf numpy), so that
the reader is tested against another writer; the rest, and bad-*.gguf with one defect each, from
the few lines of writer below.  tests/unit/test_gguf.c lists what each bad file must say.
The output is deterministic.  Usage: scripts/make-tiny-gguf.py [OUT_DIR]"""
import os
import struct
import sys

import numpy as np
import gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
CODE = "BbHhIif?__QqdX"
READ = [T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1,
        T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K]


# ---- a writer that can write nonsense ------------------------------------------------

def u32(v):
    return struct.pack("<I", v)


def u64(v):
    return struct.pack("<Q", v)


def string(s):
    s = s.encode() if isinstance(s, str) else s
    return u64(len(s)) + s


def value(t, v):
    return string(v) if t == STR else struct.pack("<" + CODE[t], v)


def kv(key, t, v):
    return string(key) + u32(t) + (v if isinstance(v, bytes) else value(t, v))


def array(t, items, n=None):
    return u32(t) + u64(len(items) if n is None else n) + b"".join(value(t, v) for v in items)


def tensor(name, dims, t, offset):
    return string(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(t) + u64(offset)


def blob(kvs=(), tensors=(), data=b"", version=3, n_kv=None, n_tensor=None, align=32):
    head = (b"GGUF" + u32(version) + u64(len(tensors) if n_tensor is None else n_tensor)
            + u64(len(kvs) if n_kv is None else n_kv) + b"".join(kvs) + b"".join(tensors))
    if tensors or data:
        head += b"\0" * (-len(head) % align)
    return head + data


ARCH = kv("general.architecture", STR, "llama")
ROW = bytes(range(128))  # 32 f32


def one(dims=(32,), t=0, offset=0, data=ROW, name="w", **more):
    """A file with one tensor."""
    return blob([ARCH], [tensor(name, dims, t, offset)], data, **more)


def split(i, n, tensors, data, kvs=(), total=None, no=None, count=None):
    keys = [kv("split.no", U16, i if no is None else no),
            kv("split.count", U16, n if count is None else count)]
    if total is not None:
        keys.append(kv("split.tensors.count", I32, total))
    return blob(list(kvs) + keys, tensors, data)


# ---- good files ----------------------------------------------------------------------

def good_all(path):
    """Every metadata type and every tensor type, by the gguf package."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_uint8("t.u8", 200)
    w.add_int8("t.i8", -100)
    w.add_uint16("t.u16", 60000)
    w.add_int16("t.i16", -30000)
    w.add_uint32("t.u32", 4000000000)
    w.add_int32("t.i32", -2000000000)
    w.add_float32("t.f32", 0.1)
    w.add_uint64("t.u64", 18000000000000000000)
    w.add_int64("t.i64", -9000000000000000000)
    w.add_float64("t.f64", 1e300)
    w.add_bool("t.yes", True)
    w.add_bool("t.no", False)
    w.add_string("t.str", "na\u00efve \u4e16\u754c \U0001f600 "
                 "\"quoted\" back\\slash\nline\ttab\x01")
    w.add_array("t.strs", ["", "a", "bc", "\u00e9"])
    w.add_array("t.ints", list(range(-3, 4)))
    w.add_array("t.bools", [True, False, True])
    w.add_array("t.floats", [0.5, -1.25])
    w.add_array("t.many", [f"token{i}" for i in range(100)])
    for t in READ:
        block, size = GGML_QUANT_SIZES[t]
        row = 2 * block if block > 1 else 6
        data = (np.arange(3 * row // block * size, dtype=np.uint32) * 7 + int(t)).astype(np.uint8)
        w.add_tensor(f"w.{t.name}", data.reshape(3, -1), raw_dtype=t)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def good_files():
    yield "good-v2.gguf", blob([ARCH, kv("x", U32, 7)], [tensor("w", (32,), 0, 0)], ROW, version=2)
    yield "good-bare.gguf", blob()
    yield "good-vocab.gguf", blob([ARCH, kv("v", ARR, array(STR, ["a", "b"])),
                                   kv("empty", ARR, array(STR, [])),
                                   kv("none", ARR, array(F64, [])), kv("e", STR, "")])
    yield "good-align.gguf", blob([ARCH, kv("general.alignment", U32, 256)],
                                  [tensor("a", (3,), 0, 0), tensor("b", (2, 1, 1, 2), 0, 256)],
                                  ROW * 2 + ROW[:16], align=256)
    yield "good-unread.gguf", blob(
        [ARCH], [tensor("iq", (256, 2), 23, 0), tensor("w", (32,), 0, 288)], b"\1" * 288 + ROW)
    not_utf8 = b"\xc3\x28\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82"
    yield "good-bytes.gguf", blob([kv(b"k\xff\x80", STR, string(not_utf8)),
                                   kv("nul", STR, string(b"a\0b")), kv("inf", F32, float("inf")),
                                   kv("nan", F64, float("nan")), kv("tiny", F64, 5e-324)])
    # One set, then sets with a defect each.
    w = [tensor(f"w{i}", (32,), 0, 0) for i in range(3)]
    yield "good-00001-of-00003.gguf", split(0, 3, [w[0]], ROW, [ARCH], 3)
    yield "good-00002-of-00003.gguf", split(1, 3, [w[1]], ROW)
    yield "good-00003-of-00003.gguf", split(2, 3, [w[2]], ROW)
    yield "good-one-split.gguf", split(0, 1, [w[0]], ROW, [ARCH], 1)


def bad_sets():
    w = [tensor(f"w{i}", (32,), 0, 0) for i in range(3)]
    yield "bad-missing-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-name.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-huge-00001-of-65535.gguf", split(0, 65535, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-type-00001-of-00002.gguf", blob([ARCH, kv("split.count", STR, "2")])
    yield "bad-split-total-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 3)
    yield "bad-split-total-00002-of-00002.gguf", split(1, 2, [w[1]], ROW)
    yield "bad-split-no-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-no-00002-of-00002.gguf", split(1, 2, [w[1]], ROW, no=5)
    yield "bad-split-none-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-none-00002-of-00002.gguf", blob([ARCH], [w[1]], ROW)
    yield "bad-split-dup-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-dup-00002-of-00002.gguf", split(1, 2, [w[0]], ROW)
    yield "bad-split-cut-00001-of-00002.gguf", split(0, 2, [w[0]], ROW, [ARCH], 2)
    yield "bad-split-cut-00002-of-00002.gguf", split(1, 2, [w[1]], ROW)[:-1]


# ---- files with one defect -----------------------------------------------------------

def bad_files():
    yield "empty", b""
    yield "magic", b"GGML" + bytes(40)
    yield "magic-short", b"GGU"
    yield "version-0", blob(version=0)
    yield "version-1", blob(version=1)
    yield "version-4", blob(version=4)
    yield "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    yield "header-short", blob()[:12]
    yield "n-kv-huge", blob([ARCH], n_kv=2**64 - 1)
    yield "n-kv-file", blob([ARCH], n_kv=60000)
    yield "n-tensor-huge", blob([ARCH], n_tensor=2**63)
    yield "n-tensor-file", blob([ARCH], n_tensor=1000000)
    yield "key-empty", blob([kv("", U32, 1)])
    yield "key-long", blob([kv("k" * 65536, U8, 1)])
    yield "key-zero", blob([kv("a\0b", U8, 1)])
    yield "key-beyond", blob([u64(1000) + b"abcdefghijkl"])
    yield "key-wraps", blob([u64(2**64 - 8) + b"abcdefghijkl"])
    yield "kv-type", blob([kv("k", 13, b"\0" * 8)])
    yield "kv-short", blob([ARCH, kv("k.longer", U64, 1)])[:-3]
    yield "elem-type", blob([kv("k", ARR, u32(99) + u64(1) + b"\0" * 8)])
    yield "array-nested", blob([kv("k", ARR, u32(ARR) + u64(1) + array(U8, [1, 2]))])
    yield "array-huge", blob([kv("k", ARR, u32(U64) + u64(2**61) + b"\0" * 16)])
    yield "array-beyond", blob([kv("k", ARR, array(U32, [1, 2], n=3))])
    yield "strings-beyond", blob([kv("k", ARR, array(STR, ["a", "b"], n=3)), kv("p", U8, 1)])
    yield "strings-huge", blob([kv("k", ARR, array(STR, ["a", "b"], n=2**40))])
    yield "string-wraps", blob([kv("k", STR, u64(2**64 - 1) + b"abc")])
    yield "bool-2", blob([kv("k", BOOL, b"\2")])
    yield "bools-3", blob([kv("k", ARR, u32(BOOL) + u64(4) + b"\0\1\3\1")])
    yield "key-twice", blob([kv("a", U8, 1), kv("b", U8, 1), kv("a", U8, 1)])
    for n, v in [("0", 0), ("3", 3), ("4", 4), ("huge", 2**31)]:
        yield f"align-{n}", blob([kv("general.alignment", U32, v)])
    yield "align-type", blob([kv("general.alignment", U64, 32)])
    yield "name-empty", one(name="")
    yield "name-long", one(name="n" * 257)
    yield "name-zero", one(name="w\0")
    yield "n-dim-0", one(dims=())
    yield "n-dim-5", one(dims=(1, 1, 1, 1, 1))
    yield "dim-0", one(dims=(32, 0))
    yield "dims-wrap", one(dims=(2**32, 2**32))
    yield "dims-sign", one(dims=(2**63,))
    yield "size-wraps", one(dims=(2**62,))
    yield "row-partial", one(dims=(48,), t=2)
    yield "tensor-type", one(t=1000)
    yield "offset-unaligned", one(offset=8, data=ROW * 2)
    yield "offset-wraps", one(offset=2**64 - 32)
    yield "offset-beyond", one(offset=4096)
    yield "truncated", one()[:-1]
    yield "truncated-unread", one(t=23, dims=(256,), offset=4096)
    yield "tensor-twice", blob(
        [ARCH], [tensor("w", (32,), 0, 0), tensor("w", (32,), 0, 128)], ROW * 2)
    yield "overlap", blob([ARCH], [tensor("a", (32,), 0, 0), tensor("b", (32,), 0, 0)], ROW)
    yield "directory-short", blob([ARCH], [tensor("a" * 40, (32,), 0, 0)])[:-50]


def main():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "tests", "data", "gguf")
    os.makedirs(out, exist_ok=True)
    good_all(os.path.join(out, "good-all.gguf"))
    files = list(good_files()) + list(bad_sets())
    files += [(f"bad-{name}.gguf", data) for name, data in bad_files()]
    for name, data in files:
        with open(os.path.join(out, name), "wb") as f:
            f.write(data)
    print(f"{len(files) + 1} files in {out}")


if __name__ == "__main__":
    main()
