/* SPDX-License-Identifier: Apache-2.0 */
/* srv_fields.h - private to server/: bodies of requests.
 *
 * Each getter leaves *out alone where the field is missing or null.  What is wrong goes to the
 * reply of the fields, once: the first mistake counts, later getters do nothing. */
#ifndef KVD_SRV_FIELDS_H
#define KVD_SRV_FIELDS_H

#include "base/json.h"
#include "srv_http.h"

#define SRV_JSON_DEPTH 64u

typedef struct srv_fields {
    srv        *s;
    json_t     *root; /* an object; owned */
    srv_reply  *reply;
    bool        bad;
    bool        asks;            /* for text: srv_find_other() counts */
    const char *format;          /* the field that has made the request's grammar; NULL: none has */
    uint64_t    n_value, n_list; /* in all JSON of the request so far */
    json_t     *offered; /* by tools' names, whether messages add or remove them; owned, or NULL */

    kvd_json_texts texts; /* of numbers in that JSON */

    bool no_prefill; /* a last message of the assistant's is whole */

    kvd_grammar_params grammar;       /* wanted by grammar_field */
    const char        *grammar_field; /* NULL: none is */
    kvd_buf            grammar_text;  /* that grammar points to; owned */
} srv_fields;

/* Parses the call's body; false: it is not an object, as the reply says.  Closed either way. */
bool srv_fields_open(srv_fields *f, srv *s, srv_call *c);
void srv_fields_close(srv_fields *f);
/* Says what is wrong with a field; always false. */
bool srv_fields_bad(srv_fields *f, const char *name, const char *fmt, ...) KVD_PRINTF(3, 4);
/* A word is none of those that are known: says what it is, or that there is none. */
bool srv_fields_word(srv_fields *f, const char *name, const json_t *word, const char *known);
/* Name of what is inside a field, for errors: messages[3].role. */
typedef struct srv_where {
    char s[96];
} srv_where;
srv_where srv_at(const char *fmt, ...) KVD_PRINTF(1, 2);
/* It is not the request that is wrong: 503.  Always false. */
bool srv_fields_full(srv_fields *f, const char *fmt, ...) KVD_PRINTF(2, 3);
/* Either, as the library says; true: neither. */
bool srv_fields_status(srv_fields *f, const char *name, kvd_status st, const kvd_err *err);

/* A value as compact JSON. */
bool srv_put_json(srv_fields *f, const json_t *v, kvd_buf *b);

void srv_get_bool(srv_fields *f, const json_t *o, const char *name, bool *out);
void srv_get_int(srv_fields *f, const json_t *o, const char *name, int64_t min, int64_t max,
                 int64_t *out);
void srv_get_u32(srv_fields *f, const json_t *o, const char *name, uint32_t min, uint32_t max,
                 uint32_t *out);
void srv_get_float(srv_fields *f, const json_t *o, const char *name, double min, double max,
                   float *out);
/* NULL: there is none, or it is null. */
json_t *srv_get(const json_t *o, const char *name);
json_t *srv_get_object(srv_fields *f, const json_t *o, const char *name);

/* What a route knows.  ok: names of fields that have an effect or need none.  refused: fields that
 * would change the answer and cannot; each with the values that ask for nothing, as compact JSON
 * ("*": all do; null always does), and with what its sender can do instead. */
typedef struct srv_refused {
    const char *name, *harmless; /* values separated by spaces */
    const char *instead;         /* NULL: it is never refused */
} srv_refused;
#define SRV_SAY_NOTHING_LIKE "there is nothing like it: leave it out"
#define SRV_SAY_TEXT         "texts are all that goes in and comes out: leave it out"
#define SRV_SAY_SCHEMA                                                                             \
    "use a JSON schema: response_format of type json_schema, or the field json_schema, which all " \
    "routes have"
#define SRV_SAY_CACHED "prompts are cached by themselves, as --cache-dir says: leave it out"
void srv_check_names(srv_fields *f, const char *const *ok, uint32_t n_ok,
                     const srv_refused *refused, uint32_t n_refused);
