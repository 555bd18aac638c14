/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_edit.h - copies of model files with other metadata, for tests of what a file may hold. */
#ifndef KVD_TESTS_GGUF_EDIT_H
#define KVD_TESTS_GGUF_EDIT_H

#include <stddef.h>
#include <stdint.h>

/* What becomes of a key: replaced, added where the file lacks it, or left out (value NULL). */
typedef struct gguf_edit {
    const char *key;
    const void *value; /* type and value, as the format writes them */
    size_t      n;     /* bytes of it */
} gguf_edit;

/* Writes a copy of the file `from` to `to`.  Failures end the program. */
void gguf_edit_copy(const char *from, const char *to, const gguf_edit *edit, size_t n_edit);

/* Values for edits, in static memory of 16 places that are used in turn. */
gguf_edit gguf_edit_str(const char *key, const char *s);
gguf_edit gguf_edit_int(const char *key, uint32_t type, uint64_t x);
/* An array of n zeros, of empty strings with type GGUF_STRING; n up to 512. */
gguf_edit gguf_edit_zeros(const char *key, uint32_t type, uint64_t n);
gguf_edit gguf_edit_drop(const char *key);

#endif
