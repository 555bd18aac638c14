/* SPDX-License-Identifier: Apache-2.0 */
/* disk_model.h - what tests of the block store share: a directory, sequences of tokens, and bytes
 * that follow from what they stand for, so that a wrong byte cannot pass. */
#ifndef KVD_TESTS_DISK_MODEL_H
#define KVD_TESTS_DISK_MODEL_H

#include "kv/kv_disk.h"

#define DM_LANES       3u
#define DM_BLOCK       32u /* tokens */
#define DM_CHUNK       4u
#define DM_RECORD      512u
#define DM_AUX         100u
#define DM_TAIL_TOKEN  96u
#define DM_BLOCK_REC   (DM_BLOCK / DM_CHUNK)
#define DM_SEGMENT_REC (DM_BLOCK_REC * KV_DISK_SEGMENT_BLOCKS)
#define DM_PROV_EXACT  0u
#define DM_PROV_SPARSE 1u

extern const kv_disk_bytes dm_prov[2];

/* A new directory in memory where there is one, else on disk. */
void dm_dir_make(char out[256]);
void dm_dir_remove(const char *dir); /* and its files */
void dm_dir_empty(const char *dir);  /* its files */
void dm_dir_copy(const char *from, const char *to);
/* The geometry above, small limits on time. */
kv_disk_params dm_params(const char *dir);

/* The bytes of a record (or aux of a block, or raw tail token) of a sequence: they follow from all
 * tokens up to the block's end, the provenance and the place. */
void dm_record(uint8_t out[DM_RECORD], const int32_t *token, uint64_t block, uint32_t prov,
               uint32_t lane, uint32_t chunk);
void dm_aux(uint8_t out[DM_AUX], const int32_t *token, uint64_t block, uint32_t prov,
            uint32_t lane);
void dm_tail(uint8_t out[DM_TAIL_TOKEN], const int32_t *token, uint64_t position, uint32_t prov,
             uint32_t lane);

typedef struct dm_unit { /* which unit of a sequence */
    kv_disk_kind kind;
    uint64_t     first_block;
    uint32_t     n_tail_token;
    uint32_t     prov; /* of the unit; the blocks before it are exact */
    const char  *salt; /* NULL: none */
} dm_unit;

kv_disk_name dm_name(kv_disk *d, const int32_t *token, const dm_unit *u);
/* begin, all lanes in a shuffled order, commit.  KVD_OK also when the store has it. */
kvd_status dm_put(kv_disk *d, const int32_t *token, const dm_unit *u, kvd_rng *rng, kvd_err *err);
/* Lanes into a put that was begun; n_lane of them. */
kvd_status dm_put_lanes(kv_disk *d, kv_disk_put put, const int32_t *token, const dm_unit *u,
                        uint32_t n_lane, kvd_rng *rng, kvd_err *err);

kvd_status dm_find(kv_disk *d, const int32_t *token, uint64_t n_token, const char *salt,
                   kv_disk_match *m, kvd_err *err);
/* Reads everything of a match (or random parts of it) and compares: KVD_E_DEVICE is a wrong byte,
 * any other failure what the store said. */
kvd_status dm_read(kv_disk *d, const kv_disk_match *m, const int32_t *token, kvd_rng *rng,
                   bool parts, kvd_err *err);
/* How many leading tokens a store that may be damaged finds and reads whole; *err: why no more. */
uint64_t dm_known(kv_disk *d, const int32_t *token, uint64_t n_token, kvd_rng *rng, kvd_err *err);

#endif
