#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What a run really holds is within 3 % + 32 MiB of its plan, at a short and at the full context of
# the real model.  usage: test_memory.sh KVDRIVE MODEL   (exit 77: no model)
set -euo pipefail
kvdrive=$1 model=${2:-}
[ -f "$model" ] || exit 77
for ctx in 256 8192; do
    python3 - "$kvdrive" "$model" "$ctx" <<'PY'
import json, os, subprocess, sys
kvdrive, model, ctx = sys.argv[1], sys.argv[2], int(sys.argv[3])
plan = [kvdrive, "plan", "-m", model, "-c", str(ctx), "--json"]
planned = json.loads(subprocess.run(plan, check=True, capture_output=True).stdout)["total_bytes"]
bench = [kvdrive, "bench", "-m", model, "-p", "0", "-n", "16", "-d", str(ctx - 16), "-r", "1"]
p = subprocess.Popen(bench, stdout=subprocess.DEVNULL)
_, status, used = os.wait4(p.pid, 0)
peak = used.ru_maxrss * 1024
limit = planned * 1.03 + (32 << 20)
print(f"context {ctx}: planned {planned / 2**20:.1f} MiB, peak resident {peak / 2**20:.1f} MiB")
sys.exit(0 if status == 0 and planned * 0.97 - (32 << 20) <= peak <= limit else 1)
PY
done
