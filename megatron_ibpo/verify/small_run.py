"""The run's settings for a small run that checks them: the same model family, loss, credit, sampling, data
and layout, with few prompts, short responses, float32, and a small random model in place of a large one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.config.run import RunConfig
from megatron_ibpo.data.tokenizer import TOKENIZER_FILES
from megatron_ibpo.models import least_world
from megatron_ibpo.weights.formats.checkpoint_files import has_weights

PROMPTS, RESPONSES, LONGEST = 4, 4, 64
"""Most prompts of a step, responses per prompt, and tokens per response."""
STEPS, MOST_RANKS = 3, 4
"""Steps of the run, and most trainer processes on a machine without GPUs."""
STAND_IN = "megatron_ibpo.verify.made_up_rewards:score"
CACHE_BYTES, TINY_BYTES = 512 * 1024**2, 64 * 1024**2
"""Cache of an engine on CPUs, and largest weights that are used as they are."""
SPREAD = 0.1
"""Standard deviation of the random weights, with which logits are not flat."""
SMALL: dict[str, int] = {
    "intermediate_size": 192, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 32,
    "hidden_size": 96, "sliding_window": 24, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Field of config.json → the most of it in the small model. Heads of 32 are never 96 in all."""
HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)


def small_run(config: Config, scratch: Path, *, full: bool) -> Config:
    """Return the settings of the small run.

    Args:
        scratch: directory for its model and its files.
        full: check the run's own model, whatever its size.
    """
    on_gpu, hf_dir, rollout, run = torch.cuda.is_available(), config.model.hf_dir, config.rollout, config.run
    files = [*hf_dir.glob("*.safetensors"), *hf_dir.glob("*.bin")]
    is_tiny = has_weights(hf_dir) and sum(file.stat().st_size for file in files) <= TINY_BYTES
    parallel = config.parallel if on_gpu and full else _small_layout(config.parallel)
    trainers, least = config.cluster.num_trainers, least_world(parallel)
    if not on_gpu:
        has_shares = (trainers or 1) // least_world(config.parallel) > 1 and 2 * least <= MOST_RANKS
        trainers = least * (2 if has_shares else 1)
    engine = dict(rollout.parameters)
    if not on_gpu and "vllm_arg" in engine:  # quantization, which CPUs lack, and a GPU's cache
        engine |= {"vllm_arg": (), "vllm_kv_cache_bytes": CACHE_BYTES}
    return replace(
        config,
        model=replace(
            config.model, bf16=False, mtp_num_layers=0, ref_load=None,
            share_prompts=False if on_gpu else config.model.share_prompts,
            hf_checkpoint=hf_dir if full or is_tiny else cut_down(hf_dir, scratch / "model", run.seed),
            model_override=config.model.model_override if on_gpu else (),
        ),
        parallel=parallel,
        # a first step is lr · g / (|g| + eps), so that gradients can be read off it
        optimizer=replace(
            config.optimizer, lr=1.0, critic_lr=1e-3, adam_eps=1.0, clip_grad=1e9, lr_warmup_fraction=0.0,
            lr_decay_style="cosine",  # a resume that loses the schedule then shows
            weight_decay=0.0, use_precision_aware_optimizer=False, optimizer_cpu_offload=False,
            overlap_cpu_optimizer_d2h_h2d=False, optimizer_override=(),
        ),
        cluster=replace(config.cluster, num_trainers=trainers),
        rollout=replace(
            rollout, parameters=engine,
            rollout_batch_size=max(1, PROMPTS // (steps := config.loss.num_steps_per_rollout)) * steps,
            n_samples_per_prompt=min(rollout.n_samples_per_prompt, RESPONSES),
            rollout_max_response_len=min(rollout.rollout_max_response_len, LONGEST),
            rollout_num_gpus_per_engine=rollout.rollout_num_gpus_per_engine if on_gpu else 1,
            rollout_num_gpus=rollout.rollout_num_gpus if on_gpu else None,
            max_staleness=0, over_sampling_batch_size=None, keep_order=False, check_weight_update_equal=False,
        ),
        run=RunConfig(
            run_dir=scratch / "run", num_rollout=STEPS, seed=run.seed, save_interval=1,
            save_interval_minutes=None, eval_num_prompts=0, operator_skill_prompts=0,
            max_reward_error_rate=run.max_reward_error_rate, max_nonfinite_steps=run.max_nonfinite_steps,
        ),
        data=replace(
            config.data, rm_type=STAND_IN, reward_part=(), reward_threshold=1.0, rm_url=None, rm_model=None,
            rm_template=None, rm_score=None,
        ),
    )  # fmt: skip


def _small_layout(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout with at most two ranks in each direction, and as few in all as a small machine has:
    context parallelism goes first, then pipelines."""
    least: dict[str, Any] = {
        name: min(2, size) for name, size in vars(parallel).items() if name.endswith("_size")
    }
    least |= {"decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None}
    for name in ("context_parallel_size", "pipeline_model_parallel_size", "expert_tensor_parallel_size"):
        if least_world(replace(parallel, **least)) > MOST_RANKS:
            least[name] = 1
    return replace(parallel, **least)


def cut_down(hf_dir: Path, target: Path, seed: int) -> Path:
    """Write a model of the same family with few layers and a small hidden size into `target`, with random
    weights in float32 and the same tokenizer. Return `target`."""
    from transformers import AutoConfig, AutoModelForCausalLM  # take seconds

    config = AutoConfig.from_pretrained(hf_dir).get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the small weights are not packed
    _shrink(config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 1 and (tensor.requires_grad or name.endswith("e_score_correction_bias")):
                tensor.add_(torch.randn_like(tensor) * SPREAD / 2)  # constants would hide a mix-up
    model.save_pretrained(target)
    for name in ("generation_config.json", *TOKENIZER_FILES):
        if (hf_dir / name).is_file():
            shutil.copyfile(hf_dir / name, target / name)
    return target


def _shrink(config: Any) -> None:
    """Make the sizes small; keep every kind of layer, in an even number for two pipeline stages, and what
    decides how a layer is laid out: ratios of heads, experts, ties."""
    kinds = getattr(config, "layer_types", None) or [0]
    last_new = max(kinds.index(kind) for kind in kinds) + 1
    fewest = max(last_new + last_new % 2, 4 if getattr(config, "first_k_dense_replace", 0) else 2)
    config.num_hidden_layers = min(config.num_hidden_layers, fewest)
    if kinds != [0]:
        config.layer_types = kinds[: config.num_hidden_layers]
    for of_values, of_keys in HEADS:
        if keys := getattr(config, of_keys, 0):
            ratio = min(max(1, getattr(config, of_values) // keys), 2)
            setattr(config, of_keys, min(2, keys))
            setattr(config, of_values, min(2, keys) * ratio)
    for name, most in SMALL.items():
        if isinstance(value := getattr(config, name, None), int):
            setattr(config, name, min(value, most))
    config.initializer_range = SPREAD
    config.pad_token_id = None  # its embedding would be 0, which a norm magnifies a thousandfold
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 1, 1]  # of the 32 / 8 pairs that are rotated
