"""A run's settings resolved: what depends on its model, its data or its devices is filled in here, once."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_ibpo.cluster.placement import Placement
from megatron_ibpo.config import Config, ConfigError
from megatron_ibpo.credit import Method, find_method
from megatron_ibpo.data import PromptSource
from megatron_ibpo.data.tokenizer import read_eos_token_ids
from megatron_ibpo.engines.protocol import EngineSettings
from megatron_ibpo.engines.registry import (
    all_readers,
    check_model,
    check_truncation,
    fallback_note,
    on_device,
    run_settings,
)
from megatron_ibpo.models import ModelShape, check_layout, read_hf_config, world_problems
from megatron_ibpo.models.lora import check_lora
from megatron_ibpo.policy.overrides import read_overrides


@dataclass(frozen=True)
class Foundation:
    """The model and the method of a run, known before its data are read and its devices are counted."""

    hf_dir: Path
    shape: ModelShape
    max_context: int
    """Limit of tokens in prompt and response together."""
    method: Method

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response. Raises ValueError if the model names none: a replay needs none."""
        return read_eos_token_ids(self.hf_dir)


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings of a run with nothing left open."""

    config: Config
    """All settings, with every default filled in."""
    foundation: Foundation
    placement: Placement
    engine_settings: EngineSettings | None = None
    """None without engine processes."""
    engine_note: str | None = None
    """Line for the user about an engine that was not named."""

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return self.foundation.shape

    @cached_property
    def logprob_readers(self) -> tuple[str, ...]:
        """Settings under which the loss reads the engine's log-probs. Reading it imports torch."""
        return tuple(all_readers(self.config))

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return len(self.placement.trainers)

    @property
    def accelerators(self) -> int:
        """GPUs that the run holds: the trainers', and the engines' unless they share them; on CPUs its
        trainer ranks."""
        placement, size = self.placement, self.config.rollout.rollout_num_gpus_per_engine
        has_own_gpus = placement.on_gpu and not placement.colocated
        return self.world_size + (len(placement.engines) * size if has_own_gpus else 0)


def read_foundation(config: Config) -> Foundation:
    """Read the model's config.json, and build the method. Raises ValueError if there is no usable
    config.json, --rollout-max-context-len exceeds the model's context or leaves no room for a prompt, or a
    parameter of the method is out of range."""
    hf_dir, rollout = config.model.hf_dir, config.rollout
    shape = read_hf_config(hf_dir)
    limit, longest = shape.max_position_embeddings, rollout.rollout_max_response_len
    context = rollout.context_of(limit)
    if context > limit:
        raise ValueError(f"--rollout-max-context-len {context}: more than the model's context of {limit}")
    if longest >= context:
        raise ValueError(
            f"--rollout-max-response-len {longest} leaves no room for a prompt in a context of {context}"
        )
    return Foundation(hf_dir, shape, context, find_method(config.algorithm))


def check_model_layout(shape: ModelShape, config: Config, world_size: int) -> None:
    """Refuse a layout that cannot hold the model. Raises ValueError with one line per problem."""
    if config.replays_routing and not shape.is_moe:
        raise ValueError(
            f"--use-rollout-routing-replay and --use-routing-replay: {shape.family} is dense and routes "
            "nothing; drop them"
        )
    mtp, chunks = config.model.mtp_num_layers, read_overrides(config).chunks
    _refuse_layout(check_layout(shape, config.parallel, world_size, chunks, mtp))
    adapted = config.model.lora_rank is not None
    if adapted and (problems := check_lora(config.model, shape, config.parallel, chunks)):
        raise ConfigError("\n  ".join(["these adapters cannot be trained:", *problems]))


def settle(config: Config, foundation: Foundation, prompts: PromptSource | None) -> Config:
    """Return the configuration with what does not depend on devices filled in: config.yaml and the journal
    record it, so that a run may resume on other machines.

    Args:
        prompts: prompts of training; None if recorded rollouts are replayed, or for an evaluation.

    Raises:
        ValueError: --num-epoch with prompts that never repeat.
    """
    rollout = replace(config.rollout, rollout_max_context_len=foundation.max_context)
    return replace(config, rollout=rollout, run=replace(config.run, num_rollout=num_steps(config, prompts)))


def num_steps(config: Config, prompts: PromptSource | None) -> int:
    """Return the number of steps: --num-rollout, or that of --num-epoch passes over the prompts. Raises
    ValueError if the prompts never repeat."""
    epochs = config.run.num_epoch
    if epochs is None or prompts is None:
        return config.run.num_rollout
    size = prompts.num_prompts()
    if not size:
        raise ValueError(
            "--num-epoch: a generated task never repeats, so it has no epochs; use --num-rollout"
        )
    return -(-epochs * size // config.rollout.rollout_batch_size)


def resolve(
    config: Config, foundation: Foundation, placement: Placement, *, trains: bool = True
) -> ResolvedConfig:
    """Return the settings of a run on these devices.

    Args:
        config: the configuration as `settle` returns it.
        trains: False for an evaluation.

    Raises:
        ValueError: the layout does not divide the number of trainers; or the engine cannot compute the model
            on these devices, cannot be had with these settings, or does not sample as the loss needs it.
    """
    world_size, shape = len(placement.trainers), foundation.shape
    if world_size:
        _refuse_layout(world_problems(shape, config.parallel, world_size))
        config = replace(config, cluster=replace(config.cluster, num_trainers=world_size))
    on_gpu, note, settings = placement.on_gpu, None, None
    if placement.engines:
        note = fallback_note(config.rollout, shape, on_gpu=on_gpu)
    config = on_device(config, shape, on_gpu=on_gpu)
    if placement.engines:
        check_model(config.rollout, shape, on_gpu=on_gpu)
        settings = run_settings(config, foundation.hf_dir, shape, on_gpu=on_gpu, trains=trains)
    if placement.engines and trains:
        readers = all_readers(config)
        check_truncation(config, readers, on_gpu=on_gpu)
    return ResolvedConfig(config, foundation, placement, settings, note)


def _refuse_layout(problems: list[str]) -> None:
    if problems:
        raise ValueError("this layout cannot hold the model:\n  " + "\n  ".join(problems))
