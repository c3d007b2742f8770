#!/usr/bin/env bash
# Trains any supported model by IBPO: recipe and layout are chosen by its config.json and by the devices found here,
# and shown with how to change them.
#
#   bash examples/run.sh                                                    a tiny dense model, on CPUs
#   HF_CHECKPOINT=/models/Qwen3-0.6B bash examples/run.sh                   your own
#   HF_CHECKPOINT=Qwen/Qwen3-0.6B PROMPT_DATA=openai/gsm8k bash examples/run.sh --rm-type math    from the Hub
#   HF_CHECKPOINT=… NNODES=4 NODE_RANK=… MASTER_ADDR=… bash examples/run.sh  on every one of four nodes
#
# Flags are passed through (--help-all lists them) and win over what is chosen. --dry-run prints the plan and starts
# nothing; it needs no more of a model than its config.json. --verify first checks whether this run would compute what
# it claims (docs/verify.md), on a small model of the same family or with --full on its own, and stops if something is
# wrong.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------------------------------------------------- what you may set
HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/tiny_qwen3}
RUN_DIR=${RUN_DIR:-}                   # empty: a new directory under runs/
PROMPT_DATA=${PROMPT_DATA:-}           # empty: the recipe's
EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-} # empty: held out of PROMPT_DATA, or the recipe's
NNODES=${NNODES:-}                     # empty: this one
GPUS_PER_NODE=${GPUS_PER_NODE:-}       # empty: those found here
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-}           # of node 0, where several nodes meet; empty: 6379
# -----------------------------------------------------------------------------------------------------

source examples/launch.sh
choose ${PROMPT_DATA:+--prompt-data "$PROMPT_DATA"} ${EVAL_PROMPT_DATA:+--eval-prompt-data "$EVAL_PROMPT_DATA"} "$@"
CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT")
DATA_ARGS=(${PROMPT_DATA:+--prompt-data "$PROMPT_DATA"})
EVAL_ARGS=(${EVAL_PROMPT_DATA:+--eval-prompt-data "$EVAL_PROMPT_DATA"})
launch "${LAYOUT_ARGS[@]}" "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${EVAL_ARGS[@]}" "$@"
