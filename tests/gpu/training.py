"""One trainer as the driver uses it, in this process: no Ray, no engine, random responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from job import Job
from random_models import SHAPES, TINY_SHAPES, make_random_model

from megatron_ibpo.basics.records import TrainSequence, token_ids
from megatron_ibpo.config import Config, ModelConfig, OptimizerConfig, RolloutConfig
from megatron_ibpo.models import forward_flops, read_hf_config

if not hasattr(torch.accelerator, "empty_host_cache"):  # torch 2.11 has it by another name
    torch.accelerator.empty_host_cache = lambda: torch._C._host_emptyCache()


@dataclass(frozen=True)
class Load:
    sequences: int
    prompt: int
    response: int  # longest; lengths are spread evenly from an eighth of it on
    max_tokens: int  # --max-tokens-per-gpu

    @property
    def context(self) -> int:
        return self.prompt + self.response


def load_of(job: Job, *, slow: bool = False) -> Load:
    """`slow`: for a delta net in plain torch, which goes through a sequence in chunks one after the other."""
    if not job.on_gpu:
        return Load(sequences=8, prompt=4, response=28, max_tokens=128)
    if slow or not job.is_large:
        return Load(sequences=8, prompt=256, response=1024, max_tokens=2048)
    return Load(sequences=24 if job.quick else 48, prompt=256, response=3840, max_tokens=8192)


def make_sequences(load: Load, vocabulary: int, seed: int = 0) -> list[TrainSequence]:
    """Random tokens; half of the sequences with a positive advantage."""
    generator, lengths = (
        np.random.default_rng(seed),
        np.linspace(load.response // 8, load.response, load.sequences),
    )
    return [
        TrainSequence(
            token_ids(generator.integers(vocabulary, size=load.prompt).tolist()),
            token_ids(generator.integers(vocabulary, size=length).tolist()),
            np.ones(length, bool), advantage=1.0 if number % 2 else -0.5, weight=1.0 / load.sequences,
            prompt_index=number // 2, group=number // 2, index=number % 2,
        )
        for number, length in enumerate(lengths.astype(int))
    ]  # fmt: skip


def set_up(job: Job, family: str, *, slow: bool = False, **sections: Any) -> tuple[Load, Config, list[Any]]:
    """The load, settings and sequences of a part; with a learning rate at which five steps show."""
    load, shape = load_of(job, slow=slow), (SHAPES if job.on_gpu else TINY_SHAPES)[family]
    dtype = torch.bfloat16 if job.on_gpu else torch.float32
    path = make_random_model(job.scratch / "model", shape, job.device, dtype)
    model = ModelConfig(hf_checkpoint=path, bf16=job.on_gpu, max_tokens_per_gpu=load.max_tokens)
    model.allow_local_modules = True
    optimizer = OptimizerConfig(lr=1e-4, lr_decay_style="constant", lr_warmup_fraction=0)
    rollout = RolloutConfig(rollout_max_context_len=load.context, rollout_max_response_len=load.response)
    config = Config(model=model, optimizer=optimizer, rollout=rollout, **sections)
    return load, config, make_sequences(load, read_hf_config(path).vocab_size)


class OneRank:
    """`policy.group.RankCalls` for a single trainer in this process."""

    def __init__(self, config: Config, checkpoint: Path | None = None):
        from megatron_ibpo.policy.process_start import trainer_rank

        self.rank = trainer_rank(config, checkpoint)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        (own,) = arguments
        return [getattr(self.rank, method)(*own)]

    def all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(self.rank, method)(*arguments)]

    def share(self, value: Any) -> Any:
        return value

    def restart(self, *arguments: Any) -> None:
        raise NotImplementedError("a part that resumes starts another process")


def start_policy(config: Config, checkpoint: Path | None = None) -> tuple[Any, OneRank]:
    from megatron_ibpo.policy.group import Policy

    assert config.model.hf_checkpoint is not None
    cost = partial(forward_flops, read_hf_config(config.model.hf_checkpoint))
    ranks = OneRank(config, checkpoint)
    return Policy(ranks, config, 1, cost), ranks
