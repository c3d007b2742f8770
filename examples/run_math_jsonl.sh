#!/usr/bin/env bash
# Trains on word problems from a JSONL file, graded by math-verify.
#
#   bash examples/run_math_jsonl.sh
#       a tiny dense model and the 400 bundled problems, on CPUs; 200 others are held out
#   HF_CHECKPOINT=/models/Qwen3-0.6B PROMPT_DATA=train.jsonl EVAL_PROMPT_DATA=test.jsonl bash examples/run_math_jsonl.sh
#       your own; the tiny model knows no words but those of the bundled problems
#
# examples/run.sh says what else may be set. Flags are passed through (--help-all lists them). docs/data.md says which
# files can be read; tools/make_word_problems.py wrote the bundled ones.
set -euo pipefail
export IBPO_CWD=${IBPO_CWD:-$PWD} # relative paths of the user's count from here
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export HF_CHECKPOINT=${HF_CHECKPOINT:-$PWD/examples/tiny_qwen3_words}
if [[ -z ${PROMPT_DATA:-} ]]; then
    export PROMPT_DATA=$PWD/examples/math/train.jsonl
    export EVAL_PROMPT_DATA=${EVAL_PROMPT_DATA:-$PWD/examples/math/held_out.jsonl}
fi
exec bash examples/run.sh --rm-type math --num-rollout 100 "$@"
