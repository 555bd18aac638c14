/* SPDX-License-Identifier: Apache-2.0 */
/* split_reach.h - private to the split backend.  An op's arguments are looked at when it runs; what
 * its device could not reach is named on standard error and ends the test. */
#ifndef KVD_TEST_SPLIT_REACH_H
#define KVD_TEST_SPLIT_REACH_H

#include "backend/backend.h"

/* split.c: whether [p, p + bytes) lies in one piece of DEVICE or PINNED memory of the backend. */
bool split_reaches(const void *p, uint64_t bytes);

void split_reach_embed(const kvd_embed_args *a);
void split_reach_rms_norm(const kvd_rms_norm_args *a);
void split_reach_head_norm(const kvd_head_norm_args *a);
void split_reach_matmul(const kvd_matmul_args *a);
void split_reach_rope(const kvd_rope_args *a);
void split_reach_swiglu(const kvd_swiglu_args *a);
void split_reach_kv_append(const kvd_kv_append_args *a);
void split_reach_qkv_finish(const kvd_qkv_finish_args *a);
void split_reach_attn(const kvd_attn_args *a);
void split_reach_index_build(const kvd_index_build_args *a);
void split_reach_zone_build(const kvd_zone_build_args *a);
void split_reach_select(const kvd_select_args *a);
void split_reach_attn_span(const kvd_attn_span_args *a);
void split_reach_attn_zone(const kvd_attn_zone_args *a);
void split_reach_window(const kvd_window_args *a);
void split_reach_window_spans(const kvd_window_spans_args *a);
void split_reach_choose(const kvd_choose_args *a);
void split_reach_window_post(const kvd_window_post_args *a);
void split_reach_window_fetch(const kvd_window_fetch_args *a);
void split_reach_record_copy(const kvd_record_copy_args *a);
void split_reach_record_pack(const kvd_record_pack_args *a);
void split_reach_record_unpack(const kvd_record_unpack_args *a);
void split_reach_best(const kvd_best_args *a);
void split_reach_synth(const kvd_synth_args *a);

#endif
