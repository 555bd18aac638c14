/* SPDX-License-Identifier: Apache-2.0 */
/* srv_map.c - what the page shows of the engine: where sequences lie, how well windows do by layer
 * and head, and what the last steps took.
 *
 * The engine thread fills it in between steps, at most every SRV_MAP_NS where that takes a visit of
 * each layer and head; the net thread has a copy.  Both hold the engine's lock meanwhile. */
#include "srv_engine.h"

#include <string.h>

const char *const srv_part_name[SRV_N_PART] = {
    [SRV_PART_QKV] = "qkv",       [SRV_PART_SELECT] = "select", [SRV_PART_FETCH] = "fetch",
    [SRV_PART_ATTEND] = "attend", [SRV_PART_FFN] = "ffn",       [SRV_PART_LOGITS] = "logits",
    [SRV_PART_SEAL] = "seal",     [SRV_PART_REST] = "rest",
};

srv_map *srv_map_new(uint32_t n_layer, uint32_t n_kv_head, uint32_t n_seq)
{
    srv_map *m = kvd_calloc(1, sizeof(*m));

    if (!m)
        return NULL;
    m->n_layer   = n_layer;
    m->n_kv_head = n_kv_head;
    m->n_seq     = n_seq;
    m->lane      = kvd_calloc((size_t)n_layer * n_kv_head, sizeof(*m->lane));
    m->place     = kvd_calloc(n_seq, sizeof(*m->place));
    if (m->lane && m->place)
        return m;
    srv_map_free(m);
    return NULL;
}

void srv_map_free(srv_map *m)
{
    if (!m)
        return;
    kvd_free(m->lane);
    kvd_free(m->place);
    kvd_free(m);
}

void srv_map_copy(srv_map *to, const srv_map *from)
{
    srv_map_lane  *lane  = to->lane;
    kvd_placement *place = to->place;

    kvd_assert(to->n_layer == from->n_layer && to->n_kv_head == from->n_kv_head &&
               to->n_seq == from->n_seq);
    *to       = *from;
    to->lane  = lane;
    to->place = place;
    memcpy(lane, from->lane, (size_t)from->n_layer * from->n_kv_head * sizeof(*lane));
    memcpy(place, from->place, from->n_seq * sizeof(*place));
}

void srv_map_add(srv_map *m, srv_map_step *ended, const kvd_stats *before, const kvd_stats *after)
{
    uint64_t *ns = ended->ns, n = 0;

    if (ended->n_answer + ended->n_prompt == 0)
        return;
    ns[SRV_PART_QKV]    = after->qkv_ns - before->qkv_ns;
    ns[SRV_PART_SELECT] = after->select_ns - before->select_ns;
    ns[SRV_PART_FETCH]  = after->fetch_ns - before->fetch_ns;
    ns[SRV_PART_ATTEND] = after->attend_ns - before->attend_ns + after->dense_ns - before->dense_ns;
    ns[SRV_PART_FFN]    = after->ffn_ns - before->ffn_ns;
    ns[SRV_PART_LOGITS] = after->logits_ns - before->logits_ns;
    ns[SRV_PART_SEAL]   = after->seal_ns - before->seal_ns;
    for (uint32_t i = 0; i < SRV_PART_REST; i++)
        n += ns[i];
    ns[SRV_PART_REST] = ns[SRV_PART_REST] > n ? ns[SRV_PART_REST] - n : 0;
    ended->number     = ++m->n_step;

    m->step[ended->number % SRV_MAP_STEPS] = *ended;
    ended->n_answer = ended->n_prompt = 0;
}

void srv_map_take(srv_map *m, const kvd_session *s, bool always)
{
    const uint64_t now = kvd_now_ns();

    if (!always && now - m->taken_ns < SRV_MAP_NS)
        return;
    m->taken_ns = now;
    for (uint32_t i = 0; i < m->n_layer * m->n_kv_head; i++) {
        srv_map_lane  *l     = &m->lane[i];
        const uint32_t layer = i / m->n_kv_head, head = i % m->n_kv_head;

        kvd_session_get_lane(s, layer, head, &l->n_selected, &l->n_hit);
        l->mass = kvd_session_get_lane_mass(s, layer, head);
    }
    for (uint32_t i = 0; i < m->n_seq; i++) {
        m->place[i].struct_size = sizeof(m->place[i]);
        kvd_seq_placement(s, i, &m->place[i]);
    }
}
