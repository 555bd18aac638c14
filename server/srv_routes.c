/* SPDX-License-Identifier: Apache-2.0 */
/* srv_routes.c - every route there is; a test walks this table by asking for each without a key. */
#include "srv_routes.h"

const srv_route srv_routes[] = {
    { "GET", "/health", true, false, srv_route_health },
    { "GET", "/v1/models", false, false, srv_route_models },
    { "GET", "/v1/models/", false, false, srv_route_model },
    { "GET", "/props", false, false, srv_route_props },
    { "GET", "/metrics", false, false, srv_route_metrics },
    { "GET", "/slots", false, false, srv_route_slots },
    { "GET", "/map", false, false, srv_route_map },
    { "GET", "/", true, false, srv_route_page },
    { "GET", "/page/page.css", true, false, srv_route_page },
    { "GET", "/page/page.js", true, false, srv_route_page },
    { "GET", "/page/chat.js", true, false, srv_route_page },
    { "GET", "/page/map.js", true, false, srv_route_page },
    { "GET", "/page/icon.svg", true, false, srv_route_page },
    { "POST", "/v1/chat/completions", false, true, srv_route_chat },
    { "POST", "/v1/completions", false, true, srv_route_completion },
    { "POST", "/v1/responses", false, true, srv_route_responses },
    { "POST", "/v1/messages", false, true, srv_route_messages },
    { "POST", "/v1/messages/count_tokens", false, true, srv_route_count },
    { "POST", "/tokenize", false, true, srv_route_tokenize },
    { "POST", "/detokenize", false, true, srv_route_detokenize },
    { "POST", "/apply-template", false, true, srv_route_template },
    { "DELETE", "/cache", false, true, srv_route_clear },
};
const uint32_t srv_n_route = KVD_COUNTOF(srv_routes);
