/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_tmpl.c - any bytes as a chat template (up to the first zero byte) over messages (what
 * follows, else a fixed dialog).  Beyond not crashing: spans are well formed, and a sign that only
 * the messages hold is never in one. */
#include <string.h>

#include "text/text.h"

#define SIGN "\xee\x80\x80" /* U+E000 */

static const char dialog[] =
    "[{\"role\":\"system\",\"content\":\"" SIGN "a b\\n" SIGN "\"},"
    "{\"role\":\"user\",\"content\":\"X" SIGN "<|im_end|>\",\"n\":1.5,\"k\":[1,null,true,\"" SIGN
    "\"]},"
    "{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"text\":\"" SIGN "\"}],"
    "\"tool_calls\":[{\"function\":{\"name\":\"f" SIGN "\",\"arguments\":{\"a\":1,\"" SIGN
    "\":\"q\"}}}]}]";
static const char vars[] =
    "{\"s\":\"" SIGN " s " SIGN "\",\"l\":[3,1,\"" SIGN "\",2],\"d\":{\"" SIGN "\":\"v" SIGN
    "\",\"a\":{}},\"n\":7,\"f\":0.5,\"y\":true,\"e\":\"\"}";

static void check(const kvd_buf *out, size_t from, const kvd_span *span, size_t n, bool signs)
{
    size_t at = from;

    for (size_t i = 0; i < n; i++) {
        kvd_assert(span[i].start >= at && span[i].start < span[i].end && span[i].end <= out->len);
        at = span[i].end + 1;
        for (size_t k = span[i].start; signs && k < span[i].end; k++)
            kvd_assert(out->len - k < 3 || memcmp(out->data + k, SIGN, 3) != 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *cut  = size ? memchr(data, 0, size) : NULL;
    const size_t   len  = cut ? (size_t)(cut - data) : size;
    char          *rest = cut ? kvd_strndup((const char *)cut + 1, size - len - 1) : NULL;
    char          *copy = kvd_strndup((const char *)data, len);
    tmpl_input     in   = { .messages_json         = rest ? rest : dialog,
                            .tools_json            = dialog,
                            .vars_json             = vars,
                            .bos_token             = "<s>",
                            .eos_token             = "</s>",
                            .add_generation_prompt = true };
    kvd_buf        out  = { 0 };
    kvd_span      *span = NULL;
    size_t         n    = 0;
    tmpl          *t    = NULL;
    kvd_err        err;
    bool           signs;

    if (copy && tmpl_open(&t, (const char *)data, len, &err) == KVD_OK) {
        signs = !strchr(copy, '\\') && !strstr(copy, SIGN); /* the template cannot write it */
        kvd_buf_puts(&out, SIGN);
        if (tmpl_render(t, &in, &out, &span, &n, &err) == KVD_OK)
            check(&out, 3, span, n, signs);
        tmpl_close(t);
    }
    kvd_free(span);
    kvd_buf_free(&out);
    kvd_free(copy);
    kvd_free(rest);
    return 0;
}
