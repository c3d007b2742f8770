#!/usr/bin/env bash
# A user's first day, as far as a script can take it: commands, and what each must print.
#
#   bash tests/first_day.sh [DIRECTORY]
#
# Takes some minutes. DIRECTORY, by default a new temporary one, receives the runs and the output of each command. The
# status is 1 if something was not printed, or a command ended otherwise than it should.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=$(bash tools/bootstrap.sh dev) || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
work=$(realpath "${1:-$(mktemp -d)}")
mkdir -p "$work"
failed=()

# point NAME PATTERN… -- COMMAND…: run the command; its output must match every extended regular expression, and it must
# succeed, or fail if NAME begins with "refused".
point() {
    local name=$1 patterns=() pattern started=$SECONDS missing=() status=0 wanted=0
    shift
    while [[ $1 != -- ]]; do
        patterns+=("$1")
        shift
    done
    shift
    timeout 300 "$@" >"$work/$name.log" 2>&1 </dev/null || status=$?
    for pattern in "${patterns[@]}"; do
        grep -Eq -- "$pattern" "$work/$name.log" || missing+=("$pattern")
    done
    [[ $name == refused* ]] && wanted='[12]' # a time-out is 124, and a signal more
    if ((${#missing[@]})) || [[ ! $status =~ ^$wanted$ ]]; then
        failed+=("$name")
        echo "FAILED $name, $((SECONDS - started)) s, status $status: not printed: ${missing[*]} ($work/$name.log)"
        return
    fi
    echo "passed $name, $((SECONDS - started)) s: $*"
    for pattern in "${patterns[@]}"; do
        grep -Em1 -- "$pattern" "$work/$name.log" | cut -c1-160 | sed 's/^/    /'
    done
}

# ibpo NAME PATTERN… -- WORDS…: a point whose command is `ibpo WORDS…`.
ibpo() {
    local words=()
    while [[ $1 != -- ]]; do
        words+=("$1")
        shift
    done
    shift
    point "${words[@]}" -- "$python" -m megatron_ibpo.commands.main "$@"
}

tiny=(--hf-checkpoint examples/tiny_qwen3 --rollout-backend lean)
ibpo train "the model's configuration" "trainers and engines" "finished: 2 steps" -- \
    train --config small_cpu "${tiny[@]}" --num-rollout 2 --eval-num-prompts 0 --save --run-dir "$work/run"
ibpo resumed "resumes after step 2" "finished: [13] step" -- \
    train --config "$work/run/config.yaml" --load "$work/run" --num-rollout 3
ibpo samples "^ +verified reward r: " "^ +group mean: " "^ +advantage: .* = .* = " -- samples "$work/run"
ibpo page "page\.html" -- page "$work/run"
ibpo evaluate "vllm or transformers does" "accuracy" -- evaluate "$work/run" --eval-num-prompts 4

ibpo refused-flag "here --lr" -- train --learning-rate 1e-5
ibpo refused-value "did you mean 'ppo-clip'" -- train --config small_cpu "${tiny[@]}" --loss-variant ppo --dry-run
point refused-name "here --lr" -- "$python" -c \
    'import megatron_ibpo as mi; mi.load_recipe("small_cpu", learning_rate=1e-5)'
ibpo refused-command "did you mean .train" -- trian
ibpo help "--save PATH" -- page --help

for a in {1..9}; do
    for b in {1..9}; do
        printf '{"prompt": "%s", "response": "%s"}\n' "$a+$b\\n" "$a+$b=$((a + b))#$((a + b))"
    done
done >"$work/rows.jsonl"
ibpo fine-tuning "^training loss per token" "^tokens in the loss" -- sft "${tiny[@]}" --prompt-data "$work/rows.jsonl" \
    --num-rollout 2 --rollout-batch-size 8 --lr 1e-3 --run-dir "$work/warm"

cat >"$work/notebook.py" <<'PYTHON'
import sys

import megatron_ibpo as mi

answers = {"3+4=": "7", "2+2=": "4", "9-5=": "4", "1+7=": "8"}
config = mi.load_recipe(
    "small_cpu", hf_checkpoint="examples/tiny_qwen3", rollout_backend="lean", run_dir=sys.argv[1],
    num_rollout=1, rollout_batch_size=4, eval_num_prompts=0,
    prompt_data=[{"prompt": question, "label": label} for question, label in answers.items()],
    rm_type=lambda prompt, response, label, metadata: float(response.strip().endswith(label)),
    advantages=lambda rewards: [reward - sum(rewards) / len(rewards) for reward in rewards],
)
with mi.open_run(config) as run:
    print("reward of the step:", next(run).metrics["reward"])
PYTHON
point notebook "reward of the step: [0-9]" -- "$python" "$work/notebook.py" "$work/notebook"

cat >"$work/graded.py" <<'PYTHON'
import sys

import megatron_ibpo as mi


def digits(prompt, response, label, metadata):
    return min(1.0, len(set(response) & set("0123456789")) / 10)


config = mi.load_recipe(
    "small_cpu", hf_checkpoint="examples/tiny_qwen3", rollout_backend="lean", run_dir=sys.argv[1],
    num_rollout=3, rollout_batch_size=4, eval_num_prompts=0, reward_threshold=0.9, rm_type="composite",
    reward_part={digits: 1.0}, prompt_data=[{"prompt": f"{n}+{n}=", "label": str(2 * n)} for n in range(8)],
)
with mi.open_run(config) as run:
    for step in run:
        print("digits of the step:", step.metrics["reward/digits"])
PYTHON
point graded "digits of the step: 0\.[0-9]" -- "$python" "$work/graded.py" "$work/graded"
ibpo graded-page "page\.html" -- page "$work/graded"
point in-a-browser "a curve of 3 steps and 32 rewards in [0-9]+ shades" -- \
    env PYTHONPATH=".:tests:$PYTHONPATH" "$python" tests/support/page_against_journal.py "$work/graded" \
    "$work/graded/page.html"

cat >"$work/my.py" <<'PYTHON'
from megatron_ibpo.loss import Parameter, Variant

def smooth_clip(log_ratio, advantages, *, eps):
    away = (log_ratio.clamp(max=80.0).exp() - 1.0) / eps
    return -advantages * eps * away.tanh(), away.abs() > 1.0

MINE = Variant(token_term=smooth_clip, params={"eps": Parameter(0.2, above=0.0)})
PYTHON
ibpo loss "@triton.jit" "Triton code of the token term: right" "gradient of the token term: right" -- \
    loss "$work/my.py:MINE"

point one-gpu "qwen3_0_6b_one_gpu.yaml" "^This fits" -- env HF_CHECKPOINT=examples/models/qwen3_0_6b GPUS_PER_NODE=1 \
    bash examples/run.sh --dry-run --dry-run-gpu-memory-gib 24

cat >"$work/checkpoints.py" <<'PYTHON'
import sys
from pathlib import Path

import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained("examples/tiny_qwen3")
sizes = {
    "vocab_size": len(tokenizer), "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 128, "max_position_embeddings": 512,
    "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None,
}
mixture = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
for name, more in (("Qwen2", {}), ("Qwen3Moe", mixture)):
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    directory = Path(sys.argv[1]) / name
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(directory)
PYTHON
point checkpoints "Qwen2$" "Qwen3Moe$" -- "$python" "$work/checkpoints.py" "$work"
for family in Qwen2 Qwen3Moe; do
    ibpo "any-checkpoint-$family" "transformers samples .*since vLLM cannot: head_dim 16" "finished: 2 steps" -- \
        train --config small_cpu --hf-checkpoint "$work/$family" --num-rollout 2 --rollout-batch-size 4 \
        --eval-num-prompts 0 --run-dir "$work/run_$family"
done

cat >"$work/game.py" <<'PYTHON'
import random


class Guess:
    def reset(self, **row):
        self._number, self._guesses = random.randint(1, 20), 0
        return " Guess a number from 1 to 20."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: A number from 1 to 20.
        """
        self._guesses += 1
        return "Right!" if number == self._number else "Wrong."


def tries(environments, **columns):
    return [min(1.0, environment._guesses / 2) for environment in environments]


def brevity(completions, **columns):
    return [0.1 / len(messages) for messages in completions]
PYTHON
printf '{"prompt": "Play.", "label": "%s"}\n' 1 2 3 4 >"$work/games.jsonl"
agent=(--config tiny_qwen3_agent --rollout-backend lean --prompt-data "$work/games.jsonl" --rollout-batch-size 4
    --eval-num-prompts 0)
ibpo refused-environment "name the functions that score it by --environment-reward" -- \
    train "${agent[@]}" --environment "$work/game.py:Guess" --run-dir "$work/unscored"
ibpo environment "finished: 2 steps" -- train "${agent[@]}" --environment "$work/game.py:Guess" \
    --environment-reward "$work/game.py:tries" "$work/game.py:brevity" --num-rollout 2 --run-dir "$work/games"
point environment-rewards '"reward/tries": [0-9]' '"reward/brevity": 0\.' -- cat "$work/games/metrics.jsonl"
ibpo version "megatron_ibpo [0-9]" -- --version
point front-door "git clone" "IBPO or GSPO first" "pip install \." "how to remove it all" -- cat README.md

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all points passed in $SECONDS s; their output is in $work"
