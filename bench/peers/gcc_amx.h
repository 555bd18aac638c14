/* SPDX-License-Identifier: Apache-2.0
 * Force-included when llama.cpp is built with a GCC before 14: its _tile_loadconfig tells the
 * compiler of the first 8 of 64 bytes only (GCC bug 114098), so the rest of a tile configuration
 * may never be stored, and the program dies with an illegal instruction. Debian 12's GCC 12.2 has
 * the bug. */
#ifndef KVD_PEERS_GCC_AMX_H
#define KVD_PEERS_GCC_AMX_H
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(cfg) \
    __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(const void *)(cfg)))
#endif
#endif
