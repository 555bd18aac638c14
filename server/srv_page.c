/* SPDX-License-Identifier: Apache-2.0 */
/* srv_page.c - the page at /, whose files (server/page/) are part of the program, and the map that
 * it shows.
 *
 * The files say nothing of the server, so they come without a key; the page asks for one when a
 * route wants it.  Browsers are told to run and load nothing but these files. */
#include "srv_routes.h"

#include <inttypes.h>
#include <string.h>

#define PAGE_POLICY                                                                         \
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src " \
    "'self'; "                                                                              \
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "                         \
    "require-trusted-types-for 'script'; trusted-types 'none'"

/* ---- files ------------------------------------------------------------------------------- */

/* Made by cmake/embed.cmake. */
#define PAGE_FILE(name)                           \
    extern const unsigned char srv_file_##name[]; \
    extern const size_t        srv_file_##name##_len

PAGE_FILE(index_html);
PAGE_FILE(page_css);
PAGE_FILE(page_js);
PAGE_FILE(chat_js);
PAGE_FILE(map_js);
PAGE_FILE(markdown_js);
PAGE_FILE(icon_svg);

typedef struct page_file {
    const char          *path, *type;
    const unsigned char *data;
    const size_t        *len;
} page_file;

static const page_file files[] = {
    { "/", "text/html; charset=utf-8", srv_file_index_html, &srv_file_index_html_len },
    { "/page/page.css", "text/css; charset=utf-8", srv_file_page_css, &srv_file_page_css_len },
    { "/page/page.js", "text/javascript; charset=utf-8", srv_file_page_js, &srv_file_page_js_len },
    { "/page/chat.js", "text/javascript; charset=utf-8", srv_file_chat_js, &srv_file_chat_js_len },
    { "/page/map.js", "text/javascript; charset=utf-8", srv_file_map_js, &srv_file_map_js_len },
    { "/page/markdown.js", "text/javascript; charset=utf-8", srv_file_markdown_js,
      &srv_file_markdown_js_len },
    { "/page/icon.svg", "image/svg+xml", srv_file_icon_svg, &srv_file_icon_svg_len },
};

void srv_route_page(srv *s, srv_call *c)
{
    uint32_t i = 0;

    (void)s;
    while (i + 1 < KVD_COUNTOF(files) && strcmp(files[i].path, c->route->path) != 0)
        i++;
    kvd_assert(strcmp(files[i].path, c->route->path) == 0);
    c->reply.status = 200;
    c->reply.type   = files[i].type;
    c->reply.policy = PAGE_POLICY;
    kvd_buf_put(&c->reply.body, files[i].data, *files[i].len);
}

/* ---- the map ----------------------------------------------------------------------------- */

/* limit 0: there is none. */
static void put_tier(kvd_buf *b, const char *name, uint64_t used, uint64_t limit)
{
    kvd_buf_printf(b, "{\"name\":\"%s\",\"used_bytes\":%" PRIu64 ",\"capacity_bytes\":", name,
                   used);
    if (limit)
        kvd_buf_printf(b, "%" PRIu64 "}", limit);
    else
        kvd_buf_puts(b, "null}");
}

static void put_tiers(kvd_buf *b, const srv *s, const kvd_stats *st)
{
    kvd_buf_puts(b, ",\"tiers\":[");
    put_tier(b, "device", st->kv_device_used_bytes, s->plan.kv_device_bytes);
    if (!s->plan.kv_resident) {
        kvd_buf_putc(b, ',');
        put_tier(b, "host", st->kv_host_used_bytes, s->plan.kv_host_bytes);
    }
    if (s->p.cached) {
        kvd_buf_putc(b, ',');
        put_tier(b, "disk", st->kv_disk_used_bytes, st->kv_disk_limit_bytes);
    }
    kvd_buf_printf(b, "],\"tokens\":{\"used\":%" PRIu64 ",\"capacity\":%" PRIu64 "}",
                   st->kv_used_tokens, st->kv_capacity_tokens);
}

