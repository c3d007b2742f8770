#!/usr/bin/env bash
# Trains Qwen3-32B (dense) by IBPO on 32 GPUs; run it on every node:
#
#   HF_CHECKPOINT=/models/Qwen3-32B PROMPT_DATA=… EVAL_PROMPT_DATA=… RUN_DIR=/shared/run \
#   NNODES=4 NODE_RANK=… MASTER_ADDR=… bash examples/run_qwen3_32b_ibpo.sh
#
# Flags are passed through (--help-all lists them). --dry-run prints the plan and starts nothing; it needs no more of
# a model than its config.json, which is what HF_CHECKPOINT names when it is not set. examples/run.sh says what
# else may be set.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/models/qwen3_32b} NNODES=${NNODES:-4} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
exec bash examples/run.sh "$@"
