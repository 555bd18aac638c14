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
    { "GET", "/page/markdown.js", true, false, srv_route_page },
    { "GET", "/page/icon.svg", true, false, srv_route_page },
    { "POST", "/v1/chat/completions", false, true, srv_route_chat },
    { "POST", "/chat/completions", false, true, srv_route_chat },
    { "POST", "/v1/completions", false, true, srv_route_completion },
    { "POST", "/completions", false, true, srv_route_completion },
    { "POST", "/v1/responses", false, true, srv_route_responses },
    { "POST", "/responses", false, true, srv_route_responses },
    { "POST", "/v1/responses/input_tokens", false, true, srv_route_input_tokens },
    { "POST", "/completion", false, true, srv_route_native },
    { "POST", "/v1/messages", false, true, srv_route_messages },
    { "POST", "/v1/messages/count_tokens", false, true, srv_route_count },
    { "GET", "/tokenizer_info", false, false, srv_route_tokenizer },
    { "POST", "/tokenize", false, true, srv_route_tokenize },
    { "POST", "/detokenize", false, true, srv_route_detokenize },
    { "POST", "/apply-template", false, true, srv_route_template },
    { "DELETE", "/cache", false, true, srv_route_clear },
};
const uint32_t srv_n_route = KVD_COUNTOF(srv_routes);

#define NO_EMBEDDINGS "there are no embeddings here, only text: another server has to make them"
#define NO_RANKING    "nothing is ranked here, there is only text: another server has to do it"
#define NO_SOUND      "there is no sound here, only text: another server has to do it"
#define NO_ADAPTERS   "adapters are not served: give the server a model that has it merged (-m)"

/* One that ends with a slash stands for all behind it. */
static const struct {
    const char *path, *say;
} elsewhere[] = {
    { "/infill", "only /v1/completions, which goes on with a text" },
    { "/embedding", NO_EMBEDDINGS },
    { "/embeddings", NO_EMBEDDINGS },
    { "/v1/embeddings", NO_EMBEDDINGS },
    { "/pooling", NO_EMBEDDINGS },
    { "/classify", NO_EMBEDDINGS },
    { "/rerank", NO_RANKING },
    { "/reranking", NO_RANKING },
    { "/v1/rerank", NO_RANKING },
    { "/v1/reranking", NO_RANKING },
    { "/v2/rerank", NO_RANKING },
    { "/score", NO_RANKING },
    { "/v1/score", NO_RANKING },
    { "/v1/audio/", NO_SOUND },
    { "/lora-adapters", NO_ADAPTERS },
    { "/v1/load_lora_adapter", NO_ADAPTERS },
    { "/v1/unload_lora_adapter", NO_ADAPTERS },
    { "/slots/", "GET /slots shows them; --cache-dir keeps prompts and finds them by content" },
    { "/reset_prefix_cache", "DELETE /cache forgets all prompts" },
    { "/ping", "GET /health says how the server is" },
    { "/version", "GET /props has the version" },
    { "/api/", "Ollama's routes are not served: use OpenAI's, /v1/chat/completions" },
    { "/v1", "it is the base URL of clients, the routes are below it: GET /v1/models" },
    { "/v1/v1/", "leave /v1 out of the client's base URL, the client adds it" },
};

const char *srv_route_elsewhere(const char *path)
{
    for (uint32_t i = 0; i < KVD_COUNTOF(elsewhere); i++) {
        const char  *p = elsewhere[i].path;
        const size_t n = strlen(p);

        if (p[n - 1] == '/' ? strncmp(path, p, n) == 0 : strcmp(path, p) == 0)
            return elsewhere[i].say;
    }
    return NULL;
}
