/* SPDX-License-Identifier: Apache-2.0 */
/* cpu_gemm.c - the many-token matrix product: level, passes, items, scratch.
 *
 * Tokens are taken in passes that bound the scratch.  In a pass, activations are packed once (bf16
 * levels), then rows are handed out in groups; a group runs over its K in panels:
 *
 *   for each panel along k                  (its activations, all tokens, fit the L2 cache)
 *     for each 32 rows of the group         unpack the panel (L1)
 *       all tokens                          sums in registers, kept in acc between panels
 *
 * Invariants
 *  (1) how K is cut into panels depends on the weight alone, and every token is summed by itself,
 *      so no result depends on n_token, on the pass or on the threads;
 *  (2) a thread writes only its own panel and acc, and its item's part of y.
 *
 * Scratch: [packed activations][per thread: panel, acc].  Thread: the backend's caller; items run
 * on the pool. */
#include "backend/cpu/cpu_gemm.h"
#include "backend/cpu/cpu_gemm_kernel.h"

#define GEMM_PASS_TOKENS      512           /* tokens of a pass: bounds acc */
#define GEMM_PACK_BYTES       (16ULL << 20) /* packed activations of a pass */
#define GEMM_GROUP_ROWS       256           /* largest row group */
#define GEMM_MID_BYTES        (1ULL << 20)  /* activations beyond this leave the L2 cache, */
#define GEMM_FAR_BYTES        (3ULL << 20)  /* and beyond this come from afar */
#define GEMM_SPLIT_TOKENS     128           /* fewest tokens worth unpacking a panel again */
#define GEMM_ITEMS_PER_THREAD 2             /* fewer: tokens are split too */

typedef struct gemm_job {
    const gemm_kernel     *kernel;
    const kvd_matmul_args *a;
    uint32_t               first_token, n_token; /* of this pass */
    uint32_t               group_rows, n_split, split_tokens;
    uint32_t               first_item[KVD_MATMUL_OUT_MAX + 1];
    uint8_t               *packed;
    uint64_t               tile_bytes; /* packed: one tile of tokens, all k */
    uint8_t               *thread_scratch;
    uint64_t               thread_bytes, panel_bytes;
} gemm_job;

static const gemm_kernel *gemm_kernel_of(const cpu_backend *be)
{
    if (be->isa >= OS_ISA_AMX && !be->precise)
        return &cpu_gemm_amx;
    if (be->isa >= OS_ISA_AVX512)
        return be->bf16 && !be->precise ? &cpu_gemm_avx512bf16 : &cpu_gemm_avx512;
    return be->isa >= OS_ISA_AVX2 ? &cpu_gemm_avx2 : &cpu_gemm_portable;
}

static uint64_t gemm_panel_bytes(const gemm_kernel *k)
{
    return (uint64_t)GEMM_PANEL_ROWS * k->k_block * (k->packed ? 2 : 4);
}

static uint64_t gemm_tile_bytes(uint64_t n_col)
{
    return kvd_div_up(n_col, GEMM_STEP) * GEMM_STEP_BYTES;
}

/* Tokens of the longest pass: a multiple of 32. */
static uint32_t gemm_pass_tokens(const gemm_kernel *k, uint64_t n_col)
{
    uint64_t n = GEMM_PASS_TOKENS;

    if (k->packed)
        n = kvd_min_u64(n, GEMM_PACK_BYTES / gemm_tile_bytes(n_col) * GEMM_TOKEN_TILE);
    return (uint32_t)kvd_max_u64(n / 32 * 32, 32);
}

static uint64_t gemm_thread_bytes(const gemm_kernel *k, uint64_t n_token)
{
    const uint64_t n = kvd_align_up(kvd_min_u64(n_token, GEMM_PASS_TOKENS), GEMM_TOKEN_TILE);

    return gemm_panel_bytes(k) + n * GEMM_GROUP_ROWS * sizeof(float);
}

uint64_t cpu_gemm_scratch_bytes(const cpu_backend *be, const kvd_backend_limits *lim)
{
    const gemm_kernel *k      = gemm_kernel_of(be);
    const uint64_t     tile   = gemm_tile_bytes(lim->n_col);
    const uint64_t     n_tile = kvd_div_up(lim->n_token, GEMM_TOKEN_TILE);
    uint64_t           bytes  = KVD_CACHE_LINE; /* alignment of the scratch itself */

    if (k->packed) /* a pass never exceeds GEMM_PACK_BYTES, save with two tiles */
        bytes += kvd_min_u64(n_tile * tile, kvd_max_u64(GEMM_PACK_BYTES, 2 * tile));
    return bytes + be->base.n_thread * gemm_thread_bytes(k, lim->n_token);
}

