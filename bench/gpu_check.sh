#!/usr/bin/env bash
# Everything that only a GPU can tell, in under 8 minutes on a machine that has one: compiles the kernels, runs their tests on
# the device, times them, and prints one table last. Exits with 1 if a test fails, a result is wrong or a target is missed.
#
# Needs a python3 with torch, triton, numpy, pytest and hypothesis; no network, and Baton need not be installed. Without
# pytest-asyncio the tests of transfers are left out.
# PYTHON: the interpreter; else what `make setup` installs, else python3.
# OUT: a folder for logs and the JSON lines; else a temporary one.
# Without a GPU it says so, compiles a few kernels and exits with 0: that it works can be seen anywhere.
set -u
cd "$(dirname "$0")/.." || exit 1
[ -x .venv/bin/python ] && PYTHON=${PYTHON:-.venv/bin/python}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-$(mktemp -d)}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
BUDGET_S=460 # of all steps
TIMING_S=180 # of the last one
MARKERS=$'slow: not run here\ntimeout: of a plugin that need not be here'
left() { echo $((BUDGET_S - SECONDS)); }

ARCH=$("$PYTHON" - <<'PYTHON'
import sys
import torch
from kernels.gpu.variant import arch_of, why_unfit

gpu = torch.device("cuda")
if torch.cuda.is_available():
    if unfit := why_unfit(gpu):
        sys.exit(f"the kernels are not for this GPU: it has {unfit}")
    print(arch_of(gpu).name)
PYTHON
) || { echo "PYTHON=$PYTHON cannot do this: name one that has torch and triton, or run \`make setup\`" >&2; exit 1; }

if [ -z "$ARCH" ]; then
    echo "no GPU that the torch of $PYTHON can use: a few kernels are compiled, nothing is run"
    exec timeout 300 "$PYTHON" -m bench.kernels --ahead-of-time --quick --op silu_mul --op pack_blocks --output "$OUT/resources.json"
fi

failed=()
skipped=() # tests of the engine, where its dependencies are missing

echo "== compile for $ARCH, by all cores"
# Into the cache that the launches below look into.
timeout $(($(left) / 3)) "$PYTHON" -m bench.kernels --ahead-of-time --arch "$ARCH" --output "$OUT/resources.json" \
    >"$OUT/resources.txt" 2>&1 || failed+=("compile")
grep -E '^(WRONG|NOT COMPARED)|^[0-9]+ variants|Error' "$OUT/resources.txt"

echo "== tests on the device, each file in a process of its own ($(left) s left)"
# No configuration and no plugins of this project; hypothesis's own "ci" profile has no deadlines. Ahead of time is done.
limit=$(($(left) - TIMING_S))
declare -A running
for file in tests/gpu/test_*.py; do
    name=$(basename "$file" .py)
    [ "$name" = test_ahead_of_time ] && continue
    timeout "$limit" "$PYTHON" -m pytest "$file" -q -c /dev/null --rootdir . --confcutdir tests/gpu -p no:cacheprovider \
        -o addopts= -o asyncio_mode=auto -o "markers=$MARKERS" --hypothesis-profile=ci -m "not slow" >"$OUT/$name.txt" 2>&1 &
    running[$name]=$!
done
for name in "${!running[@]}"; do
    if wait "${running[$name]}"; then
        echo "$name: $(tail -n 1 "$OUT/$name.txt")"
    else
        status=$?
        # 2: pytest could not import it.
        if [ "$status" -eq 2 ] && missing=$(grep -m 1 -oE "No module named '(safetensors|msgspec|zmq|rich|grpc|tokenizers)'" "$OUT/$name.txt"); then
            skipped+=("$name")
            echo "$name: NOT RUN: $missing"
            continue
        fi
        failed+=("$name")
        echo "$name: exit status $status, see $OUT/$name.txt"
        tail -n 40 "$OUT/$name.txt"
    fi
done

echo "== timing ($(left) s left)"
quick=()
[ "$(left)" -lt 150 ] && quick=(--quick)
timeout "$(left)" "$PYTHON" -m bench.kernels "${quick[@]}" --enforce-targets --output "$OUT/kernels.json" \
    >"$OUT/timing.txt" 2>"$OUT/timing.err" || failed+=("timing")
grep -v '^{' "$OUT/timing.txt"
[ -s "$OUT/kernels.json" ] || tail -n 20 "$OUT/timing.err"

echo
echo "$SECONDS s; logs and JSON in $OUT; not run: ${skipped[*]:-nothing}; failed: ${failed[*]:-nothing}"
[ ${#failed[@]} -eq 0 ]
