#!/usr/bin/env bash
# Makes a tiny agent: random weights, then supervised fine-tuning on the demonstrations of agent_demonstrations.py.
#
#   bash examples/agents/warm_start.sh
#   FAMILY=qwen3 SAVE=examples/tiny_qwen3_agent bash examples/agents/warm_start.sh
#
# Flags are passed through to `ibpo sft`. The run's directory is kept.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# ---------------------------------------------------------------------------------- what you may set
FAMILY=${FAMILY:-qwen3_next} # or qwen3
SAVE=${SAVE:-examples/tiny_qwen3_next_agent}
RUN_DIR=${RUN_DIR:-$PWD/runs/warm_start_${FAMILY}_$(date +%Y%m%d_%H%M%S)}
# -----------------------------------------------------------------------------------------------------

CKPT_ARGS=(--hf-checkpoint "$RUN_DIR/initial" --run-dir "$RUN_DIR/sft")
DATA_ARGS=(--prompt-data import://examples/agents/agent_demonstrations.py:both
    --eval-prompt-data import://examples/agents/agent_demonstrations.py:both --eval-num-prompts 256 --eval-interval 100
    --apply-chat-template)
OPTIMIZER_ARGS=(--num-rollout 500 --rollout-batch-size 64 --lr 4.0e-3 --lr-decay-style cosine --min-lr-ratio 0.05
    --lr-warmup-fraction 0.08 --adam-beta2 0.98 --max-tokens-per-gpu 8192)
PERF_ARGS=(--num-trainers 2)

python=$(bash tools/bootstrap.sh)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} "$python" examples/agents/initial_agent.py --family "$FAMILY" --save "$RUN_DIR/initial"
"$python" -m megatron_ibpo.commands.sft "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
mkdir -p "$SAVE"
cp "$RUN_DIR"/sft/hf/* "$SAVE"
