/* SPDX-License-Identifier: Apache-2.0 */
/* gguf_impl.h - what the files of format/ share; private to the directory.
 *
 * gguf.c        opens a file or a split set, owns the object
 * gguf_read.c   bounds-checked cursor, parser of metadata and tensor directory
 * gguf_index.c  names in sorted order: look-up and duplicates
 * gguf_value.c  accessors and typed look-ups
 * gguf_json.c   the whole content as JSON */
#ifndef KVD_FORMAT_GGUF_IMPL_H
#define KVD_FORMAT_GGUF_IMPL_H

#include "format/format.h"
#include "os/os.h"

/* Limits of ours, each far above what real files hold (a few dozen keys, a few thousand tensors);
 * they and the sizes below keep memory within 4 x the header + 16 MiB. */
#define GGUF_MAX_KV     65536u
#define GGUF_MAX_TENSOR (1u << 20) /* of the whole set */
#define GGUF_MAX_SPLIT  1000u
#define GGUF_MAX_KEY    65535u /* bytes; the format's own limit */
#define GGUF_MAX_NAME   256u   /* bytes of a tensor's name; the format says 64 */
#define GGUF_MIN_ALIGN  8u     /* the format's own limit; floats may be read in place */
#define GGUF_MAX_ALIGN  (1u << 24)
#define GGUF_DEF_ALIGN  32u

struct gguf_kv {
    gguf_str       key;   /* first, so that gguf_index.c can sort */
    const uint8_t *val;   /* first byte of the value, or of an array's first element */
    uint64_t       count; /* of an array; 1 otherwise */
    uint32_t *index; /* of an array of strings: where each begins, relative to val; else NULL */
    uint8_t   type, elem_type;
};

typedef struct gguf_kv_set {
    gguf_kv  *kv;
    uint32_t *order; /* [2n]: sorted by key, then scratch */
    uint32_t  n;
} gguf_kv_set;

typedef struct gguf_part { /* one file */
    os_map   map;
    char    *path;
    uint64_t tensor_pos; /* where the tensor directory begins */
    uint64_t data_pos;   /* where tensor data begins */
    uint64_t n_tensor;
    uint32_t version, alignment;
} gguf_part;

struct gguf_file {
    gguf_part   *part;
    uint32_t     n_part;
    gguf_kv_set  meta;         /* of the first file */
    gguf_tensor *tensor;       /* of all files, in file order */
    uint32_t    *tensor_order; /* [2 n_tensor] */
    uint64_t     n_tensor, tensor_bytes, heap_bytes;
};

/* ---- gguf_read.c ----------------------------------------------------------------- */

/* A cursor; pos <= bytes always. */
typedef struct gguf_reader {
    const uint8_t *data;
    uint64_t       bytes, pos;
    const char    *path;
    kvd_err       *err;
} gguf_reader;

/* Fails with "PATH: offset AT: " before the message. */
kvd_status gguf_bad(const gguf_reader *r, kvd_status code, uint64_t at, const char *fmt, ...)
    KVD_PRINTF(4, 5);
/* s for a message: quoted, shortened, with unprintable bytes as '?'.  Returns buf. */
#define GGUF_QUOTE_BYTES 80
const char *gguf_quote(gguf_str s, char buf[GGUF_QUOTE_BYTES]);
const char *gguf_type_name(uint32_t type); /* "u32"; "?" for an unknown id */

/* Parses everything of p but its tensors (p->map and p->path are set); kvs is the caller's to
 * free, also on failure.  The tensor directory is only walked, so that its extent is known to be
 * real before memory is taken for it. */
kvd_status gguf_read_head(gguf_part *p, gguf_kv_set *kvs, uint64_t *heap_bytes, kvd_err *err);
/* Parses the directory found by gguf_read_head() into out[p->n_tensor]. */
kvd_status gguf_read_tensors(const gguf_part *p, uint32_t split, gguf_tensor *out, kvd_err *err);
void       gguf_kv_set_free(gguf_kv_set *s);

/* ---- gguf_index.c ---------------------------------------------------------------- */

/* Items are n structs of stride bytes that begin with a gguf_str.  Sorts their numbers by name
 * into order[0..n), with order[n..2n) as scratch, in O(n log n) whatever the names are.  Returns
 * whether all names differ; if not, *dup is the number of one that occurs twice. */
bool gguf_index_build(const void *item, size_t stride, uint32_t n, uint32_t *order, uint32_t *dup);
/* The item of that name, or NULL. */
const void *gguf_index_find(const void *item, size_t stride, uint32_t n, const uint32_t *order,
                            const char *name);

/* ---- gguf_value.c ---------------------------------------------------------------- */

const gguf_kv *gguf_kv_find(const gguf_kv_set *s, const char *key);
uint64_t       gguf_load_u64(const uint8_t *p);

#endif
