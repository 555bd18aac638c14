/* SPDX-License-Identifier: Apache-2.0 */
/* base.h - the door to base/: what every other directory stands on. */
#ifndef KVD_BASE_H
#define KVD_BASE_H

#include "base/alloc.h"
#include "base/arena.h"
#include "base/buf.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/dtype_blocks.h"
#include "base/half.h"
#include "base/misc.h"
#include "base/options.h"
#include "base/status.h"
#include "base/trace.h"

#endif