/* srv_others.c: of a field that is refused where text is asked for and the route says nothing of
 * it; NULL: of none. */
const srv_refused *srv_find_other(const char *name);

/* srv_params.c: fields that all requests for text share, and what is the server's where they say
 * nothing; those of chats and completions; stop strings. */
void srv_get_params(srv_fields *f, srv_request *r);
/* What srv_get_params() reads, and srv_get_format() beside the field of a format. */
#define SRV_PARAM_NAMES                                                                            \
    "model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",    \
        "repetition_penalty", "repeat_penalty", "repeat_last_n", "seed", "logit_bias", "stream",   \
        "ignore_eos", "debug_cache", "cache_salt", "cache_prompt", "n_predict", "json_schema",     \
        "guided_json", "structured_outputs", "typical_p", "top_n_sigma", "xtc_probability",        \
        "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", \
        "dry_sequence_breakers"
/* srv_completion.c: the field prompt: a text, tokens, or a list of them. */
bool srv_get_prompts(srv_fields *f, srv_request *r);
void srv_get_choices(srv_fields *f, srv_request *r);
void srv_get_stops(srv_fields *f, srv_request *r, const char *name);
/* srv_format.c: a grammar that the field asks for, by a text that p points to and f takes.  It is
 * opened when the prompt is known, since that says where the answer begins; an error names the
 * field. */
void srv_want_grammar(srv_fields *f, const char *field, const kvd_grammar_params *p, kvd_buf *text);
bool srv_open_grammar(srv_fields *f, srv_request *r);
/* That of a format, the field's value (NULL: there is none), or of a schema that is a field of its
 * own. */
void srv_get_format(srv_fields *f, const char *field, const json_t *o);

/* srv_tools.c */
typedef enum srv_choice { SRV_CHOICE_AUTO, SRV_CHOICE_NONE, SRV_CHOICE_CALL } srv_choice;
typedef struct srv_tools {
    const json_t *list; /* in the form of OpenAI's chats; NULL: none */
    srv_choice    choice;
    const char   *name;   /* of the function that must be called, with CALL; NULL: any */
    bool          single; /* one call at most */
} srv_tools;
/* Of the words auto, none, required; an error is told. */
void srv_get_choice(srv_fields *f, const json_t *word, srv_choice *out);
/* The request's grammar is that of the tools, and its answers are taken apart.  Returns what the
 * template is to show; NULL: nothing. */
const json_t *srv_use_tools(srv_fields *f, const srv_tools *t, srv_request *r);
/* That of the fields of a chat. */
const json_t *srv_get_tools(srv_fields *f, srv_request *r);

/* A text as JSON: NULL where it is none, or beyond the limits of a body, whose part it is. */
json_t *srv_parse_json(srv_fields *f, const char *text, size_t len);
/* Tokens of a text, specials inside the spans only; owned by the caller. */
bool srv_tokenize(srv_fields *f, const char *text, size_t len, const kvd_span *spans, size_t n_span,
                  bool bos, srv_input *out);
/* The field parse_special, which the server's owner allows.  The same of a string that is no chat,
 * where it may ask for special tokens everywhere. */
bool srv_get_special(srv_fields *f, bool *out);
bool srv_tokenize_raw(srv_fields *f, const json_t *text, bool bos, srv_input *out);
/* srv_template.c: what the server's template shows, at its start; then messages (checked) and tools
 * for it: a list that the caller owns, NULL: an error is told.  *tools: NULL where the messages say
 * them. */
void    srv_template_probe(srv *s);
json_t *srv_template_adapt(srv_fields *f, json_t *messages, const json_t **tools);
/* srv_prefill.c: a prompt, and where its answer begins.  text and spans are owned. */
typedef struct srv_prompt {
    char               *text;
    size_t              len;
    kvd_span           *spans; /* that the template wrote */
    size_t              n_span;
    kvd_reasoning_state state;
} srv_prompt;
void srv_prompt_free(srv_prompt *p);
/* Takes the message that the answer goes on with out of the list (owned); NULL: there is none, or
 * an error is told. */
