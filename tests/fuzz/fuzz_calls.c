/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_calls.c - any bytes as a model's text: the events, deltas joined, are the same however it is
 * cut into pieces, also where it ends in the middle, and every call that has begun ends. */
#include <string.h>

#include "text/text.h"

static void take(tool_stream *s, kvd_buf *out, int *last, int *open)
{
    kvd_tool_event e;

    while (tool_stream_next(s, &e)) {
        const int kind = (int)e.kind;

        kvd_assert(e.text[e.len] == 0);
        *open += e.kind == KVD_TOOL_EVENT_BEGIN;
        *open -= e.kind == KVD_TOOL_EVENT_END;
        kvd_assert(*open == 0 || *open == 1);
        if (e.kind == KVD_TOOL_EVENT_TEXT || e.kind == KVD_TOOL_EVENT_REASONING)
            kvd_assert(*open == 0);
        if (kind != *last || e.kind == KVD_TOOL_EVENT_BEGIN || e.kind == KVD_TOOL_EVENT_END) {
            kvd_buf_putc(out, (char)('0' + kind));
            kvd_buf_putc(out, (char)('0' + e.complete));
        }
        *last = kind;
        kvd_buf_put(out, e.text, e.len);
    }
}

static void run(const tool_desc *d, const char *text, size_t len, size_t piece, bool more,
                kvd_buf *out)
{
    tool_stream *s;
    kvd_err      err;
    int          last = -1, open = 0;

    kvd_buf_puts(out, "");
    kvd_assert(tool_stream_open(&s, d, &err) == KVD_OK);
    for (size_t at = 0, n; at < len; at += n) {
        n = piece < len - at ? piece : len - at;
        kvd_assert(tool_stream_feed(s, text + at, n, &err) == KVD_OK);
        take(s, out, &last, &open);
    }
    kvd_assert((more ? tool_stream_cut(s, true, &err) : tool_stream_flush(s, &err)) == KVD_OK);
    take(s, out, &last, &open);
    kvd_assert(open == 0);
    tool_stream_close(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const size_t piece[] = { 1, 2, 3, 7, 64 };
    const char         *text    = (const char *)data + 1;
    tool_desc           d;

    if (size < 2)
        return 0;
    d = (tool_desc){ .format    = (kvd_tool_format)(data[0] % (KVD_TOOLS_QWEN_XML + 1)),
                     .reasoning = (kvd_reasoning)(data[0] / 16 % (KVD_REASONING_HARMONY + 1)),
                     .state     = (kvd_reasoning_state)(data[0] / 64 % 3) };
    if (d.format == KVD_TOOLS_NONE && d.reasoning == KVD_REASONING_NONE)
        return 0;
    for (size_t i = 0; i < 2 * KVD_COUNTOF(piece); i++) {
        kvd_buf whole = { 0 }, cut = { 0 };

        run(&d, text, size - 1, size, i & 1, &whole);
        run(&d, text, size - 1, piece[i / 2], i & 1, &cut);
        kvd_assert(whole.len == cut.len && memcmp(whole.data, cut.data, cut.len) == 0);
        kvd_buf_free(&whole);
        kvd_buf_free(&cut);
    }
    return 0;
}
