"""The run's settings for a small run that checks them: the same model family, loss, credit, sampling, data
and layout, with few prompts, short responses and float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import least_world
from megatron_ibpo.verify.cut_down import cut_down, is_tiny

PROMPTS, RESPONSES, LONGEST = 4, 4, 64
"""Most prompts of a step, responses per prompt, and tokens per response."""
STEPS = 3
STAND_IN = "megatron_ibpo.verify.stand_in_reward:score"
CACHE_BYTES = 512 * 1024**2
MOST_RANKS = 4
"""Most trainer processes on a machine without GPUs."""


def small_run(config: Config, scratch: Path, *, full: bool) -> Config:
    """Return the settings of the small run.

    Args:
        scratch: directory for its model and its files.
        full: check the run's own model, whatever its size.
    """
    hf_dir = config.model.hf_dir
    if not full and not is_tiny(hf_dir):
        hf_dir = cut_down(hf_dir, scratch / "model", config.run.seed)
    on_gpu = torch.cuda.is_available()
    parallel = config.parallel if on_gpu and full else _small_layout(config.parallel)
    model = replace(
        config.model, hf_checkpoint=hf_dir, bf16=False, mtp_num_layers=0, ref_load=None,
        model_override=config.model.model_override if on_gpu else (),
    )  # fmt: skip
    # a first step is lr · g / (|g| + eps), so that gradients can be read off it
    optimizer = replace(
        config.optimizer, lr=1.0, critic_lr=1e-3, adam_eps=1.0, clip_grad=1e9, lr_warmup_fraction=0.0,
        lr_decay_style="cosine",  # a resume that loses the schedule then shows
        weight_decay=0.0, use_precision_aware_optimizer=False, optimizer_cpu_offload=False,
        overlap_cpu_optimizer_d2h_h2d=False, optimizer_override=(),
    )  # fmt: skip
    trainers = config.cluster.num_trainers if on_gpu else _num_trainers(config, parallel)
    cluster = replace(config.cluster, num_trainers=trainers)
    short = _short(config, scratch, on_gpu=on_gpu)
    return replace(short, model=model, parallel=parallel, optimizer=optimizer, cluster=cluster)


def _short(config: Config, scratch: Path, *, on_gpu: bool) -> Config:
    """Return the settings with few steps, few prompts, short responses and a made-up reward."""
    rollout, steps = config.rollout, config.loss.num_steps_per_rollout
    engine = dict(rollout.parameters)
    if not on_gpu and "vllm_arg" in engine:  # quantization, which CPUs lack, and a GPU's cache
        engine |= {"vllm_arg": (), "vllm_kv_cache_bytes": CACHE_BYTES}
    rollout = replace(
        rollout, parameters=engine,
        rollout_batch_size=max(1, PROMPTS // steps) * steps,
        n_samples_per_prompt=min(rollout.n_samples_per_prompt, RESPONSES),
        rollout_max_response_len=min(rollout.rollout_max_response_len, LONGEST),
        rollout_num_gpus_per_engine=rollout.rollout_num_gpus_per_engine if on_gpu else 1,
        rollout_num_gpus=rollout.rollout_num_gpus if on_gpu else None,
        max_staleness=0, over_sampling_batch_size=None, keep_order=False, check_weight_update_equal=False,
    )  # fmt: skip
    run = replace(
        config.run, run_dir=scratch / "run", num_rollout=STEPS, num_epoch=None, budget=None, load=None,
        load_debug_rollout_data=None, debug_rollout_only=False, save=True, save_interval=1,
        save_interval_minutes=None, eval_num_prompts=0, eval_interval=None, operator_skill_prompts=0,
        gradient_meter_interval=None, use_wandb=False, use_trackio=False, push_to_hub=None,
        export_interval=None,
    )  # fmt: skip
    data = replace(config.data, rm_type=STAND_IN, reward_part=(), reward_threshold=1.0, rm_url=None,
                   rm_model=None, rm_template=None, rm_score=None)  # fmt: skip
    return replace(config, rollout=rollout, run=run, data=data)


def _small_layout(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout with at most two ranks in each direction, and as few in all as a small machine has:
    context parallelism goes first, then pipelines."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
             "expert_tensor_parallel_size", "context_parallel_size")  # fmt: skip
    least: dict[str, Any] = {name: min(2, getattr(parallel, name)) for name in sizes}
    least |= {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}
    small = replace(parallel, **least)
    for name in ("context_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size"):
        if least_world(small) > MOST_RANKS:
            small = replace(small, **dict[str, Any]({name: 1}))
    return small


def _num_trainers(config: Config, small: ParallelConfig) -> int:
    """Return the ranks of the small layout, twice if the run has data parallelism and there is room."""
    least = least_world(small)
    shares = (config.cluster.num_trainers or 1) // least_world(config.parallel)
    return 2 * least if shares > 1 and 2 * least <= MOST_RANKS else least


def described(config: Config, small: Config) -> dict[str, Any]:
    """Return what verify.json says of the settings."""
    return {
        "model": str(config.model.hf_dir),
        "cut_down": small.model.hf_dir != config.model.hf_dir,
        "layout": {name: size for name, size in vars(small.parallel).items() if name.endswith("_size")},
        "trainers": small.cluster.num_trainers,
        "precision": "float32",
        "seed": small.run.seed,
    }
