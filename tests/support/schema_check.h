/* SPDX-License-Identifier: Apache-2.0 */
/* schema_check.h - whether a value fits a JSON schema, read from the schema anew: shares nothing
 * with the grammar that made the value.  Patterns are checked by the C library. */
#ifndef KVD_TEST_SCHEMA_CHECK_H
#define KVD_TEST_SCHEMA_CHECK_H

#include <jansson.h>
#include <stdbool.h>

/* root: where $ref leads.  *why (may be NULL) gets the keyword that was broken. */
bool schema_check(json_t *root, json_t *schema, json_t *value, const char **why);

#endif
