#!/bin/sh
# One vLLM server on loopback as it is measured: serve_vllm.sh VENV MODEL_FOLDER PORT CORE [vllm flags...]
# CORE computes; vLLM's HTTP and scheduling processes go where the kernel puts them.
set -eu
venv=$1 model=$2 port=$3 core=$4
shift 4

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_OMP_THREADS_BIND="$core" OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=2 # GiB
# Prompts are random here; without the prefix cache no prefill can be a hit by accident.
exec "$venv/bin/vllm" serve "$model" --served-model-name m --host 127.0.0.1 --port "$port" \
    --max-model-len 8192 --max-num-seqs 64 --no-enable-prefix-caching "$@"
