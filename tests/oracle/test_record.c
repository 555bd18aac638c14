/* SPDX-License-Identifier: Apache-2.0 */
/* test_record.c - packed records: every level gives the same bits, and every element comes back
 * within half a step of its group's range.  --seed N repeats a run. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "os/os.h"

#define N_LANE 3u

static uint64_t test_seed = 1;

typedef struct record_case {
    kvd_record_format f;
    uint64_t          lane_raw, lane_packed, lane_param;
    uint8_t          *raw, *packed, *param, *back;
    uint64_t          raw_off[N_LANE], packed_off[N_LANE], param_off[N_LANE];
} record_case;

/* The keys of VALUES come from an index, whose bytes are the same at every level. */
static void index_lanes(const record_case *c, kvd_backend *b, kvd_stream *st)
{
    const kvd_kv_layout        kv = { .type         = c->f.raw,
                                      .n_kv_head    = 1,
                                      .head_dim     = c->f.head_dim,
                                      .chunk_tokens = c->f.chunk_tokens,
                                      .block_tokens = c->f.block_tokens,
                                      .record_bytes = kvd_record_raw_bytes(&c->f),
                                      .head_stride  = c->lane_raw,
                                      .pool         = c->raw };
    const kvd_index_build_args a  = { .n_block = N_LANE,
                                      .kv      = kv,
                                      .index   = { .desc        = c->f.keys,
                                                   .n_kv_head   = 1,
                                                   .head_stride = c->lane_param,
                                                   .pool        = c->param },
                                      .block   = c->raw_off,
                                      .iblock  = c->param_off };
    const kvd_backend_limits   l  = { .n_token   = 1,
                                      .n_seq     = 1,
                                      .n_col     = 16,
                                      .n_head    = 1,
                                      .n_kv_head = 1,
                                      .head_dim  = c->f.head_dim,
                                      .n_ctx     = N_LANE * 256,
                                      .n_chunk   = N_LANE * 256 / c->f.chunk_tokens };

    assert_int_equal(b->ops->reserve(b, &l, NULL), KVD_OK);
    assert_int_equal(b->ops->index_build(st, &a, NULL), KVD_OK);
}

static void run(record_case *c, const char *name, const char *isa, uint32_t n_thread)
{
    const kvd_backend_params p   = { .name = name, .cpu_isa = isa, .n_thread = n_thread };
    const uint32_t           per = c->f.block_tokens / c->f.chunk_tokens;
    uint64_t                *src = kvd_calloc(N_LANE * per, 8), *dst = kvd_calloc(N_LANE * per, 8);
    uint64_t                *param = kvd_calloc(N_LANE * per, 8);
    uint32_t                *chunk = kvd_calloc(N_LANE * per, 4);
    kvd_backend             *b;
    kvd_stream              *st;

    for (uint32_t i = 0; i < N_LANE * per; i++) {
        chunk[i] = (i * 7 + 3) % per;
        src[i]   = c->packed_off[i / per] + chunk[i] * kvd_record_bytes(&c->f);
        dst[i]   = c->raw_off[i / per] + chunk[i] * kvd_record_raw_bytes(&c->f);
        param[i] = c->param_off[i / per];
    }
    assert_int_equal(kvd_backend_open(&b, &p, NULL), KVD_OK);
    assert_int_equal(b->ops->stream_open(b, &st, NULL), KVD_OK);
    if (c->f.type == KVD_RECORD_VALUES)
        index_lanes(c, b, st);
    assert_int_equal(b->ops->record_pack(st,
                                         &(kvd_record_pack_args){ .format    = c->f,
                                                                  .n         = N_LANE,
                                                                  .src       = c->raw,
                                                                  .param     = c->param,
                                                                  .dst       = c->packed,
                                                                  .src_off   = c->raw_off,
                                                                  .param_off = c->param_off,
                                                                  .dst_off   = c->packed_off },
                                         NULL),
                     KVD_OK);
    assert_int_equal(b->ops->record_unpack(st,
                                           &(kvd_record_unpack_args){ .format    = c->f,
                                                                      .n         = N_LANE * per,
                                                                      .src       = c->packed,
                                                                      .param     = c->param,
                                                                      .dst       = c->back,
                                                                      .src_off   = src,
                                                                      .param_off = param,
                                                                      .dst_off   = dst,
                                                                      .chunk     = chunk },
                                           NULL),
                     KVD_OK);
    b->ops->stream_close(st);
    kvd_backend_close(b);
    kvd_free(src);
    kvd_free(dst);
    kvd_free(param);
    kvd_free(chunk);
}

