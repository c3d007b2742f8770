#!/usr/bin/env bash
# Trains Qwen3-32B (dense) by IBPO on 32 GPUs; run it on every node:
#
#   HF_CHECKPOINT=/models/Qwen3-32B PROMPT_DATA=… EVAL_PROMPT_DATA=… RUN_DIR=/shared/run \
#   NNODES=4 NODE_RANK=… MASTER_ADDR=… bash examples/run_qwen3_32b_ibpo.sh
#
# Flags are passed through (--help lists them). --dry-run prints the plan and starts nothing; it needs no more of
# a model than its config.json, which is what HF_CHECKPOINT names when it is not set.
#
# --load DIR continues a run, or starts from what tools/convert_hf_to_megatron.py made. A run's checkpoints become
# Hugging Face models by tools/convert_megatron_to_hf.py --load RUN_DIR --save DIR.
set -euo pipefail
export IBPO_CWD=$PWD # relative paths that you give count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------------------------------------------------- what you may set
HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/models/qwen3_32b}
RUN_DIR=${RUN_DIR:-}
PROMPT_DATA=${PROMPT_DATA:-}           # JSONL
EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-} # JSONL
NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-}           # empty: any free port on one node, 29500 on several
# -----------------------------------------------------------------------------------------------------

RECIPE=$PWD/examples/recipes/qwen3_32b_ibpo.yaml
PROCESSES=$GPUS_PER_NODE
CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT")
DATA_ARGS=(${PROMPT_DATA:+--prompt-data "$PROMPT_DATA"})
EVAL_ARGS=(${EVAL_PROMPT_DATA:+--eval-prompt-data "$EVAL_PROMPT_DATA"})

source examples/launch.sh
launch "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${EVAL_ARGS[@]}" "$@"
