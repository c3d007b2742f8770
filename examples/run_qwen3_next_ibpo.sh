#!/usr/bin/env bash
# Trains Qwen3-Next by IBPO.
#
#   bash examples/run_qwen3_next_ibpo.sh
#       a tiny model on two CPU processes; no GPU, no download beyond packages
#   HF_CHECKPOINT=/models/Qwen3-Next-80B-A3B-Thinking PROMPT_DATA=… EVAL_PROMPT_DATA=… RUN_DIR=/shared/run \
#   NNODES=4 NODE_RANK=… MASTER_ADDR=… bash examples/run_qwen3_next_ibpo.sh
#       on every node: Qwen3-Next-80B-A3B on 32 GPUs
#
# A model that HF_CHECKPOINT names is treated as by examples/run.sh, which says what may be set and takes any model.
# Flags are passed through (--help-all lists them). --dry-run prints the plan and starts nothing.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/tiny_qwen3_next_mends}
exec bash examples/run.sh "$@"
