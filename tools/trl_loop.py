"""The loop of TRL's GSPO trainer, timed: the peer of tools/bench_loop.py, which starts it as a process.

    python tools/trl_loop.py CHECKPOINT '{"prompts": 16, …}' STEPS

prints the seconds of each step as JSON. requirements/bench.txt installs TRL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_loop import TASK, WARM_UP_STEPS, Workload
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_ibpo.config import DataConfig
from megatron_ibpo.data import load_tokenizer, open_sources
from megatron_ibpo.rewards import open_verifier


class Clock(TrainerCallback):
    """The times at which optimizer steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())


def settings(work: Workload, steps: int, directory: str) -> GRPOConfig:
    """Return TRL's settings for GSPO, as its documentation gives them, with the workload's numbers."""
    return GRPOConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=work.eps,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        per_device_train_batch_size=work.prompts * work.samples // work.updates,
        steps_per_generation=work.updates,
        max_steps=steps * work.updates,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        adam_beta2=0.95,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def step_seconds(checkpoint: Path, work: Workload, steps: int) -> list[float]:
    """Train with TRL and return the seconds from one rollout's last update to the next one's."""
    torch.set_num_threads(os.cpu_count() or 1)
    data, total = DataConfig(rm_type=work.reward), WARM_UP_STEPS + steps
    source = open_sources([TASK], load_tokenizer(checkpoint), data, split="train", max_prompt_len=256)
    prompts = source.batch(0, work.prompts * total)
    by_index = {prompt.index: prompt for prompt in prompts}
    columns = {"prompt": [p.text + "\n" for p in prompts], "index": [p.index for p in prompts]}
    # a fingerprint is given, since datasets' pickling of recent pyarrow types fails
    rows = Dataset(InMemoryTable.from_pydict(columns), fingerprint="prompts")
    clock = Clock()
    with open_verifier(data) as verifier, tempfile.TemporaryDirectory() as scratch:

        def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
            scores = verifier.score([(by_index[i], text) for i, text in zip(index, completions, strict=True)])
            return [score.reward or 0.0 for score in scores]

        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(checkpoint),
            reward_funcs=reward,
            train_dataset=rows,
            callbacks=[clock],
            args=settings(work, total, scratch),
        ).train()
    rollouts = clock.ends[work.updates - 1 :: work.updates]
    return [after - before for before, after in pairwise(rollouts)][WARM_UP_STEPS - 1 :]


if __name__ == "__main__":
    _, directory, workload, count = sys.argv
    print(
        json.dumps({"seconds": step_seconds(Path(directory), Workload(**json.loads(workload)), int(count))})
    )
