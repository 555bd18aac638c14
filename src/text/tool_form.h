/* SPDX-License-Identifier: Apache-2.0 */
/* tool_form.h - private to text/: how models write tool calls and reasoning, one row a form.
 *
 * A text of a row has the white space that models write.  Readers and grammars take any white space
 * at both ends of it: they use the text without (tool_trim()). */
#ifndef KVD_TEXT_TOOL_FORM_H
#define KVD_TEXT_TOOL_FORM_H

#include <jansson.h>

#include "text/text.h"

#define TOOL_MARK_MAX  64u  /* bytes of a text of a row */
#define TOOL_NAME_MAX  256u /* bytes of a function's or a parameter's name */
#define TOOL_CALLS_MAX 16u  /* calls of one answer, unless a caller says otherwise */

typedef enum tool_body {
    TOOL_OBJECT, /* {"name": NAME, KEY: ARGUMENTS} */
    TOOL_NAMED,  /* NAME mid ARGUMENTS */
    TOOL_PARAMS  /* <function=NAME> <parameter=P>VALUE</parameter> ... </function> */
} tool_body;

#define TOOL_FUNCTION_OPEN  "<function="
#define TOOL_FUNCTION_CLOSE "</function>"
#define TOOL_PARAM_OPEN     "<parameter="
#define TOOL_PARAM_CLOSE    "</parameter>"

typedef struct tool_form {
    tool_body   body;
    const char *open;    /* once, before the first call; "": nothing */
    const char *list;    /* behind open: "[" where the calls are a JSON array; "" */
    const char *begin;   /* before each call */
    const char *also;    /* may stand in place of open and begin; "" */
    const char *key;     /* OBJECT: of the arguments */
    const char *mid;     /* NAMED: between the name and the arguments */
    const char *skip[3]; /* NAMED: may stand before mid, in any order; NULL: no more */
    const char *end;     /* behind each call */
    const char *next;    /* between two calls */
    const char *close;   /* once, behind the last call */
    bool        id;      /* OBJECT: "id" of 9 letters and digits may follow the arguments */
    bool        bare;    /* an answer that begins with { is a call, without open */
    bool        single;  /* an answer has one call */
} tool_form;

/* NULL: KVD_TOOLS_NONE, or a value that is no format. */
const tool_form *tool_form_get(kvd_tool_format f);

typedef struct think_form {
    const char *open, *close;
    const char *behind;   /* between close and what follows; "" */
    const char *answer;   /* before the text of an answer that does not reason; "" */
    const char *drop[5];  /* marks that are no text; NULL: no more */
    bool        anywhere; /* reasoning may begin behind text; else only first */
} think_form;

/* NULL: KVD_REASONING_NONE, or no such value. */
const think_form *think_form_get(kvd_reasoning r);

/* A text of a row without the white space at its ends. */
tok_str tool_trim(const char *s);

/* Whether the name can be written as it is in forms without quotes: letters, digits, _ . -  */
bool tool_plain_name(const char *s, size_t len);

/* What of a function's schema (NULL: none) decides how a TOOL_PARAMS value is written: raw text
 * where the schema lets it be a string, else JSON. */
bool tool_takes_text(const json_t *schema);
/* The schema of a parameter; NULL: not declared. */
const json_t *tool_param_schema(const json_t *parameters, const char *name, size_t len);

/* ---- tool_head.c: heads of calls in generated text ------------------------------------------ */

typedef enum tool_parse { TOOL_MORE, TOOL_BAD, TOOL_GOOD } tool_parse; /* MORE: not all there */

typedef struct tool_scan { /* through one JSON value */
    uint32_t depth;
    bool     begun, string, escape;
} tool_scan;

typedef struct tool_head {
    char   name[TOOL_NAME_MAX + 8];
    size_t n_name;
    bool   named, has_args, closed; /* closed: the object has ended; then end is behind it */
    size_t args, args_end;          /* the value; args_end 0: it is where reading stopped */
    size_t end;
} tool_head;

bool   tool_is_white(char c);
size_t tool_skip_white(const char *s, size_t len, size_t at);
/* One byte of a value.  Returns 1: it belongs to it; 2: it is its last; 0: it is behind it. */
int tool_scan_byte(tool_scan *v, char c);
/* Whether the text (trimmed) is at *at, behind white space: GOOD moves *at behind it. */
tool_parse tool_read_text(const char *s, size_t len, size_t *at, const char *text);
/* A call from s on, of each body: the name, and where the arguments begin. */
tool_parse tool_read_object(const char *s, size_t len, tool_head *h);
tool_parse tool_read_named(const tool_form *f, const char *s, size_t len, tool_head *h);
tool_parse tool_read_function(const char *s, size_t len, tool_head *h); /* args: behind its mark */

#endif