static float element(const record_case *c, const uint8_t *base, uint32_t lane, uint32_t t, bool v,
                     uint32_t i)
{
    const uint64_t e  = c->f.raw == KVD_DTYPE_F32 ? 4 : 2;
    const uint32_t ct = c->f.chunk_tokens;
    const uint8_t *at = base + c->raw_off[lane] + t / ct * kvd_record_raw_bytes(&c->f) +
                        ((t % ct + (v ? ct : 0)) * (uint64_t)c->f.head_dim + i) * e;
    uint16_t h;
    float    x;

    if (e == 4) {
        memcpy(&x, at, 4);
        return x;
    }
    memcpy(&h, at, 2);
    return kvd_bf16_to_f32(h);
}

/* The group that an element shares its parameters with: a channel of 64 keys, or a row of V. */
static void check_element(const record_case *c, uint32_t lane, uint32_t t, bool v, uint32_t i)
{
    const float x = element(c, c->raw, lane, t, v, i), y = element(c, c->back, lane, t, v, i);
    static const float tops[] = {
        [KVD_INDEX_INT8] = 255.0f, [KVD_INDEX_INT4] = 15.0f, [KVD_INDEX_INT2] = 3.0f
    };
    const bool  values = c->f.type == KVD_RECORD_VALUES;
    const float top    = values                         ? tops[c->f.keys.key_elem]
                         : c->f.type == KVD_RECORD_INT8 ? 255.0f
                                                        : 15.0f;
    float       lo = x, hi = x, bound;

    if (values && (v || c->f.keys.key_elem == KVD_INDEX_BF16)) {
        assert_true(kvd_f32_to_bits(x) == kvd_f32_to_bits(y));
        return;
    }
    for (uint32_t k = 0; k < (v ? c->f.head_dim : 64); k++) {
        const float e = v ? element(c, c->raw, lane, t, true, k)
                          : element(c, c->raw, lane, t / 64 * 64 + k, false, i);

        lo = e < lo ? e : lo;
        hi = e > hi ? e : hi;
    }
    /* half a step, binary16 of the parameters, bf16 of the result */
    bound = (hi - lo) / top * 0.501f + (fabsf(lo) + (hi - lo)) / 1500.0f +
            (c->f.raw == KVD_DTYPE_F32 ? 0.0f : fabsf(x) / 250.0f) + 1e-6f;
    if (!(fabsf(x - y) <= bound))
        fail_msg("lane %u token %u %c %u: %g became %g, bound %g", lane, t, v ? 'V' : 'K', i,
                 (double)x, (double)y, (double)bound);
}

static void fill(record_case *c, kvd_rng *rng)
{
    const uint64_t n = N_LANE * c->lane_raw / (c->f.raw == KVD_DTYPE_F32 ? 4 : 2);

    for (uint64_t i = 0; i < n; i++) {
        const uint32_t channel = (uint32_t)(i % c->f.head_dim);
        const float    x       = (kvd_rng_f32(rng) * 4.0f - 2.0f) * (float)(1 + channel % 5) +
                        (channel % 16 == 3 ? 60.0f : 0.0f); /* as a key bias makes them */
        const uint16_t h = kvd_f32_to_bf16(x);

        if (c->f.raw == KVD_DTYPE_F32)
            memcpy(c->raw + 4 * i, &x, 4);
        else
            memcpy(c->raw + 2 * i, &h, 2);
    }
}

