/* SPDX-License-Identifier: Apache-2.0 */
/* A program outside the tree that uses the installed library: a missing model is a clean error. */
#include <kvdrive.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    kvd_model_params p = KVD_MODEL_PARAMS_INIT;
    kvd_model       *m = NULL;
    kvd_err          err;

    p.path = "no-such-file.gguf";
    if (kvd_model_open(&m, &p, &err) != KVD_E_IO || m != NULL) {
        fprintf(stderr, "a missing file was not refused as KVD_E_IO\n");
        return 1;
    }
    printf("kvdrive %s: %s\n", kvd_version(), err.msg);
    return strncmp(kvd_version(), "0.", 2) != 0;
}