/* Measured on one thread of a Sapphire Rapids, 576 rows of 1536: where the two ways cross, or
 * the middle of where the types do (AMX: 13 for Q8_0, 18 for Q6_K).  Float sums over AVX-512 hardly
 * beat dot products with VNNI; precise dot products dequantise again for every few tokens. */
uint32_t cpu_gemm_min_tokens(const cpu_backend *be)
{
    const gemm_kernel *k = gemm_kernel_of(be);

    if (be->precise)
        return 4;
    return k == &cpu_gemm_avx512 && be->vnni ? 64 : k->min_token;
}

/* ---- activations ----------------------------------------------------------------- */

static void gemm_pack_item(void *ctx, uint32_t item, uint32_t thread)
{
    const gemm_job        *j     = ctx;
    const kvd_matmul_args *a     = j->a;
    const uint32_t         token = item * GEMM_TOKEN_TILE;
    const uint32_t         left  = j->n_token - token;

    (void)thread;
    j->kernel->pack(a->x + (j->first_token + token) * a->x_stride, a->x_stride,
                    left < GEMM_TOKEN_TILE ? left : GEMM_TOKEN_TILE, a->n_col,
                    j->packed + item * j->tile_bytes);
}

/* ---- one group of rows ----------------------------------------------------------- */

/* Elements of a panel: K cut evenly, at block boundaries. */
static uint32_t gemm_k_block(const gemm_kernel *k, const kvd_weight *w)
{
    const uint64_t unit    = kvd_max_u64(kvd_dtype_get(w->type)->block_len, GEMM_STEP);
    const uint64_t n_panel = kvd_div_up(w->n_col, k->k_block / unit * unit);

    return (uint32_t)(kvd_div_up(kvd_div_up(w->n_col, n_panel), unit) * unit);
}

/* Unpacks the rows [row, row + b->n_row) at elements [k, k + b->n_k). */
static void gemm_unpack_panel(const gemm_job *j, const kvd_weight *w, uint32_t row, uint32_t k,
                              const gemm_block *b, uint8_t *panel)
{
    for (uint32_t r = 0; r < b->n_row; r += GEMM_ROW_TILE) {
        const uint32_t n = b->n_row - r < GEMM_ROW_TILE ? b->n_row - r : GEMM_ROW_TILE;

        j->kernel->unpack(w->type, (const uint8_t *)w->data + (row + r) * w->row_bytes,
                          w->row_bytes, n, k, b->n_k, panel + r / GEMM_ROW_TILE * b->panel_stride);
    }
}

/* Rows [row, end) and the tokens [token, token + n_token) of the pass. */
static void gemm_group(const gemm_job *j, const kvd_matmul_out *o, uint32_t row, uint32_t end,
                       uint32_t token, uint32_t n_token, uint8_t *scratch)
{
    const gemm_kernel     *kn      = j->kernel;
    const kvd_matmul_args *a       = j->a;
    const uint32_t         k_block = gemm_k_block(kn, &o->w);
    gemm_block             b       = { .n_token      = n_token,
                                       .panel        = scratch,
                                       .panel_stride = j->panel_bytes / 2,
                                       .acc_stride   = j->group_rows,
                                       .y_stride     = o->y_stride,
                                       .add          = o->add };

    for (uint32_t k = 0; k < a->n_col; k += b.n_k) {
        b.n_k   = a->n_col - k < k_block ? a->n_col - k : k_block;
        b.first = k == 0;
        b.last  = k + b.n_k == a->n_col;
        if (kn->packed) {
            b.x = j->packed + token / GEMM_TOKEN_TILE * j->tile_bytes +
                  (uint64_t)(k / GEMM_STEP) * GEMM_STEP_BYTES;
            b.x_stride = j->tile_bytes;
        } else {
            b.x        = a->x + (j->first_token + token) * a->x_stride + k;
            b.x_stride = a->x_stride * sizeof(float);
        }
        for (uint32_t r = row; r < end; r += b.n_row) {
            b.n_row = end - r < GEMM_PANEL_ROWS ? end - r : GEMM_PANEL_ROWS;
            b.acc   = (float *)(void *)(scratch + j->panel_bytes) + (r - row);
            b.y     = o->y + (j->first_token + token) * o->y_stride + r;
            b.bias  = o->bias ? o->bias + r : NULL;
            gemm_unpack_panel(j, &o->w, r, k, &b, scratch);
            kn->block(&b);
        }
    }
}

