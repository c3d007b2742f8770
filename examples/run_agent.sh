#!/usr/bin/env bash
# Trains an agent in an environment of several turns.
#
#   bash examples/run_agent.sh
#       a tiny Qwen3-Next learns to use a calculator, on two CPU cores
#   AGENT=guess_number bash examples/run_agent.sh
#       it learns to guess a number from "higher" and "lower"
#   HF_CHECKPOINT=examples/tiny_qwen3_agent bash examples/run_agent.sh
#       the same with a tiny dense Qwen3
#   HF_CHECKPOINT=/models/Qwen3-4B bash examples/run_agent.sh
#       your own model; calculator needs a chat template that shows tools
#
# examples/run.sh says what else may be set. Flags are passed through (--help-all lists them) and win over what is chosen
# here. docs/environments.md says how to write an environment; examples/agents/ has these two.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---------------------------------------------------------------------------------- what you may set
export HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/tiny_qwen3_next_agent}
AGENT=${AGENT:-calculator} # or guess_number
# -----------------------------------------------------------------------------------------------------

case $AGENT in
calculator) environment=examples/agents/use_calculator.py:UseCalculator ;;
guess_number) environment=examples/agents/guess_number.py:GuessNumber ;;
*)
    echo "error: AGENT=$AGENT: must be calculator or guess_number" >&2
    exit 2
    ;;
esac
export RUN_DIR=${RUN_DIR:-$PWD/runs/${AGENT}_$(date +%Y%m%d_%H%M%S)}
export PROMPT_DATA=import://examples/agents/agent_prompts.py:$AGENT EVAL_PROMPT_DATA=import://examples/agents/agent_prompts.py:$AGENT

TASK_ARGS=(--environment "$environment" --apply-chat-template)
recipe=$PWD/examples/recipes/$(basename "$HF_CHECKPOINT").yaml
if [[ -f $recipe ]]; then # one of the tiny agents
    TASK_ARGS+=(--config "$recipe")
else
    TASK_ARGS+=(--rollout-max-response-len 512 --rollout-max-context-len 4096)
fi
exec bash examples/run.sh "${TASK_ARGS[@]}" "$@"
