/* SPDX-License-Identifier: Apache-2.0 */
/* srv_others.c - fields that requests for text have for other servers of models, or in other
 * shapes. A client that sends one expects another answer than it would get, so none of them is
 * ignored. What has an effect only beside one that is refused has none, whatever it says. */
#include <stdlib.h>
#include <string.h>

#include "srv_fields.h"

#define SAMPLING "use temperature, top_k, typical_p, top_p or min_p"
#define FORMATS                                                                        \
    "use response_format in /v1/chat/completions and /v1/completions, text.format in " \
    "/v1/responses, output_config.format in /v1/messages"
#define ALL_ITEMS "nothing is kept of an answer: each request brings all messages or items"
#define REASONING "the model's template may know it: use chat_template_kwargs, by its name there"
#define IDS       "use /tokenize, which tells the tokens of a text"

/* In the order of their names. */
static const srv_refused others[] = {
    { "adaptive_decay", "*", NULL },
    { "adaptive_target", "-1", SAMPLING },
    { "add_special_tokens", "false", "the chat template has them already: leave it out" },
    { "allowed_token_ids", "", "use logit_bias, 100 for each of them" },
    { "audio", "", SRV_SAY_TEXT },
    { "bad_words", "[]", "use logit_bias with -100 for their tokens, which /tokenize tells" },
    { "best_of", "1", "every answer is told: use n in /v1/chat/completions or /v1/completions" },
    { "chat_template", "",
      "the template is the server's (--chat-template FILE): use chat_template_kwargs for its "
      "variables" },
    { "continue_final_message", "false", "only /v1/chat/completions and /v1/messages have it" },
    { "conversation", "", ALL_ITEMS },
    { "documents", "[]", "write their text into a message" },
    { "dynatemp_exponent", "*", NULL },
    { "dynatemp_range", "0", "use temperature" },
    { "early_stopping", "*", NULL },
    { "echo", "false", "only /v1/completions has it" },
    { "function_call", "\"none\" \"auto\"", "use tool_choice (not in /v1/completions)" },
    { "functions", "[]", "use tools (not in /v1/completions)" },
    { "grammar", "\"\"", SRV_SAY_SCHEMA },
    { "guided_choice", "", SRV_SAY_SCHEMA ", as {\"enum\": [...]}; the answer is a JSON string" },
    { "guided_decoding_backend", "*", NULL },
    { "guided_grammar", "", SRV_SAY_SCHEMA },
    { "guided_regex", "",
      SRV_SAY_SCHEMA ", as {\"type\": \"string\", \"pattern\": ...}; the answer is a JSON string" },
    { "guided_whitespace_pattern", "", "white space between values is free: leave it out" },
    { "image_data", "[]", SRV_SAY_TEXT },
    { "include_stop_str_in_output", "false",
      "an answer ends before the text of stop: add it there" },
    { "input", "", "it belongs to /v1/responses: use messages, in /v1/completions prompt" },
    { "instructions", "",
      "it belongs to /v1/responses: use a message of role system, in /v1/messages system, "
      "or begin the prompt with it" },
    { "length_penalty", "*", NULL },
    { "logits_processors", "[]", "use logit_bias" },
    { "logprobs", "false", "only /v1/chat/completions and /v1/completions have it" },
    { "lora", "[]", "give the server a model that has it merged (-m)" },
    { "max_completion_tokens", "",
      "use max_output_tokens in /v1/responses, max_tokens in /v1/messages" },
    { "max_output_tokens", "", "it belongs to /v1/responses: use max_tokens" },
    { "max_tokens", "", "use max_output_tokens" },
    { "mcp_servers", "[]", "use tools of the client's own (not in /v1/completions)" },
    { "messages", "",
      "it belongs to /v1/chat/completions and /v1/messages: use prompt in /v1/completions, "
      "input in /v1/responses" },
    { "min_keep", "0 1", SAMPLING },
    { "min_tokens", "0", "use ignore_eos, by which answers end at their limit of tokens" },
    { "mirostat", "0", SAMPLING },
    { "mirostat_eta", "*", NULL },
    { "mirostat_tau", "*", NULL },
    { "modalities", "[\"text\"]", SRV_SAY_TEXT },
    { "n", "1", "only /v1/chat/completions and /v1/completions have it: ask several times" },
    { "n_cmpl", "1", "use n in /v1/chat/completions or /v1/completions" },
    /* nothing of a prompt is ever dropped, so all that is to be kept is */
    { "n_discard", "*", NULL },
    { "n_indent", "0", SRV_SAY_NOTHING_LIKE },
    { "n_keep", "*", NULL },
    { "n_probs", "0",
      "use logprobs with top_logprobs in /v1/chat/completions, logprobs in /v1/completions: up "
      "to 20" },
    { "output_config", "{}", "it belongs to /v1/messages: " FORMATS },
    { "output_format", "", FORMATS },
    { "parallel_tool_calls", "true",
      "only /v1/chat/completions and /v1/responses have it: in /v1/messages use "
      "disable_parallel_tool_use in tool_choice" },
    { "parse_special", "false", "only /v1/completions, /completion and /tokenize have it" },
    { "parse_tool_calls", "true", "answers with tools are always taken apart: leave tools out" },
    { "post_sampling_probs", "false",
      "logprobs are the model's own, before sampling: leave it out" },
    { "previous_response_id", "", ALL_ITEMS },
    { "prompt", "", "it belongs to /v1/completions: use messages, in /v1/responses input" },
    { "prompt_logprobs", "", "use echo with logprobs in /v1/completions" },
    { "reasoning", "{} {\"effort\":\"none\"}", REASONING },
    { "reasoning_effort", "\"none\"", REASONING },
    { "reasoning_format", "\"none\" \"auto\"", "/v1/completions has text alone: use none or auto" },
    { "response_fields", "[]", "answers have all fields: leave it out" },
    { "response_format", "{\"type\":\"text\"}", FORMATS },
    { "return_token_ids", "false", IDS },
    { "return_tokens", "false", IDS },
    { "return_tokens_as_token_ids", "false", IDS },
    { "samplers", "",
      "their order is fixed: leave it out, and turn off what is not wanted (top_k 0, top_p 1, "
      "min_p 0)" },
    { "skip_special_tokens", "true", "special tokens are no text of answers: leave it out" },
    { "spaces_between_special_tokens", "*", NULL }, /* there are none in answers */
    { "stop", "[]", "use stop_sequences" },
    { "stop_sequences", "[]", "use stop" },
    { "stop_token_ids", "[]", "use stop (stop_sequences in /v1/messages), which has texts" },
    { "suffix", "\"\"", "texts are only gone on with: leave it out" },
    { "system", "",
      "it belongs to /v1/messages: use a message of role system, in /v1/responses instructions, "
      "or begin the prompt with it" },
    { "t_max_predict_ms", "0 -1",
      "use a limit of tokens, or close the connection when it is time" },
    { "text", "{} {\"format\":{\"type\":\"text\"}}", "it belongs to /v1/responses: " FORMATS },
    { "tfs_z", "1", SAMPLING },
    { "thinking", "{\"type\":\"disabled\"}", REASONING },
    { "top_logprobs", "0",
      "only /v1/chat/completions has it: use logprobs with a number in /v1/completions" },
    { "truncate_prompt_tokens", "",
      "prompts are never cut: cut it before, /tokenize counts its tokens" },
    { "use_beam_search", "false",
      "use temperature 0 for the likeliest tokens, or n for several answers" },
    { "verbosity", "", "say it in a message" },
    { "web_search_options", "", "use tools of the client's own (not in /v1/completions)" },
};

static int by_name(const void *name, const void *row)
{
    return strcmp(name, ((const srv_refused *)row)->name);
}

const srv_refused *srv_find_other(const char *name)
{
    return bsearch(name, others, KVD_COUNTOF(others), sizeof(others[0]), by_name);
}
