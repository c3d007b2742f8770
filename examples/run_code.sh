#!/usr/bin/env bash
# Trains a policy to write programs, which are run in sandboxes to see whether they are right.
#
#   bash examples/run_code.sh
#       a tiny dense model on CPUs; its task: from two values of a linear function, write the function
#   HF_CHECKPOINT=/models/Qwen3-4B PROMPT_DATA=train.jsonl EVAL_PROMPT_DATA=test.jsonl bash examples/run_code.sh \
#       --apply-chat-template --rollout-max-response-len 4096 --rollout-max-context-len 12288 --reward-timeout 120
#       your own model and problems (docs/code_rewards.md says how they are written)
#
# It needs bubblewrap, and installs it where apt-get may. What else may be set: see examples/run.sh. Flags are passed
# through (--help-all lists them) and win over what is chosen here; --dry-run prints the plan and starts nothing.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ " $* " == *" --dry-run "* ]] || bash tools/system_programs.sh bubblewrap >&2
TASK_ARGS=(--rm-type code --reward-timeout 30)
if [[ -z ${PROMPT_DATA:-} ]]; then
    export PROMPT_DATA=$PWD/examples/code/tiny_train.jsonl
    export EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-$PWD/examples/code/tiny_eval.jsonl}
    TASK_ARGS+=(--num-rollout 25 --rollout-max-response-len 32 --rollout-max-context-len 256 --eval-num-prompts 400)
fi
export HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/tiny_qwen3_code}
exec bash examples/run.sh "${TASK_ARGS[@]}" "$@"
