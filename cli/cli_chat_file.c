/* SPDX-License-Identifier: Apache-2.0 */
/* cli_chat_file.c - conversations that kvdrive chat keeps: one JSON file each, in
 * $XDG_DATA_HOME/kvdrive/chats, readable by the user alone. */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli_chat.h"
#include "os/os.h"

#define NAME_MAX_BYTES 64u
#define PATH_MAX_BYTES 600u
#define CHAT_MAX_BYTES (256u << 20)
#define SUFFIX         ".json"

static const char name_bytes[] =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";

static bool chat_dir(char out[PATH_MAX_BYTES])
{
    char data[PATH_MAX_BYTES - 32];

    return kvd_user_dir("XDG_DATA_HOME", ".local/share", data, sizeof(data)) &&
           snprintf(out, PATH_MAX_BYTES, "%s/kvdrive/chats", data) > 0;
}

/* Bytes of the name in NAME.json; 0: it is none of a conversation. */
static size_t name_length(const char *file)
{
    const size_t len = strlen(file), n = sizeof(SUFFIX) - 1;

    return len > n && file[0] != '.' && strcmp(file + len - n, SUFFIX) == 0 ? len - n : 0;
}

static kvd_status path_of(const char *name, char dir[PATH_MAX_BYTES],
                          char path[PATH_MAX_BYTES + NAME_MAX_BYTES + 8], kvd_err *err)
{
    const size_t len = strlen(name);

    if (len == 0 || len > NAME_MAX_BYTES || name[0] == '.' || name[strspn(name, name_bytes)])
        return kvd_fail(
            err, KVD_E_INVAL, 0,
            "'%.80s' is no name for a conversation: up to %u letters, digits, - _ and .", name,
            NAME_MAX_BYTES);
    if (!chat_dir(dir))
        return kvd_fail(err, KVD_E_INVAL, 0, "neither XDG_DATA_HOME nor HOME is set");
    snprintf(path, PATH_MAX_BYTES + NAME_MAX_BYTES + 8, "%s/%s" SUFFIX, dir, name);
    return KVD_OK;
}

kvd_status chat_save(const json_t *messages, const char *name, const char *model, bool *replaced,
                     kvd_err *err)
{
    char       dir[PATH_MAX_BYTES], path[PATH_MAX_BYTES + NAME_MAX_BYTES + 8];
    json_t    *root = NULL;
    char      *text = NULL;
    kvd_status st   = path_of(name, dir, path, err);

    if (st != KVD_OK)
        return st;
    root = json_pack("{s:s, s:O}", "model", model, "messages", messages);
    text = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
    if (!text)
        st = kvd_fail(err, KVD_E_NOMEM, 0, "no memory to save the conversation");
    if (st == KVD_OK)
        st = os_dir_make(dir, err);
    *replaced = st == KVD_OK && access(path, F_OK) == 0;
    if (st == KVD_OK)
        st = os_file_replace(path, text, strlen(text), err);
    free(text);
    json_decref(root);
    return st;
}

/* A conversation is an array of {role, content}, both texts. */
static bool is_conversation(const json_t *messages)
{
    static const char *const roles[] = { "system", "user", "assistant" };
    const json_t            *m;
    size_t                   i;

    json_array_foreach(messages, i, m)
    {
        const char *role  = json_string_value(json_object_get(m, "role"));
        bool        known = false;

        for (size_t k = 0; role && k < KVD_COUNTOF(roles); k++)
            known = known || strcmp(role, roles[k]) == 0;
        if (!known || !json_is_string(json_object_get(m, "content")))
            return false;
    }
    return json_is_array(messages);
}

kvd_status chat_load(json_t **messages, const char *name, kvd_err *err)
{
    char         dir[PATH_MAX_BYTES], path[PATH_MAX_BYTES + NAME_MAX_BYTES + 8];
    kvd_buf      b = { 0 };
    json_error_t why;
    json_t      *root;

    *messages = NULL;
    KVD_TRY(path_of(name, dir, path, err));
    if (access(path, F_OK) != 0)
        return kvd_fail(err, KVD_E_INVAL, 0, "no conversation '%s' was saved; /load lists them",
                        name);
    KVD_TRY(cli_read_file(path, CHAT_MAX_BYTES, &b, err));
    root = b.data ? json_loadb(b.data, b.len, JSON_ALLOW_NUL, &why) : NULL;
    if (is_conversation(json_object_get(root, "messages")))
        *messages = json_incref(json_object_get(root, "messages"));
    json_decref(root);
    kvd_buf_free(&b);
    return *messages ? KVD_OK : kvd_fail(err, KVD_E_CORRUPT, 0, "%s: not a conversation", path);
}

void chat_list(FILE *f)
{
    char           dir[PATH_MAX_BYTES];
    DIR           *d = chat_dir(dir) ? opendir(dir) : NULL;
    struct dirent *e;
    bool           any = false;

    while (d && (e = readdir(d))) {
        const size_t n = name_length(e->d_name);

        if (n > 0)
            fprintf(f, "%s%.*s", any ? " " : "saved: ", (int)n, e->d_name);
        any = any || n > 0;
    }
    fputs(any ? "\n" : "nothing was saved yet; /save NAME does\n", f);
    if (d)
        closedir(d);
}
