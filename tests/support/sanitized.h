/* SPDX-License-Identifier: Apache-2.0 */
/* sanitized.h - whether a sanitizer watches: then everything takes many times as long, and what
 * differs in numbers alone, which it does not see, is left to the release build. */
#ifndef KVD_TESTS_SANITIZED_H
#define KVD_TESTS_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#endif
