/* SPDX-License-Identifier: Apache-2.0 */
/* srv_routes.h - private to server/: the functions behind the routes, listed in srv_routes.c.
 * Those of slow routes run on a worker, the others on the net thread. */
#ifndef KVD_SRV_ROUTES_H
#define KVD_SRV_ROUTES_H

#include "srv_http.h"

void srv_route_chat(srv *s, srv_call *c);
void srv_route_completion(srv *s, srv_call *c);
void srv_route_responses(srv *s, srv_call *c);
void srv_route_input_tokens(srv *s, srv_call *c);
void srv_route_native(srv *s, srv_call *c);
void srv_route_messages(srv *s, srv_call *c);
void srv_route_count(srv *s, srv_call *c);
void srv_route_tokenizer(srv *s, srv_call *c);
void srv_route_tokenize(srv *s, srv_call *c);
void srv_route_detokenize(srv *s, srv_call *c);
void srv_route_template(srv *s, srv_call *c);
void srv_route_models(srv *s, srv_call *c);
void srv_route_model(srv *s, srv_call *c);
void srv_route_health(srv *s, srv_call *c);
void srv_route_props(srv *s, srv_call *c);
void srv_route_metrics(srv *s, srv_call *c);
void srv_route_slots(srv *s, srv_call *c);
void srv_route_clear(srv *s, srv_call *c);
void srv_route_map(srv *s, srv_call *c);
void srv_route_page(srv *s, srv_call *c);

#endif
