"""Make the task of examples/run_code.sh and the tiny policy that it starts from.

    python tools/make_tiny_code_task.py --save examples/code --checkpoint examples/tiny_qwen3_code

A problem shows a linear function at 0 and at 100, such as `f(0)=7, f(100)=4207`, and asks for the program:
`def f(x): return 42*x+7`. It is graded by the function's values elsewhere. The policy learns from solutions
with a planted misconception: about half of them have a factor that is one too large. A fifth of the rows are
compare-and-correct: two solutions and the instruction in the prompt, a third one as the target.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from make_tiny_checkpoint import initial_model, make_tiny_tokenizer

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.basics.records import Prompt, token_ids
from megatron_ibpo.data import CorrectionTemplate, load_tokenizer
from megatron_ibpo.data.prompts import plain_prompt

PHRASES = ("f(0)=", ", f(100)=", "def f(x): return ", "x")
TRAINING, HELD_OUT = 800, 400
"""Rows of each file."""
TESTED_AT = (0, 1, 3, 10, 58)
CORRECTION_SHARE = 0.2


@dataclass
class Arguments:
    save: Path
    """Directory for tiny_train.jsonl and tiny_eval.jsonl."""
    checkpoint: Path | None = None
    """Directory of the policy to write, in Hugging Face format."""
    steps: int = 1500
    rows: int = 64
    """Solutions per step."""
    lr: float = 3e-3
    misled: float = 0.5
    """Probability of a factor that is one too large."""
    seed: int = 0


def problems(seed: int) -> list[tuple[int, int]]:
    """Return (factor, constant) of all problems, in an order of their own."""
    every = [(factor, constant) for factor in range(1, 99) for constant in range(100)]
    random.Random(seed).shuffle(every)
    return every


def question(factor: int, constant: int) -> str:
    return f"f(0)={constant}, f(100)={100 * factor + constant}\n"


def row(factor: int, constant: int) -> dict[str, Any]:
    """Return a prompt with its label, in the format of LiveCodeBench's function-call tests."""
    tests = {
        "inputs": [str(x) for x in TESTED_AT],
        "outputs": [str(factor * x + constant) for x in TESTED_AT],
        "fn_name": "f",
    }
    return {"prompt": question(factor, constant), "label": json.dumps(tests), "task": "linear_program"}


def solution(factor: int, constant: int, rng: random.Random, misled: float) -> str:
    return f"def f(x): return {factor + (rng.random() < misled)}*x+{constant}"


def warm_start(arguments: Arguments, drawn: list[tuple[int, int]]) -> None:
    """Train with supervision on solutions, some of them wrong, in plain torch."""
    assert arguments.checkpoint is not None
    torch.manual_seed(arguments.seed)
    hf_tokenizer = make_tiny_tokenizer(PHRASES)
    hf_tokenizer.save_pretrained(arguments.checkpoint)
    tokenizer = load_tokenizer(arguments.checkpoint)
    template = CorrectionTemplate(tokenizer, num_candidates=2)
    model: Any = initial_model("qwen3", hf_tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, arguments.steps, pct_start=0.1)
    rng = random.Random(arguments.seed)
    begin = time.perf_counter()
    for step in range(arguments.steps):
        ids, targets = [], []
        for number, (factor, constant) in enumerate(rng.choices(drawn, k=arguments.rows)):

            def solve(factor: int = factor, constant: int = constant) -> Any:
                return token_ids(tokenizer.encode(solution(factor, constant, rng, arguments.misled)))

            text = question(factor, constant)
            asked, head = plain_prompt(text, tokenizer)
            if number < CORRECTION_SHARE * arguments.rows:
                prompt = Prompt(0, asked, head_length=head, label="", task="", text=text, metadata={})
                asked = template(prompt, solve(), [solve()])
            answer = [*solve(), tokenizer.eos_id]
            ids.append([*asked, *answer])
            targets.append([*[-100] * len(asked), *answer])
        longest = max(map(len, ids))
        padded = torch.tensor([[*each, *[tokenizer.pad_id] * (longest - len(each))] for each in ids])
        labels = torch.tensor([[*each, *[-100] * (longest - len(each))] for each in targets])
        loss = model(input_ids=padded, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    model.bfloat16().save_pretrained(arguments.checkpoint)
    made = {**vars(arguments), "seconds": round(time.perf_counter() - begin)}
    del made["save"], made["checkpoint"]
    (arguments.checkpoint / "warm_start.json").write_text(json.dumps(made, indent=2) + "\n")


def main(arguments: Arguments) -> None:
    every = problems(arguments.seed)
    arguments.save.mkdir(parents=True, exist_ok=True)
    held_out, training = every[:HELD_OUT], every[HELD_OUT:]
    for name, chosen in (("tiny_eval", held_out), ("tiny_train", training[:TRAINING])):
        lines = [json.dumps(row(factor, constant)) + "\n" for factor, constant in chosen]
        (arguments.save / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if arguments.checkpoint is not None:
        warm_start(arguments, training)


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
