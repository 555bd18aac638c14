/* SPDX-License-Identifier: Apache-2.0 */
/* srv_routes.c - every route there is; a test walks this table by asking for each without a key. */
#include "srv_routes.h"

#include <string.h>

const srv_route srv_routes[] = {
    { "GET", "/health", true, false, srv_route_health },
    { "GET", "/v1/health", true, false, srv_route_health },
    { "HEAD", "/health", true, false, srv_route_health },
    { "HEAD", "/v1/health", true, false, srv_route_health },
    { "GET", "/v1/models", false, false, srv_route_models },
    { "GET", "/models", false, false, srv_route_models },
    { "GET", "/v1/models/", false, false, srv_route_model },
    { "GET", "/props", false, false, srv_route_props },
    { "GET", "/metrics", false, false, srv_route_metrics },
    { "GET", "/slots", false, false, srv_route_slots },
    { "GET", "/map", false, false, srv_route_map },
    { "GET", "/", true, false, srv_route_page },
    { "HEAD", "/", true, false, srv_route_page },
    { "GET", "/page/page.css", true, false, srv_route_page },
    { "GET", "/page/page.js", true, false, srv_route_page },
    { "GET", "/page/chat.js", true, false, srv_route_page },
    { "GET", "/page/map.js", true, false, srv_route_page },
    { "GET", "/page/icon.svg", true, false, srv_route_page },
    { "POST", "/v1/chat/completions", false, true, srv_route_chat },
    { "POST", "/chat/completions", false, true, srv_route_chat },
    { "POST", "/v1/completions", false, true, srv_route_completion },
    { "POST", "/completions", false, true, srv_route_completion },
    { "POST", "/v1/responses", false, true, srv_route_responses },
    { "POST", "/responses", false, true, srv_route_responses },
    { "POST", "/v1/messages", false, true, srv_route_messages },
    { "POST", "/v1/messages/count_tokens", false, true, srv_route_count },
    { "POST", "/tokenize", false, true, srv_route_tokenize },
    { "POST", "/detokenize", false, true, srv_route_detokenize },
    { "POST", "/apply-template", false, true, srv_route_template },
    { "DELETE", "/cache", false, true, srv_route_clear },
};
const uint32_t srv_n_route = KVD_COUNTOF(srv_routes);

#define NO_EMBEDDINGS "embeddings are not served"
#define NO_RANKING    "ranking is not served"

static const struct {
    const char *path, *say;
} elsewhere[] = {
    { "/completion", "/v1/completions goes on with a text, in OpenAI's shape" },
    { "/infill", "only /v1/completions, which goes on with a text" },
    { "/embedding", NO_EMBEDDINGS },
    { "/embeddings", NO_EMBEDDINGS },
    { "/v1/embeddings", NO_EMBEDDINGS },
    { "/rerank", NO_RANKING },
    { "/reranking", NO_RANKING },
    { "/v1/rerank", NO_RANKING },
    { "/v1/reranking", NO_RANKING },
    { "/lora-adapters", "adapters are not served" },
};

const char *srv_route_elsewhere(const char *path)
{
    for (uint32_t i = 0; i < KVD_COUNTOF(elsewhere); i++)
        if (strcmp(elsewhere[i].path, path) == 0)
            return elsewhere[i].say;
    return NULL;
}