json_t *srv_take_prefill(srv_fields *f, json_t *messages);
bool    srv_add_prefill(srv_fields *f, const json_t *message, srv_prompt *p);
/* srv_messages.c: the chat template over messages, a list in the form of OpenAI's chats, which is
 * changed; tools may be NULL.  Freed by the caller in any case. */
bool srv_render(srv_fields *f, json_t *messages, const json_t *tools, srv_prompt *out);
/* The same, as the request's only input. */
bool srv_get_prompt(srv_fields *f, json_t *messages, const json_t *tools, srv_request *r);

/* srv_effort.c: variables for the template: chat_template_kwargs, and what the request asks of the
 * model's thinking.  Owned by the caller; NULL: there are none, or an error is told. */
json_t *srv_template_vars(srv_fields *f);
/* A verbosity (NULL: none) has no effect, as the log says; another word is an error. */
void srv_get_verbosity(srv_fields *f, const json_t *word, const char *where);

/* srv_convert.c: other shapes' chats.  Appends m, which it takes; NULL: there was no memory for it.
 */
bool srv_add(srv_fields *f, json_t *list, json_t *m);
/* A string, or parts of text; NULL: neither, as `where` says. */
json_t *srv_text_of(srv_fields *f, json_t *v, const char *type, const char *where);
/* A message; a call; the message with a call's result, whose text it takes. */
bool srv_add_message(srv_fields *f, json_t *list, const char *role, json_t *content,
                     const char *type, const char *where);
/* Gives the last message reasoning, if there is any. */
bool srv_add_reasoning(srv_fields *f, json_t *list, const char *text, size_t len);
bool srv_add_call(srv_fields *f, json_t *calls, json_t *id, json_t *name, json_t *arguments);
bool srv_add_result(srv_fields *f, json_t *list, json_t *id, json_t *text);
/* Appends a tool by a chat's "function", which it takes; NULL: there was no memory for it. */
bool srv_add_function(srv_fields *f, json_t *list, json_t *function);
/* A tool that this server cannot offer is left out, as the log says once. */
void srv_leave_out(srv_fields *f, const char *what, const char *type);
typedef struct srv_conversion {
    /* Appends what entry i of "tools", an object, offers, or nothing; false: an error is told. */
    bool (*add_tool)(srv_fields *f, srv_request *r, json_t *list, const json_t *tool, size_t i);
    bool (*add_messages)(srv_fields *f, json_t *list);
} srv_conversion;
/* The request's prompt and grammar, by its messages and tools; of t all but the list is known. */
bool srv_get_converted(srv_fields *f, const srv_conversion *to, srv_tools *t, srv_request *r);

/* srv_namespace.c: the one name (owned) of a function and its namespace, both strings; NULL: there
 * was no memory.  Functions of entry `at` of "tools", a namespace, become tools. */
json_t *srv_flat_name(srv_fields *f, const json_t *space, const json_t *name);
bool    srv_add_space(srv_fields *f, srv_request *r, json_t *list, const json_t *space, size_t at);

/* srv_offered.c: tools of /v1/messages.  What its messages say of which are offered, read into
 * f->offered; one of them, in the form of srv_conversion; a block that says it; parts of a result
 * with text in place of references to tools, owned, NULL: there was no memory. */
bool srv_read_offers(srv_fields *f);
bool srv_add_claude_tool(srv_fields *f, srv_request *r, json_t *list, const json_t *tool, size_t i);
bool srv_is_tool_change(const json_t *block);
json_t *srv_without_references(srv_fields *f, const json_t *parts);
/* Edits of a conversation are taken if they drop nothing of it. */
void srv_check_edits(srv_fields *f);

/* srv_messages.c: a list of parts of text, whose type is `type`, each on a line of its own; NULL:
 * one is something else.  `where` is the list's name. */
json_t *srv_join_parts(srv_fields *f, const json_t *parts, const char *where, const char *type);

#endif
