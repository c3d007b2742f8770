#!/usr/bin/env bash
# Trains Qwen3-Next by IBPO.
#
#   bash examples/run_qwen3_next_ibpo.sh
#       a tiny model on two CPU processes; no GPU, no download beyond packages
#   HF_CHECKPOINT=/models/Qwen3-Next-80B-A3B-Thinking PROMPT_DATA=… EVAL_PROMPT_DATA=… RUN_DIR=/shared/run \
#   NNODES=4 NODE_RANK=… MASTER_ADDR=… bash examples/run_qwen3_next_ibpo.sh
#       on every node: Qwen3-Next-80B-A3B on 32 GPUs
#
# Flags are passed through (--help lists them). --dry-run prints the plan and starts nothing; it needs no more of
# a model than its config.json: HF_CHECKPOINT=examples/models/qwen3_next_80b_a3b
#
# --load DIR continues a run, or starts from what tools/convert_hf_to_megatron.py made. A run's checkpoints become
# Hugging Face models by tools/convert_megatron_to_hf.py --load RUN_DIR --save DIR.
set -euo pipefail
export IBPO_CWD=$PWD # relative paths that you give count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------------------------------------------------- what you may set
HF_CHECKPOINT=${HF_CHECKPOINT:-}       # empty: the tiny model of this repository
RUN_DIR=${RUN_DIR:-}                   # empty: a new directory under runs/
PROMPT_DATA=${PROMPT_DATA:-}           # empty: the recipe's
EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-} # empty: the recipe's
NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-}           # empty: any free port on one node, 29500 on several
# -----------------------------------------------------------------------------------------------------

if [[ -n $HF_CHECKPOINT ]]; then
    RECIPE=$PWD/examples/recipes/qwen3_next_80b_a3b_ibpo.yaml
    PROCESSES=$GPUS_PER_NODE
    CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT")
else
    RECIPE=$PWD/examples/recipes/tiny_qwen3_next_ibpo.yaml
    NNODES=1 PROCESSES=2
    CKPT_ARGS=()
fi
DATA_ARGS=(${PROMPT_DATA:+--prompt-data "$PROMPT_DATA"})
EVAL_ARGS=(${EVAL_PROMPT_DATA:+--eval-prompt-data "$EVAL_PROMPT_DATA"})

source examples/launch.sh
launch "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${EVAL_ARGS[@]}" "$@"
