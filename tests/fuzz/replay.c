/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c - runs a fuzz target over stored inputs, without libFuzzer: every argument is a file, or
 * a directory whose regular files are taken (not its subdirectories).  A missing or empty corpus
 * is a failure: a replay that ran nothing proves nothing. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay_file(const char *path)
{
    struct stat st;
    FILE       *f = fopen(path, "rb");
    uint8_t    *data;
    size_t      size;

    if (!f || fstat(fileno(f), &st) != 0) {
        perror(path);
        if (f)
            fclose(f);
        return -1;
    }
    size = (size_t)st.st_size;
    data = malloc(size ? size : 1); /* exact, so that a sanitizer sees the end */
    if (!data || fread(data, 1, size, f) != size) {
        fprintf(stderr, "%s: cannot be read\n", path);
        free(data);
        fclose(f);
        return -1;
    }
    fclose(f);
    fprintf(stderr, "replay %s (%zu bytes)\n", path, size);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    return 1;
}

/* Number of inputs run, or -1. */
static int replay_path(const char *path)
{
    struct stat    st;
    struct dirent *e;
    DIR           *dir;
    int            n = 0;

    if (stat(path, &st) != 0) {
        perror(path);
        return -1;
    }
    if (!S_ISDIR(st.st_mode))
        return replay_file(path);
    dir = opendir(path);
    while (dir && n >= 0 && (e = readdir(dir)) != NULL) {
        char file[4096];

        snprintf(file, sizeof(file), "%s/%s", path, e->d_name);
        if (stat(file, &st) == 0 && S_ISREG(st.st_mode))
            n = replay_file(file) < 0 ? -1 : n + 1;
    }
    if (dir)
        closedir(dir);
    return n;
}

int main(int argc, char **argv)
{
    int n_run = 0;

    for (int i = 1; i < argc; i++) {
        const int n = replay_path(argv[i]);

        if (n < 0)
            return 1;
        n_run += n;
    }
    printf("%d inputs replayed\n", n_run);
    return n_run > 0 ? 0 : 1;
}
