/* SPDX-License-Identifier: Apache-2.0 */
/* cli_bench.h - private to cli_bench_shape.c and cli_bench_grow.c: a case of bench --shape. */
#ifndef KVD_CLI_BENCH_H
#define KVD_CLI_BENCH_H

#include "cli.h"

#define BENCH_SEQS_MAX 256u

typedef struct shape_case {
    kvd_model           *m;
    const kvd_opts      *o;
    kvd_session         *s;
    kvd_session_params   params; /* complete but for what a session is opened for */
    kvd_attention_params attention;
    kvd_plan             plan;
    uint32_t             context, n_step;
    uint32_t             n_warm;        /* steps before those that count */
    uint32_t             n_seq, n_fill; /* sequences that take part; that have their context */
    bool                 dense;
    double              *ms; /* [n_step + n_warm] */
    double               number[BENCH_N_NUMBER];
} shape_case;

/* Options as parameters, for up to n_seq sequences; close frees what a case holds, once begun. */
kvd_status bench_case_begin(shape_case *c, kvd_model *m, const kvd_opts *o, uint32_t context,
                            uint32_t n_seq, kvd_err *err);
void       bench_case_close(shape_case *c);
/* A session for n_seq sequences and so many runs; one that is open is closed first. */
kvd_status bench_case_open(shape_case *c, uint32_t n_seq, uint32_t n_run, kvd_err *err);
/* Made-up K and V for the first n_seq sequences, as far as they have none. */
kvd_status bench_case_fill(shape_case *c, uint32_t n_seq, kvd_err *err);
/* Steps as they are, after warm-up; fills the numbers that come of them. */
kvd_status bench_case_run(shape_case *c, kvd_err *err);

/* --grow: numbers of sequences from n_seq on, doubled as long as they fit, then the largest that
 * does; a row each. */
kvd_status bench_grow(kvd_model *m, const kvd_opts *o, uint32_t context, uint32_t n_seq, bool *any,
                      kvd_err *err);

#endif
