#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""greedy.py - continues a text with libkvdrive, by ctypes alone.

    python3 greedy.py model.gguf "Once upon a time"

KVDRIVE_LIBRARY names the shared library where the loader does not find it.  Structs may end after
the last field that is used: struct_size tells the library, and the other fields are zero.
"""
import ctypes
import os
import sys
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_size_t
from ctypes import c_uint8, c_uint32, c_uint64, c_void_p

N_CTX, N_GEN = 512, 64
KVD_OK = 0


class Error(ctypes.Structure):
    _fields_ = [("code", c_int), ("sys", c_int), ("msg", c_char * 512)]


class Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class ModelParams(Sized):
    _fields_ = [("struct_size", c_size_t), ("path", c_char_p), ("backend", c_char_p)]


class ModelInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("arch", c_char_p), ("name", c_char_p),
                ("file_type", c_char_p), ("backend", c_char_p), ("isa", c_char_p),
                ("chat_template", c_char_p), ("n_param", c_uint64), ("weight_bytes", c_uint64),
                ("n_layer", c_uint32), ("n_embd", c_uint32), ("n_head", c_uint32),
                ("n_kv_head", c_uint32), ("head_dim", c_uint32), ("n_ff", c_uint32),
                ("n_vocab", c_uint32), ("n_thread", c_uint32), ("n_ctx_train", c_uint32)]


class SessionParams(Sized):
    _fields_ = [("struct_size", c_size_t), ("n_ctx", c_uint32), ("n_seq", c_uint32)]


class SamplerParams(Sized):
    """All of it: 0 is not the default of every field."""

    _fields_ = [("struct_size", c_size_t), ("temperature", c_float), ("top_k", c_int32),
                ("top_p", c_float), ("min_p", c_float), ("repeat_penalty", c_float),
                ("presence_penalty", c_float), ("frequency_penalty", c_float),
                ("penalty_last_n", c_int32), ("seed", c_uint64), ("bias", c_void_p),
                ("n_bias", c_size_t)]


class Batch(Sized):
    _fields_ = [("struct_size", c_size_t), ("n_token", c_uint32), ("token", POINTER(c_int32)),
                ("seq", POINTER(c_uint32)), ("want_logits", POINTER(c_uint8)),
                ("n_best", c_uint32)]


def load():
    lib = ctypes.CDLL(os.environ.get("KVDRIVE_LIBRARY", "libkvdrive.so.0"))
    out, err = POINTER(c_void_p), POINTER(Error)
    for name, result, arguments in (
            ("kvd_model_open", c_int, [out, POINTER(ModelParams), err]),
            ("kvd_model_close", None, [c_void_p]),
            ("kvd_model_get_info", c_int, [c_void_p, POINTER(ModelInfo)]),
            ("kvd_tokenize", c_int, [c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_bool,
                                     POINTER(c_int32), c_size_t, POINTER(c_size_t), err]),
            ("kvd_token_is_end", c_bool, [c_void_p, c_int32]),
            ("kvd_detok_open", c_int, [out, c_void_p, err]),
            ("kvd_detok_feed", c_char_p, [c_void_p, c_int32, c_bool, POINTER(c_size_t)]),
            ("kvd_detok_flush", c_char_p, [c_void_p, POINTER(c_size_t)]),
            ("kvd_detok_close", None, [c_void_p]),
            ("kvd_session_open", c_int, [out, c_void_p, POINTER(SessionParams), err]),
            ("kvd_session_close", None, [c_void_p]),
            ("kvd_prefill", c_int, [c_void_p, c_uint32, POINTER(c_int32), c_size_t, c_void_p,
                                    c_void_p, err]),
            ("kvd_eval", c_int, [c_void_p, POINTER(Batch), err]),
            ("kvd_sampler_open", c_int, [out, c_void_p, POINTER(SamplerParams), err]),
            ("kvd_sampler_close", None, [c_void_p]),
            ("kvd_sampler_n_best", c_uint32, [c_void_p]),
            ("kvd_sampler_pick", c_int, [c_void_p, c_void_p, c_uint32, POINTER(c_int32), err])):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class KVDrive:
    """One model, one sequence.  Everything that was opened is closed by close()."""

    def __init__(self, path):
        self.lib, self.err = load(), Error()
        self.model, self.session = c_void_p(), c_void_p()
        self.sampler, self.detok = c_void_p(), c_void_p()
        try:
            self.check(self.lib.kvd_model_open(byref(self.model),
                                               byref(ModelParams(path=os.fsencode(path))),
                                               byref(self.err)))
            info = ModelInfo()
            self.check(self.lib.kvd_model_get_info(self.model, byref(info)))
            self.n_ctx = min(N_CTX, info.n_ctx_train)
            self.open_parts()
        except RuntimeError:
            self.close()
            raise

    def open_parts(self):
        lib, err = self.lib, byref(self.err)
        greedy = SamplerParams(temperature=0, top_p=1, repeat_penalty=1)
        self.check(lib.kvd_session_open(byref(self.session), self.model,
                                        byref(SessionParams(n_ctx=self.n_ctx)), err))
        self.check(lib.kvd_sampler_open(byref(self.sampler), self.model, byref(greedy), err))
        self.check(lib.kvd_detok_open(byref(self.detok), self.model, err))

    def close(self):
        self.lib.kvd_detok_close(self.detok)
        self.lib.kvd_sampler_close(self.sampler)
        self.lib.kvd_session_close(self.session)
        self.lib.kvd_model_close(self.model)

    def check(self, status):
        if status != KVD_OK:
            raise RuntimeError(self.err.msg.decode(errors="replace") or f"status {status}")

    def continue_text(self, text):
        """The text's continuation, piece by piece."""
        lib, err, data = self.lib, byref(self.err), text.encode()
        room = self.n_ctx - N_GEN
        token, n, new = (c_int32 * room)(), c_size_t(), c_int32()
        self.check(lib.kvd_tokenize(self.model, data, len(data), None, 0, True, token, room,
                                    byref(n), err))
        self.check(lib.kvd_prefill(self.session, 0, token, n.value, None, None, err))
        for _ in range(N_GEN):
            self.check(lib.kvd_sampler_pick(self.sampler, self.session, 0, byref(new), err))
            if lib.kvd_token_is_end(self.model, new.value):
                break
            yield lib.kvd_detok_feed(self.detok, new.value, False, None).decode()
            batch = Batch(n_token=1, token=ctypes.pointer(new),
                          n_best=lib.kvd_sampler_n_best(self.sampler))
            self.check(lib.kvd_eval(self.session, byref(batch), err))
        yield lib.kvd_detok_flush(self.detok, None).decode()


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: greedy.py MODEL TEXT")
    try:
        k = KVDrive(sys.argv[1])
    except RuntimeError as e:
        sys.exit(f"greedy.py: {e}")
    try:
        for piece in k.continue_text(sys.argv[2]):
            print(piece, end="", flush=True)
        print()
    except RuntimeError as e:
        sys.exit(f"greedy.py: {e}")
    finally:
        k.close()


if __name__ == "__main__":
    main()
