"""Samples per second of the whole loop, compared with TRL's GSPO trainer, on the same model in the same run.

    python tools/bench_loop.py examples/tiny_qwen3_next --save tools/results/bench_loop.json

Both sides use the same checkpoint, prompts, verifier, G, response length, temperature and optimizer steps per
rollout. This project runs the preset `gspo` with everything a step does: sampling by vLLM in a separate
process, scoring, old log-probs, updates, weight sync, metrics. TRL runs GRPOTrainer with sequence-level
importance sampling, generating in its own process (requirements/bench.txt installs it). The two take turns;
the compared time is that from one rollout to the next, without the first ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import bench
import tyro

from megatron_ibpo.basics.entry_point import run_tool

TASK = "reasoning_gym://chain_sum?min_terms=5&max_terms=7&min_digits=1&max_digits=1&compact=1"
WARM_UP_STEPS = 3


@dataclass
class Workload:
    """One rollout step, for both sides."""

    prompts: int = 16
    samples: int = 8
    new_tokens: int = 48
    updates: int = 2
    lr: float = 3e-4
    eps: float = 3e-3


@dataclass
class Arguments:
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    """Checkpoints in Hugging Face format, each benchmarked on both sides."""
    save: Path | None = None
    """JSON file for the results."""
    steps: int = 12
    """Rollouts per side and turn, after the warm-up ones."""
    turns: int = 2
    """Number of turns of each side."""
    ranks: int = 2
    """Trainer processes of this project."""
    tensor_parallel: int = 1
    """TP of these processes (and EP for mixtures of experts); the rest is data parallel."""
    peer: Literal["trl", "none"] = "trl"
    work: tyro.conf.OmitArgPrefixes[Workload] = field(default_factory=Workload)


def run_ours(checkpoint: Path, work: Workload, arguments: Arguments, run_dir: Path) -> list[dict[str, float]]:
    """Return the seconds by stage of each step after the warm-up."""
    is_moe = "num_experts" in json.loads((checkpoint / "config.json").read_text())
    command = [
        sys.executable, "-m", "megatron_ibpo.commands.train",
        "--num-trainers", str(arguments.ranks),
        "--advantage-estimator", "gspo",
        "--hf-checkpoint", str(checkpoint),
        "--tensor-model-parallel-size", str(arguments.tensor_parallel),
        "--expert-model-parallel-size", str(arguments.tensor_parallel if is_moe else 1),
        "--prompt-data", TASK,
        "--rollout-batch-size", str(work.prompts),
        "--n-samples-per-prompt", str(work.samples),
        "--rollout-max-response-len", str(work.new_tokens),
        "--num-steps-per-rollout", str(work.updates),
        "--lr", str(work.lr), "--lr-decay-style", "constant", "--lr-warmup-fraction", "0",
        "--eps-clip", str(work.eps), "--eps-clip-high", str(work.eps),
        "--vllm-dtype", "bfloat16" if is_moe else "float32",
        "--num-rollout", str(WARM_UP_STEPS + arguments.steps),
        "--eval-num-prompts", "0", "--no-save",
        "--run-dir", str(run_dir),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=1200, env=environment, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["seconds"] for row in rows if row["kind"] == "step"][WARM_UP_STEPS:]


def run_trl(checkpoint: Path, work: Workload, steps: int) -> list[float]:
    """Return the seconds of each rollout with its updates, after the warm-up, in a separate process."""
    command = [
        sys.executable, __file__, str(checkpoint), "--steps", str(steps), "--as-trl",
        json.dumps(asdict(work)),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=True, timeout=1200, env=environment, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def train_with_trl(checkpoint: Path, work: Workload, steps: int) -> list[float]:
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megatron_ibpo.config import DataConfig
    from megatron_ibpo.data import load_tokenizer, open_source
    from megatron_ibpo.rewards import open_verifier

    torch.set_num_threads(os.cpu_count() or 1)
    data = DataConfig()
    source = open_source(TASK, load_tokenizer(checkpoint), data, split="train", max_prompt_len=256)
    total = WARM_UP_STEPS + steps
    prompts = source.batch(0, work.prompts * total)
    by_index = {prompt.index: prompt for prompt in prompts}
    # with its own fingerprint: datasets' pickling of recent pyarrow types fails
    columns = {"prompt": [p.text + "\n" for p in prompts], "index": [p.index for p in prompts]}
    rows = Dataset(InMemoryTable.from_pydict(columns), fingerprint="prompts")
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.perf_counter())

    with open_verifier(data) as verifier, tempfile.TemporaryDirectory() as scratch:

        def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
            scores = verifier.score([(by_index[i], text) for i, text in zip(index, completions, strict=True)])
            return [score.reward or 0.0 for score in scores]

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(checkpoint),
            reward_funcs=reward,
            train_dataset=rows,
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                importance_sampling_level="sequence",
                beta=0.0,
                epsilon=work.eps,
                num_generations=work.samples,
                max_completion_length=work.new_tokens,
                per_device_train_batch_size=work.prompts * work.samples // work.updates,
                steps_per_generation=work.updates,
                max_steps=total * work.updates,
                learning_rate=work.lr,
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                adam_beta2=0.95,
                shuffle_dataset=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    rollouts = ends[work.updates - 1 :: work.updates]
    gaps = [after - before for before, after in pairwise(rollouts)]
    return gaps[WARM_UP_STEPS - 1 :]


def compare(checkpoint: Path, arguments: Arguments) -> dict[str, Any]:
    """Compare both sides in turns, on one checkpoint."""
    work = arguments.work
    stages: list[dict[str, float]] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(arguments.turns):
            stages += run_ours(checkpoint, work, arguments, Path(scratch) / str(turn))
            if arguments.peer == "trl":
                theirs += run_trl(checkpoint, work, arguments.steps)
    per_step = work.prompts * work.samples
    ours = [sum(step.values()) for step in stages]
    result: dict[str, Any] = {
        "checkpoint": checkpoint.name,
        "ours_seconds_a_step": round(statistics.median(ours), 3),
        "ours_samples_a_second": round(per_step / statistics.median(ours), 1),
        "ours_seconds_by_stage": {
            name: round(statistics.median(step.get(name, 0.0) for step in stages), 3)
            for name in ("sample", "score", "credit", "train", "sync", "report")
        },
        "ours_all_seconds": [round(s, 3) for s in ours],
    }
    if theirs:
        result |= {
            "trl_seconds_a_step": round(statistics.median(theirs), 3),
            "trl_samples_a_second": round(per_step / statistics.median(theirs), 1),
            "trl_all_seconds": [round(s, 3) for s in theirs],
            "ours_over_trl": round(statistics.median(theirs) / statistics.median(ours), 2),
        }
    return result


def main(arguments: Arguments) -> None:
    results = [compare(checkpoint, arguments) for checkpoint in arguments.checkpoints]
    for result in results:
        print({name: value for name, value in result.items() if not name.endswith("all_seconds")}, flush=True)
    names = ("steps", "turns", "ranks", "tensor_parallel")
    options = {name: getattr(arguments, name) for name in names}
    record = {"workload": asdict(arguments.work), "options": options, "results": results}
    bench.save(arguments.save, record)


if __name__ == "__main__":
    if "--as-trl" in sys.argv:
        _, directory, _, count, _, workload = sys.argv
        print(json.dumps(train_with_trl(Path(directory), Workload(**json.loads(workload)), int(count))))
    else:
        run_tool(main, Arguments, __doc__)
