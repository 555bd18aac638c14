/* SPDX-License-Identifier: Apache-2.0 */
/* format.h - the door to format/: GGUF files as validated, read-only views.
 *
 * After gguf_open() succeeds every offset, size, dimension, string and array has been checked
 * against the file's real size with overflow-safe arithmetic; accessors cannot fail on content.
 * Strings point into the mapping (not zero-terminated) and live until gguf_close().
 * Memory: at most 4 x the header's bytes + 16 MiB while parsing.
 * Thread: immutable once opened, any thread. */
#ifndef KVD_FORMAT_H
#define KVD_FORMAT_H

#include "base/base.h"

typedef struct gguf_file gguf_file;

/* Ids of the format. */
typedef enum gguf_type {
    GGUF_U8 = 0,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64
} gguf_type;

typedef struct gguf_str {
    const char *data;
    uint64_t    len;
} gguf_str;

typedef struct gguf_kv gguf_kv; /* one metadata entry */

#define GGUF_MAX_DIMS 4
typedef struct gguf_tensor {
    gguf_str    name;
    uint32_t    type_id; /* as in the file; kvd_dtype_get() says whether we read it */
    uint32_t    n_dim;
    uint64_t    dim[GGUF_MAX_DIMS]; /* dim[0] varies fastest (a row's length); unused ones are 1 */
    uint64_t    n_elem, bytes;      /* bytes 0 when the type is not one we read */
    uint64_t    offset;             /* in its file, absolute */
    uint32_t    split;              /* which file of the set */
    const void *data; /* into the mapping, at 8 bytes or more; NULL: a type we do not read */
} gguf_tensor;

/* Opens a file, or all files of a split set when path is the first of one
 * (name-00001-of-0000N.gguf).  Errors name path, offset, what was expected and what was found;
 * a truncated file names both sizes.  A tensor of a known type that we do not read stays in the
 * directory without data; an unknown type is KVD_E_UNSUPPORTED, and so are version 1, big-endian
 * files and arrays of arrays.  A set opened by another file than its first is KVD_E_INVAL. */
kvd_status gguf_open(gguf_file **out, const char *path, kvd_err *err);
void       gguf_close(gguf_file *g);

/* Copies the files into memory (os_map_copy); what does not fit stays mapped.  Before the file is
 * shared with other threads. */
void gguf_copy_to_memory(gguf_file *g);

uint32_t    gguf_version(const gguf_file *g);
uint64_t    gguf_mapped_bytes(const gguf_file *g); /* of all files */
uint64_t    gguf_tensor_bytes(const gguf_file *g); /* sum over tensors we read */
uint64_t    gguf_heap_bytes(const gguf_file *g);   /* what the parsed directory holds on the heap */
uint64_t    gguf_header_bytes(const gguf_file *g); /* of all files: what comes before tensor data */
uint32_t    gguf_n_split(const gguf_file *g);
const char *gguf_split_path(const gguf_file *g, uint32_t split);

uint64_t       gguf_n_kv(const gguf_file *g);
const gguf_kv *gguf_kv_at(const gguf_file *g, uint64_t i);
const gguf_kv *gguf_find(const gguf_file *g, const char *key); /* NULL: absent */
gguf_str       gguf_kv_key(const gguf_kv *kv);
gguf_type      gguf_kv_type(const gguf_kv *kv);
gguf_type      gguf_kv_elem_type(const gguf_kv *kv); /* of an array */
uint64_t       gguf_kv_count(const gguf_kv *kv);     /* elements of an array, else 1 */
/* Element i of an array, or the value itself with i = 0.  Integers of any width and sign convert
 * when the value fits, floats of both widths convert.  false: another type, a value that does not
 * fit, or i beyond the end; *out is then left alone. */
bool gguf_kv_u64(const gguf_kv *kv, uint64_t i, uint64_t *out);
bool gguf_kv_i64(const gguf_kv *kv, uint64_t i, int64_t *out);
bool gguf_kv_f64(const gguf_kv *kv, uint64_t i, double *out); /* also from integers */
bool gguf_kv_bool(const gguf_kv *kv, uint64_t i, bool *out);
bool gguf_kv_str(const gguf_kv *kv, uint64_t i, gguf_str *out);

/* Typed look-ups with a message: absent and optional leaves *out alone and is KVD_OK; absent and
 * required is KVD_E_CORRUPT naming the key; wrong type or range is KVD_E_CORRUPT naming both. */
kvd_status gguf_get_u32(const gguf_file *g, const char *key, bool required, uint32_t *out,
                        kvd_err *err);
kvd_status gguf_get_f32(const gguf_file *g, const char *key, bool required, float *out,
                        kvd_err *err);
kvd_status gguf_get_bool(const gguf_file *g, const char *key, bool required, bool *out,
                         kvd_err *err);
kvd_status gguf_get_str(const gguf_file *g, const char *key, bool required, gguf_str *out,
                        kvd_err *err);
/* An array of elements of exactly that type; *out is NULL where it is absent and optional. */
kvd_status gguf_get_array(const gguf_file *g, const char *key, bool required, gguf_type elem,
                          const gguf_kv **out, kvd_err *err);
bool       gguf_str_eq(gguf_str s, const char *z);

uint64_t           gguf_n_tensor(const gguf_file *g);
const gguf_tensor *gguf_tensor_at(const gguf_file *g, uint64_t i);
const gguf_tensor *gguf_tensor_find(const gguf_file *g, const char *name); /* O(1) or O(log n) */

/* Appends the whole content (path, sizes, metadata, tensors; arrays longer than 16 shortened with
 * their count) to b as one JSON object. */
void gguf_to_json(const gguf_file *g, kvd_buf *b);

#endif