static void check_case(kvd_record_type type, kvd_dtype raw, uint32_t chunk, uint32_t dim,
                       kvd_index_kind kind, kvd_index_elem key)
{
    record_case c = {
        .f = { type, raw, chunk, 256, dim, { kind, KVD_INDEX_INT4, key, false, chunk, 256, dim } }
    };
    const uint32_t per = 256 / chunk;
    uint8_t       *packed, *param, *back;
    kvd_rng        rng;

    kvd_rng_seed(&rng, test_seed);
    c.lane_raw    = per * kvd_record_raw_bytes(&c.f);
    c.lane_packed = per * kvd_record_bytes(&c.f);
    c.lane_param =
        type == KVD_RECORD_VALUES ? kvd_index_lane_bytes(&c.f.keys) : kvd_record_param_bytes(&c.f);
    c.raw    = kvd_malloc(N_LANE * c.lane_raw);
    c.back   = kvd_calloc(N_LANE, c.lane_raw);
    c.packed = kvd_calloc(N_LANE, c.lane_packed);
    c.param  = kvd_calloc(N_LANE, c.lane_param);
    packed   = kvd_malloc(N_LANE * c.lane_packed);
    param    = kvd_malloc(N_LANE * c.lane_param);
    back     = kvd_malloc(N_LANE * c.lane_raw);
    for (uint32_t i = 0; i < N_LANE; i++) {
        c.raw_off[i]    = (N_LANE - 1 - i) * c.lane_raw;
        c.packed_off[i] = i * c.lane_packed;
        c.param_off[i]  = i * c.lane_param;
    }
    fill(&c, &rng);
    run(&c, "ref", NULL, 1);
    memcpy(packed, c.packed, N_LANE * c.lane_packed);
    memcpy(param, c.param, N_LANE * c.lane_param);
    memcpy(back, c.back, N_LANE * c.lane_raw);
    for (uint32_t t = 0; t < 256; t += 1 + t % 5) {
        for (uint32_t i = 0; i < dim; i++) {
            check_element(&c, t % N_LANE, t, false, i);
            check_element(&c, t % N_LANE, t, true, i);
        }
    }
    for (int isa = OS_ISA_PORTABLE; isa <= (int)os_cpu_get()->isa; isa++) {
        memset(c.back, 0, N_LANE * c.lane_raw);
        run(&c, "cpu", os_isa_name((os_isa)isa), 2);
        assert_memory_equal(c.packed, packed, N_LANE * c.lane_packed);
        assert_memory_equal(c.param, param, N_LANE * c.lane_param);
        assert_memory_equal(c.back, back, N_LANE * c.lane_raw);
    }
    kvd_free(c.raw);
    kvd_free(c.back);
    kvd_free(c.packed);
    kvd_free(c.param);
    kvd_free(packed);
    kvd_free(param);
    kvd_free(back);
}

static void test_all_formats(void **state)
{
    (void)state;
    for (int type = KVD_RECORD_INT8; type <= KVD_RECORD_INT4; type++) {
        check_case((kvd_record_type)type, KVD_DTYPE_BF16, 4, 64, 0, 0);
        check_case((kvd_record_type)type, KVD_DTYPE_BF16, 8, 128, 0, 0);
        check_case((kvd_record_type)type, KVD_DTYPE_BF16, 16, 80, 0, 0);
        check_case((kvd_record_type)type, KVD_DTYPE_F32, 4, 16, 0, 0);
        check_case((kvd_record_type)type, KVD_DTYPE_F32, 4, 10, 0, 0);
    }
}

/* V as it is, K within half a step of the index's range; bf16 keys of bf16 records as they are. */
static void test_values(void **state)
{
    (void)state;
    for (int key = KVD_INDEX_BF16; key <= KVD_INDEX_INT2; key++) {
        for (int i = 0; i < 2; i++) {
            const kvd_index_kind kind = i ? KVD_INDEX_CASCADE : KVD_INDEX_QUANT_K;

            check_case(KVD_RECORD_VALUES, KVD_DTYPE_BF16, 4, 64, kind, (kvd_index_elem)key);
            check_case(KVD_RECORD_VALUES, KVD_DTYPE_BF16, 8, 128, kind, (kvd_index_elem)key);
            check_case(KVD_RECORD_VALUES, KVD_DTYPE_BF16, 16, 80, kind, (kvd_index_elem)key);
            if (key == KVD_INDEX_BF16)
                continue; /* which float keys do not survive */
            check_case(KVD_RECORD_VALUES, KVD_DTYPE_F32, 4, 16, kind, (kvd_index_elem)key);
            check_case(KVD_RECORD_VALUES, KVD_DTYPE_F32, 4, 10, kind, (kvd_index_elem)key);
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all_formats),
                                        cmocka_unit_test(test_values) };

    if (argc == 3 && strcmp(argv[1], "--seed") == 0)
        test_seed = strtoull(argv[2], NULL, 0);
    print_message("seed %llu\n", (unsigned long long)test_seed);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