static void gemm_item(void *ctx, uint32_t item, uint32_t thread)
{
    const gemm_job       *j     = ctx;
    const uint32_t        split = item % j->n_split;
    const uint32_t        token = split * j->split_tokens;
    const uint32_t        left  = j->n_token - token;
    const kvd_matmul_out *o     = j->a->out;
    uint32_t              row, out = 0;

    item /= j->n_split;
    while (item >= j->first_item[out + 1])
        out++;
    o += out;
    row = (item - j->first_item[out]) * j->group_rows;
    j->kernel->begin();
    gemm_group(j, o, row, (uint32_t)kvd_min_u64((uint64_t)row + j->group_rows, o->w.n_row), token,
               left < j->split_tokens ? left : j->split_tokens,
               j->thread_scratch + thread * j->thread_bytes);
    j->kernel->end();
}

/* ---- passes ---------------------------------------------------------------------- */

/* Rows of a group.  The activations pass through the L2 cache once per panel and group, so groups
 * are the larger the further away the activations are; then such that threads get equal shares. */
static uint32_t gemm_group_rows(const gemm_job *j, uint32_t n_thread)
{
    const uint64_t x_bytes = (uint64_t)j->n_token * j->a->n_col * (j->kernel->packed ? 2 : 4);
    const uint64_t wanted = x_bytes <= GEMM_MID_BYTES ? 32 : (x_bytes <= GEMM_FAR_BYTES ? 96 : 192);
    uint64_t       n_row  = 0, per_thread;

    for (uint32_t i = 0; i < j->a->n_out; i++)
        n_row += j->a->out[i].w.n_row;
    per_thread = kvd_max_u64((n_row + wanted * n_thread / 2) / (wanted * n_thread), 1);
    n_row      = kvd_align_up(kvd_div_up(n_row, per_thread * n_thread), GEMM_PANEL_ROWS);
    return (uint32_t)kvd_min_u64(n_row, GEMM_GROUP_ROWS);
}

/* Chooses the size of items.  Returns their number. */
static uint32_t gemm_plan_items(gemm_job *j, uint32_t n_thread)
{
    const kvd_matmul_args *a       = j->a;
    const uint32_t         wanted  = n_thread == 1 ? 1 : n_thread * GEMM_ITEMS_PER_THREAD;
    uint32_t               n_group = 0;

    j->group_rows = gemm_group_rows(j, n_thread);
    for (uint32_t i = 0; i < a->n_out; i++) {
        j->first_item[i] = n_group;
        n_group += (uint32_t)kvd_div_up(a->out[i].w.n_row, j->group_rows);
    }
    j->first_item[a->n_out] = n_group;
    j->n_split              = 1;
    if (n_group < wanted)
        j->n_split = (uint32_t)kvd_min_u64(kvd_div_up(wanted, n_group),
                                           kvd_div_up(j->n_token, GEMM_SPLIT_TOKENS));
    j->split_tokens = (uint32_t)kvd_align_up(kvd_div_up(j->n_token, j->n_split), 32);
    j->n_split      = (uint32_t)kvd_div_up(j->n_token, j->split_tokens);
    return n_group * j->n_split;
}

static void gemm_pass(cpu_backend *be, gemm_job *j)
{
    const uint32_t n_tile = (uint32_t)kvd_div_up(j->n_token, GEMM_TOKEN_TILE);
    const uint32_t n_item = gemm_plan_items(j, os_pool_n_thread(be->pool));

    j->thread_scratch = j->packed + (j->kernel->packed ? n_tile * j->tile_bytes : 0);
    kvd_assert(j->thread_scratch + os_pool_n_thread(be->pool) * j->thread_bytes <=
               (uint8_t *)be->mm_scratch + be->mm_scratch_bytes);
    if (j->kernel->packed)
        os_pool_run(be->pool, n_tile, gemm_pack_item, j);
    os_pool_run(be->pool, n_item, gemm_item, j);
}

void cpu_gemm(cpu_backend *be, const kvd_matmul_args *a)
{
    const uintptr_t scratch = kvd_align_up((uintptr_t)be->mm_scratch, KVD_CACHE_LINE);
    gemm_job        j       = { .kernel     = gemm_kernel_of(be),
                                .a          = a,
                                .packed     = (uint8_t *)scratch,
                                .tile_bytes = gemm_tile_bytes(a->n_col) };
    const uint32_t  pass    = gemm_pass_tokens(j.kernel, a->n_col);

    j.panel_bytes  = gemm_panel_bytes(j.kernel);
    j.thread_bytes = gemm_thread_bytes(j.kernel, a->n_token);
    for (uint32_t t = 0; t < a->n_token; t += j.n_token) {
        j.first_token = t;
        j.n_token     = a->n_token - t < pass ? a->n_token - t : pass;
        gemm_pass(be, &j);
    }
}
