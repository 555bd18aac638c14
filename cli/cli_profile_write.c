/* SPDX-License-Identifier: Apache-2.0 */
/* cli_profile_write.c - a profile's counts as CSV, and its hit rates as a picture. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>

#include "cli_profile.h"
#include "os/os.h"

extern char **environ;

const char *const profile_policy_names[ENGINE_PROFILE_POLICIES] = { "ema", "lookahead", "lru",
                                                                    "lfu", "random",    "optimum" };

uint32_t profile_slots(const profile_result *r, uint32_t cap)
{
    return (uint32_t)((float)r->budget * engine_profile_cap[cap]);
}

uint32_t profile_nearest_cap(double wish)
{
    uint32_t best = 0;

    for (uint32_t c = 1; c < ENGINE_PROFILE_CAPS; c++) {
        if (fabs((double)engine_profile_cap[c] - wish) <
            fabs((double)engine_profile_cap[best] - wish))
            best = c;
    }
    return best;
}

/* ---- rows ---------------------------------------------------------------------------- */

static void put_row(kvd_buf *b, uint32_t lane, const profile_result *r, const char *what,
                    const char *policy, double size, uint64_t hit, double chunks)
{
    kvd_buf_printf(b, "%u,%u,%s,%s,%g,%" PRIu64 ",%" PRIu64 ",%.1f\n", lane / r->n_kv_head,
                   lane % r->n_kv_head, what, policy, size, r->lane[lane].n_select, hit, chunks);
}

static void put_lane(kvd_buf *b, const profile_result *r, uint32_t lane)
{
    const engine_lane_profile *p = &r->lane[lane];

    for (uint32_t policy = 0; policy < ENGINE_PROFILE_POLICIES; policy++) {
        for (uint32_t c = 0; c < ENGINE_PROFILE_CAPS; c++)
            put_row(b, lane, r, "window", profile_policy_names[policy],
                    (double)engine_profile_cap[c], p->hit[policy][c], profile_slots(r, c));
    }
    for (uint32_t u = 0; u < ENGINE_PROFILE_UNIONS; u++)
        put_row(b, lane, r, "union", "", engine_profile_union[u], p->union_hit[u],
                (double)p->union_size[u] / (double)r->n_step);
    for (uint32_t t = 0; t < ENGINE_PROFILE_TOPS; t++)
        put_row(b, lane, r, "top", "", (double)engine_profile_top[t], p->top_hit[t],
                (double)engine_profile_top[t] * r->budget);
}

void profile_write_csv(const profile_result *r, kvd_buf *out)
{
    kvd_buf_printf(out,
                   "# model=%s\n# texts=%u\n# length=%u\n# steps=%" PRIu64
                   "\n# budget_chunks=%u\n# chunk_tokens=%u\n# record_bytes=%" PRIu64
                   "\n# layers=%u\n# kv_heads=%u\n# index=%s\n"
                   "layer,kv_head,what,policy,size,selected,hit,chunks\n",
                   r->model, r->n_text, r->length, r->n_step, r->budget, r->chunk_tokens,
                   r->record_bytes, r->n_layer, r->n_kv_head, cli_index_name(r->o));
    for (uint32_t lane = 0; lane < r->n_layer * r->n_kv_head; lane++)
        put_lane(out, r, lane);
}

/* ---- picture ------------------------------------------------------------------------- */

static void put_quoted(kvd_buf *b, const char *text)
{
    kvd_buf_putc(b, '\'');
    for (; *text; text++) {
        if (*text == '\'')
            kvd_buf_putc(b, '\'');
        if ((unsigned char)*text >= ' ')
            kvd_buf_putc(b, *text);
    }
    kvd_buf_putc(b, '\'');
}

static void put_program(kvd_buf *b, const profile_result *r, const char *path)
{
    const uint32_t cap = profile_nearest_cap(kvd_opts_num(r->o, "cap"));
    const size_t   n   = strlen(path);
    const bool     png = n > 4 && strcmp(path + n - 4, ".png") == 0;
    char           title[160], label[128];

    snprintf(title, sizeof(title),
             "hits (%%) of windows of %g budgets, %s, %u of %u tokens, %" PRIu64 " steps",
             (double)engine_profile_cap[cap], profile_policy_names[r->policy],
             r->budget * r->chunk_tokens, r->length, r->n_step);
    kvd_buf_printf(b, "set terminal %s size 900,360\nset output ", png ? "png" : "svg");
    put_quoted(b, path);
    kvd_buf_puts(b, "\nset xlabel ");
    snprintf(label, sizeof(label), "layer of %.100s", r->model);
    put_quoted(b, label);
    kvd_buf_puts(b, " noenhanced\nset title ");
    put_quoted(b, title);
    kvd_buf_printf(b,
                   " noenhanced\nset ylabel 'KV head'\nset cbrange [0:100]\n"
                   "set palette defined (0 '#2b2d6e', 50 '#d9d9d9', 100 '#b2182b')\nunset key\n"
                   "set xrange [-0.5:%u.5]\nset yrange [-0.5:%u.5]\nset ytics 1\n$hits << EOD\n",
                   r->n_layer - 1, r->n_kv_head - 1);
    for (uint32_t lane = 0; lane < r->n_layer * r->n_kv_head; lane++)
        kvd_buf_printf(b, "%u %u %.2f\n", lane / r->n_kv_head, lane % r->n_kv_head,
                       100.0 * (double)r->lane[lane].hit[r->policy][cap] /
                           (double)kvd_max_u64(1, r->lane[lane].n_select));
    kvd_buf_puts(b, "EOD\nplot $hits using 1:2:3 with image\n");
}

static kvd_status run_gnuplot(char *program, kvd_err *err)
{
    char *const argv[] = { (char[]){ "gnuplot" }, program, NULL };
    pid_t       pid;
    int         status, rc = posix_spawnp(&pid, argv[0], NULL, NULL, argv, environ);

    if (rc == ENOENT) {
        fprintf(stderr, "kvdrive: no gnuplot here; it draws %s\n", program);
        return KVD_OK;
    }
    if (rc != 0)
        return kvd_fail(err, KVD_E_IO, rc, "starting gnuplot");
    while (waitpid(pid, &status, 0) < 0) {
        if (errno != EINTR)
            return kvd_fail(err, KVD_E_IO, errno, "waiting for gnuplot");
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return kvd_fail(err, KVD_E_IO, 0, "gnuplot refused %s", program);
    return KVD_OK;
}

kvd_status profile_draw(const profile_result *r, const char *path, kvd_err *err)
{
    kvd_buf    program = { 0 }, name = { 0 };
    kvd_status st;

    put_program(&program, r, path);
    kvd_buf_printf(&name, "%s.gp", path);
    kvd_buf_putc(&name, 0);
    if (program.oom || name.oom)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory for the picture");
    else
        st = os_file_replace(name.data, program.data, program.len, err);
    if (st == KVD_OK)
        st = run_gnuplot(name.data, err);
    kvd_buf_free(&program);
    kvd_buf_free(&name);
    return st;
}