/* Those of slots, and parked ones that hold something. */
static void put_sequences(kvd_buf *b, const srv_view *v, const srv_map *m, uint32_t n_slot)
{
    static const char *const states[] = { "idle", "prompt", "answer" };

    kvd_buf_puts(b, ",\"sequences\":[");
    for (uint32_t i = 0; i < m->n_seq; i++) {
        const srv_slot_view *w = &v->slot[i];
        const kvd_placement *p = &m->place[i];

        if (i >= n_slot && p->device_tokens + p->host_tokens + p->disk_tokens == 0)
            continue;

        kvd_buf_printf(b,
                       "%s{\"id\":%u,\"state\":\"%s\",\"prompt_tokens\":%u,"
                       "\"generated_tokens\":%u,\"device_tokens\":%u,\"host_tokens\":%u,"
                       "\"disk_tokens\":%u,\"window_tokens\":%u}",
                       i ? "," : "", i, i < n_slot ? states[w->state] : "parked", w->n_prompt,
                       w->n_generated, p->device_tokens, p->host_tokens, p->disk_tokens,
                       p->window_tokens);
    }
    kvd_buf_putc(b, ']');
}

/* A share, or null where nothing was counted. */
static void put_share(kvd_buf *b, uint32_t i, bool known, double share)
{
    if (known)
        kvd_buf_printf(b, "%s%.4f", i ? "," : "", share);
    else
        kvd_buf_puts(b, i ? ",null" : "null");
}

static void put_lanes(kvd_buf *b, const srv_map *m)
{
    const uint32_t n = m->n_layer * m->n_kv_head;

    kvd_buf_printf(b, ",\"lanes\":{\"layers\":%u,\"kv_heads\":%u,\"hit_rate\":[", m->n_layer,
                   m->n_kv_head);
    for (uint32_t i = 0; i < n; i++)
        put_share(b, i, m->lane[i].n_selected > 0,
                  (double)m->lane[i].n_hit / (double)m->lane[i].n_selected);
    kvd_buf_puts(b, "],\"mass\":[");
    for (uint32_t i = 0; i < n; i++)
        put_share(b, i, m->lane[i].mass > 0.0, m->lane[i].mass);
    kvd_buf_puts(b, "]}");
}

static void put_steps(kvd_buf *b, const srv_map *m)
{
    const uint64_t first = m->n_step > SRV_MAP_STEPS ? m->n_step - SRV_MAP_STEPS + 1 : 1;

    kvd_buf_puts(b, ",\"steps\":{\"parts\":[");
    for (uint32_t i = 0; i < SRV_N_PART; i++)
        kvd_buf_printf(b, "%s\"%s\"", i ? "," : "", srv_part_name[i]);
    kvd_buf_puts(b, "],\"last\":[");
    for (uint64_t n = first; n <= m->n_step; n++) {
        const srv_map_step *s = &m->step[n % SRV_MAP_STEPS];

        kvd_buf_printf(b,
                       "%s{\"number\":%" PRIu64
                       ",\"answer_tokens\":%u,\"prompt_tokens\":%u,\"us\":[",
                       n > first ? "," : "", s->number, s->n_answer, s->n_prompt);
        for (uint32_t i = 0; i < SRV_N_PART; i++)
            kvd_buf_printf(b, "%s%.1f", i ? "," : "", (double)s->ns[i] * 1e-3);
        kvd_buf_puts(b, "]}");
    }
    kvd_buf_puts(b, "]}");
}

void srv_route_map(srv *s, srv_call *c)
{
    kvd_buf *b = &c->reply.body;
    srv_view v;

    srv_engine_look(s->engine, &v, s->slots);
    srv_engine_look_map(s->engine, s->map);
    c->reply.status = 200;
    kvd_buf_printf(b, "{\"running\":%u,\"waiting\":%u", v.n_running, v.n_waiting);
    put_tiers(b, s, &v.stats);
    put_sequences(b, &v, s->map, s->plan.n_seq);
    put_lanes(b, s->map);
    put_steps(b, s->map);
    kvd_buf_putc(b, '}');
}
