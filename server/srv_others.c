/* SPDX-License-Identifier: Apache-2.0 */
/* srv_others.c - fields that requests for text have for other servers of models, or in other
 * shapes. A client that sends one expects another answer than it would get, so none of them is
 * ignored. What has an effect only beside one that is refused has none, whatever it says. */
#include <stdlib.h>
#include <string.h>

#include "srv_fields.h"

/* In the order of their names. */
static const srv_refused others[] = {
    { "adaptive_decay", "*" },
    { "adaptive_target", "-1" },
    { "add_special_tokens", "false" },
    { "allowed_token_ids", "" },
    { "audio", "" },
    { "bad_words", "[]" },
    { "best_of", "1" },
    { "cache_prompt", "true" },
    { "chat_template", "" },
    { "continue_final_message", "false" },
    { "conversation", "" },
    { "documents", "[]" },
    { "dry_allowed_length", "*" },
    { "dry_base", "*" },
    { "dry_multiplier", "0" },
    { "dry_penalty_last_n", "*" },
    { "dry_sequence_breakers", "*" },
    { "dynatemp_exponent", "*" },
    { "dynatemp_range", "0" },
    { "early_stopping", "*" },
    { "echo", "false" },
    { "function_call", "\"none\" \"auto\"" },
    { "functions", "[]" },
    { "grammar", "\"\"" },
    { "guided_choice", "" },
    { "guided_decoding_backend", "*" },
    { "guided_grammar", "" },
    { "guided_regex", "" },
    { "guided_whitespace_pattern", "" },
    { "image_data", "[]" },
    { "include_stop_str_in_output", "false" },
    { "input", "" },
    { "instructions", "" },
    { "length_penalty", "*" },
    { "logits_processors", "[]" },
    { "logprobs", "false" },
    { "lora", "[]" },
    { "max_completion_tokens", "" },
    { "max_output_tokens", "" },
    { "max_tokens", "" },
    { "mcp_servers", "[]" },
    { "messages", "" },
    { "min_keep", "0 1" },
    { "min_tokens", "0" },
    { "mirostat", "0" },
    { "mirostat_eta", "*" },
    { "mirostat_tau", "*" },
    { "modalities", "[\"text\"]" },
    { "n", "1" },
    { "n_cmpl", "1" },
    { "n_discard", "*" }, /* nothing of a prompt is ever dropped, so all that is to be kept is */
    { "n_indent", "0" },
    { "n_keep", "*" },
    { "n_probs", "0" },
    { "output_config", "{}" },
    { "output_format", "" },
    { "parallel_tool_calls", "true" },
    { "parse_tool_calls", "true" },
    { "post_sampling_probs", "false" },
    { "previous_response_id", "" },
    { "prompt", "" },
    { "prompt_logprobs", "" },
    { "reasoning", "{} {\"effort\":\"none\"}" },
    { "reasoning_effort", "\"none\"" },
    { "reasoning_format", "\"none\"" },
    { "response_fields", "[]" },
    { "response_format", "{\"type\":\"text\"}" },
    { "return_token_ids", "false" },
    { "return_tokens", "false" },
    { "return_tokens_as_token_ids", "false" },
    { "samplers", "" },
    { "skip_special_tokens", "true" },
    { "spaces_between_special_tokens", "*" }, /* there are none in answers */
    { "stop", "[]" },
    { "stop_sequences", "[]" },
    { "stop_token_ids", "[]" },
    { "structured_outputs", "{}" },
    { "suffix", "\"\"" },
    { "system", "" },
    { "t_max_predict_ms", "0 -1" },
    { "text", "{} {\"format\":{\"type\":\"text\"}}" },
    { "tfs_z", "1" },
    { "thinking", "{\"type\":\"disabled\"}" },
    { "top_logprobs", "0" },
    { "top_n_sigma", "0 -1" },
    { "truncate_prompt_tokens", "" },
    { "typical_p", "1" },
    { "use_beam_search", "false" },
    { "verbosity", "" },
    { "web_search_options", "" },
    { "xtc_probability", "0" },
    { "xtc_threshold", "*" },
};

static int by_name(const void *name, const void *row)
{
    return strcmp(name, ((const srv_refused *)row)->name);
}

const srv_refused *srv_find_other(const char *name)
{
    return bsearch(name, others, KVD_COUNTOF(others), sizeof(others[0]), by_name);
}
