"""Content of a Megatron distributed checkpoint of policy and critic, and loading it under any layout."""

import io
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.safe_globals import SafeUnpickler
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models.weight_map import mtp_layers
from megatron_ibpo.policy.adapters import sharded_adapters
from megatron_ibpo.policy.critic import Critic
from megatron_ibpo.policy.mtp import Mtp
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights import CheckpointError, first_line, listed
from megatron_ibpo.weights.formats.checkpoint_files import check_integrity
from megatron_ibpo.weights.formats.hf_models import check_finite, check_same_adapters
from megatron_ibpo.weights.formats.run_state import read_layout
from megatron_ibpo.weights.formats.torch_dist import ROWS_MAY_BE_PADDED, StoredCheckpoint, read_metadata
from megatron_ibpo.weights.layout.export import unwrapped

CRITIC = "critic"
"""Directory of the critic in a checkpoint; the tensors of both models have the same names."""
Trained = Trainer | Critic | Mtp
MTP = "mtp_"
"""Prefix of a checkpoint's state of the multi-token prediction layer, except tensors."""


def saved_state(trained: Trainer | Critic) -> dict[str, Any]:
    """Return everything that a checkpoint keeps of a model and of the layer trained beside it: weights, or
    adapters alone, optimizer and schedule, with Megatron's shard names."""
    state: dict[str, Any] = {}
    for prefix, part in _parts(trained):
        models = _models(part.chunks, is_loading=False)
        with gathered_by_kind(), _state_to_save(part) as fresh:
            progress = _progress(part, models, is_loading=False)
        _add_step_0(part, fresh, progress["optimizer"])
        state |= {prefix + name: value for name, value in (models | progress).items()}
    return state


def _parts(trained: Trainer | Critic) -> Iterator[tuple[str, Trained]]:
    """Yield each part that has an optimizer of its own, with the prefix of its state's names."""
    yield "", trained
    if isinstance(trained, Trainer) and trained.mtp is not None:
        yield MTP, trained.mtp


def load_checkpoint(trainer: Trainer, checkpoint: Path, critic: Critic | None = None) -> tuple[str, ...]:
    """Restore weights, optimizer state and schedule, saved under any layout; under the same layout also FP8
    scales. From a checkpoint of weights alone, as the conversion tools write, optimizer, schedule and critic
    stay new.

    Returns:
        notes for the user: what has not been restored, and why.

    Raises:
        CheckpointError: the checkpoint is damaged or unsafe, holds NaN, or is of another model, optimizer or
            adapters, or of no critic although one is trained.
    """
    world = trainer.world
    world.on_all_ranks(lambda: check_integrity(checkpoint, world.rank, world.size))
    saved = read_layout(checkpoint)
    if trainer.mtp is not None and not mtp_layers(StoredCheckpoint(checkpoint).tensors):
        raise CheckpointError(
            f"--load {checkpoint}: holds no multi-token prediction layer, which --mtp-num-layers 1 would "
            "train; leave the flag out"
        )
    world.on_rank_0(lambda: check_same_adapters(saved.get("lora"), trainer.config.model, checkpoint))
    if not saved.get("optimizer", True):
        for _, part in _parts(trainer):
            load_weights(part.chunks, checkpoint, trainer.vocab_size)
            part.optimizer.reload_model_params()
        return _without_scales(trainer, f"{checkpoint} holds none")
    sharded = trainer.config.parallel.use_distributed_optimizer
    if saved and saved["parallel"]["use_distributed_optimizer"] != sharded:
        raise CheckpointError(
            f"--load {checkpoint}: was saved with use_distributed_optimizer={not sharded}; "
            "resume with the same"
        )
    if critic is not None and not (checkpoint / CRITIC).is_dir():
        raise CheckpointError(
            f"--load {checkpoint}: holds no critic, which the estimator of --advantages needs; resume "
            "with the --advantages of its run"
        )
    differing = _differing_sizes(saved.get("parallel", {}), trainer.config.parallel)
    _restore(trainer, checkpoint, trainer.vocab_size, with_scales=not differing)
    if critic is not None:
        _restore(critic, checkpoint / CRITIC, trainer.vocab_size, with_scales=not differing)
    if differing:
        return _without_scales(trainer, f"{checkpoint} was saved with {listed(differing)}")
    if trainer.config.model.lora_rank is not None:
        return _without_scales(trainer, f"{checkpoint} holds adapters only")
    return ()


def _differing_sizes(saved: Mapping[str, Any], present: ParallelConfig) -> list[str]:
    """Return the dimensions that name FP8 scales in which the saved model was divided differently."""
    axes = ("expert_model", "expert_tensor", "pipeline_model", "tensor_model")
    sizes = [f"{axis}_parallel_size" for axis in axes]
    return [f"{name} {saved.get(name)}" for name in sizes if saved.get(name) != getattr(present, name)]


def _without_scales(trained: Trainer, reason: str) -> tuple[str, ...]:
    if not _is_fp8(trained):
        return ()
    return (f"FP8 scales are not restored, since {reason}; they settle again within a few steps",)


def _is_fp8(trained: Trained) -> bool:
    config = trained.chunks[0].config
    return bool(config.fp8 or config.fp4)


def _restore(trained: Trainer | Critic, directory: Path, vocab_size: int, *, with_scales: bool) -> None:
    # a critic's head has one row, for its value, and none for the vocabulary
    keys = ROWS_MAY_BE_PADDED[:1] if isinstance(trained, Critic) else ROWS_MAY_BE_PADDED
    sharded_state: dict[str, Any] = {}
    for prefix, part in _parts(trained):
        for optimizer in _torch_optimizers(part):
            # torch's Adam has no state before a first step; Megatron looks for it
            if not optimizer.optimizer.state:
                optimizer._init_optimizer_states_with_dummy_values()
        places = read_metadata(directory).storage_data if with_scales and _is_fp8(part) else ()
        scales = {index.fqn for index in places if "_extra_state" in index.fqn}  # a conversion has none
        models = _models(part.chunks, is_loading=True, scales=scales)
        progress = _progress(part, models, is_loading=True)
        sharded_state |= {prefix + name: value for name, value in (models | progress).items()}
    state = _load(sharded_state, directory, vocab_size, keys)
    for prefix, part in _parts(trained):
        _fill(part.chunks, state, directory, prefix)
        with _step_left_alone():
            part.optimizer.load_state_dict(state[f"{prefix}optimizer"])
        _check_optimizer(part, directory)
        _give_each_parameter_its_step(part)
        part.scheduler.load_state_dict(state[f"{prefix}scheduler"])


def load_weights(chunks: Sequence[Any], checkpoint: Path, vocab_size: int) -> None:
    """Fill this rank's models, wrapped by DDP or not, from a checkpoint, cast to their dtype; the
    vocabulary's rows beyond `vocab_size` are padding, which a checkpoint may have or not. Raises
    CheckpointError if it is damaged or unsafe, or holds NaN or another model."""
    _fill(chunks, _load(_models(chunks, is_loading=True), checkpoint, vocab_size), checkpoint)


def _load(
    sharded_state: dict[str, Any], checkpoint: Path, vocab_size: int, keys: Sequence[str] = ROWS_MAY_BE_PADDED
) -> dict[str, Any]:
    # reads all pickles safely first: Megatron unpickles them unchecked
    StoredCheckpoint(checkpoint).check_vocabulary(vocab_size, keys)
    try:
        return dist_checkpointing.load(sharded_state, str(checkpoint))
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise CheckpointError(
            f"--load {checkpoint}: cannot be loaded into this model: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """Return an error in one line; torch's exception holds those of all ranks, with tracebacks."""
    inner = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(inner).__name__}: {first_line(inner)[:500]}"


def _fill(chunks: Sequence[Any], state: dict[str, Any], checkpoint: Path, prefix: str = "") -> None:
    for index, chunk in enumerate(chunks):
        chunk_state = state[f"{prefix}model{index}"]
        for name, value in chunk_state.items():
            if _is_extra_state(name):
                _check_scales(value, checkpoint, name)
            elif isinstance(value, torch.Tensor):
                check_finite(value, checkpoint, name)
        # not strict: Transformer Engine's modules miss extra state that `_models` does not ask for
        model = unwrapped(chunk)
        incompatible = model.load_state_dict(chunk_state, strict=False)
        frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
        if frozen:  # a checkpoint of adapters alone
            frozen |= {name for name, _ in model.named_buffers()}
        lacks = [n for n in incompatible.missing_keys if not (_is_extra_state(n) or n in frozen)]
        if lacks or incompatible.unexpected_keys:
            raise CheckpointError(
                f"--load {checkpoint}: is of another model: missing {listed(lacks) or 'nothing'}, "
                f"unexpected {listed(incompatible.unexpected_keys) or 'nothing'}"
            )


def _is_extra_state(name: str) -> bool:
    """Return whether a key is Transformer Engine's FP8 state: scales. Grouped layers number them."""
    return re.fullmatch(r"_extra_state\d*", name.rpartition(".")[2]) is not None


def _check_scales(value: Any, checkpoint: Path, name: str) -> None:
    """Check, with an unpickler that cannot run code, a pickle that Transformer Engine would load unchecked: a
    tensor of bytes, empty without FP8."""
    try:
        if value.numel():
            SafeUnpickler(io.BytesIO(value.numpy().tobytes())).load()
    except Exception as error:
        raise CheckpointError(
            f"--load {checkpoint}: {name} is damaged or unsafe, and was not read: {first_line(error)}; take "
            "another copy of the checkpoint"
        ) from None


def _check_optimizer(trained: Trained, directory: Path) -> None:
    """Refuse NaN in the optimizer's moments: the next step's weights would be NaN."""
    for optimizer in _optimizers(trained):
        for state in optimizer.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    check_finite(value, directory, f"the optimizer's {name}")


def _metadata() -> dict[str, Any]:
    """Return the metadata that Megatron's parts need to name their state."""
    return {
        # one optimizer for dense and expert parameters each: without the flag their keys depend on EP
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        # a sharded optimizer's state is gathered in host memory: otherwise every rank would hold a whole
        # buffer in fp32 on its GPU, and all of them in host memory
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _models(
    chunks: Sequence[Any], *, is_loading: bool, scales: Container[str] = frozenset()
) -> dict[str, Any]:
    """Return the state of each chunk as Megatron names it: its weights, or its adapters alone. `scales` are
    the keys of the extra state to load."""
    models = {}
    for index, model in enumerate(map(unwrapped, chunks)):
        state = sharded_adapters(model) or model.sharded_state_dict(metadata=_metadata())
        if is_loading:
            state = {
                key: value
                for key, value in state.items()
                if not _is_extra_state(key) or value.unique_key in scales
            }
        models[f"model{index}"] = state
    return models


def _progress(trained: Trained, models: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    """Return the state of optimizer and schedule."""
    optimizer = trained.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=_metadata())
    return {"optimizer": _without_classes(optimizer), "scheduler": trained.scheduler.state_dict()}


def _without_classes(state: Any) -> Any:
    """Return the state without classes: an optimizer in host memory names those it is made of, and a
    checkpoint with pickled code cannot be read."""
    if isinstance(state, dict):
        return {key: _without_classes(value) for key, value in state.items() if not isinstance(value, type)}
    return [_without_classes(value) for value in state] if isinstance(state, list) else state


def _optimizers(trained: Trained) -> Sequence[Any]:
    """Return Megatron's optimizers, of dense and of expert parameters."""
    optimizers: Sequence[Any] = trained.optimizer.chained_optimizers
    return optimizers


@contextmanager
def _state_to_save(trained: Trained) -> Iterator[list[Any]]:
    """While it is saved, give optimizers that have not stepped yet the state that their first step starts
    from, and yield them: Megatron could not load a checkpoint without it."""
    fresh = [
        optimizer
        for optimizer in _optimizers(trained)
        if optimizer.init_state_fn is not None and not optimizer.optimizer.state
    ]
    for optimizer in fresh:
        optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
        if isinstance(optimizer.optimizer, torch.optim.Adam):
            for state in optimizer.optimizer.state.values():
                state["step"] = torch.zeros(())
    try:
        yield fresh
    finally:
        for optimizer in fresh:
            optimizer.optimizer.state.clear()  # Adam steps only with a state that it has created


def _add_step_0(trained: Trained, fresh: Sequence[Any], saved: dict[Any, Any]) -> None:
    """Add the step of torch's Adam if it is 0, which Megatron takes for absent and leaves out."""
    optimizers = _optimizers(trained)
    for index, optimizer in enumerate(optimizers):
        # a sharded optimizer saves it with its tensors
        sharded = isinstance(optimizer, DistributedOptimizer)
        if optimizer in fresh and isinstance(optimizer.optimizer, torch.optim.Adam) and not sharded:
            state = saved[index] if len(optimizers) > 1 else saved
            state.get("optimizer", state)["state"]["common_step"] = torch.zeros(())


def _torch_optimizers(trained: Trained) -> Iterator[DistributedOptimizer]:
    """Yield sharded optimizers around torch's Adam; megatron-core 0.19 cannot load these unaided."""
    for optimizer in _optimizers(trained):
        if isinstance(optimizer, DistributedOptimizer) and isinstance(optimizer.optimizer, torch.optim.Adam):
            yield optimizer


def _step_left_alone() -> AbstractContextManager[Any]:
    """Keep Megatron from filling in each parameter's `step`, which is set and has no tensor there."""
    fill_in = DistributedOptimizer._set_main_param_and_optimizer_states

    def fill_in_all_but_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        fill_in(self, parameter, {"step": None, **tensors})

    return mock.patch.object(
        DistributedOptimizer, "_set_main_param_and_optimizer_states", fill_in_all_but_step
    )


def _give_each_parameter_its_step(trained: Trained) -> None:
    """Give each parameter its own `step`: Megatron loads one tensor, which each of them would count up."""
    for optimizer in _torch_optimizers(trained):
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()


def gathered_by_kind() -> AbstractContextManager[Any]:
    """Make Megatron gather a sharded optimizer's state in main memory one kind after the other, within the
    context.

    Megatron's function holds all kinds of state of a bucket beside the whole at once: 24 bytes per parameter
    on the first data-parallel rank, and 12 per parameter of its shard. Here these are 16 and 4.
    """
    return mock.patch.object(DistributedOptimizer, "get_parameter_state_dp_zero", _gather)


def _gather(optimizer: Any, **_: Any) -> dict[Any, Any] | None:
    """Return Megatron's dictionary on the data-parallel group's first rank, else None. Collective."""
    kinds = ("param", *optimizer.optimizer_state_keys)
    group = optimizer.data_parallel_group_gloo
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges_by_dtype in enumerate(optimizer.gbuf_ranges):
        ((dtype, ranges),) = ranges_by_dtype.items()
        buffer = optimizer.buffers[index]
        # reused for every bucket and kind: gloo's threads hold gathered data a little longer than the gather
        # takes, so fresh memory for each would exist twice
        elements = max(bucket.grad_data.numel() for bucket in buffer.buckets)
        scratch = _on_host(elements // group.size()), _on_host(elements) if group.rank() == 0 else None
        state[index] = {
            dtype: {kind: _gathered_state(optimizer, buffer, ranges, kind, *scratch) for kind in kinds}
        }
        state[index][dtype]["numel_unpadded"] = buffer.numel_unpadded
    return state if group.rank() == 0 else None


def _gathered_state(
    optimizer: Any, buffer: Any, ranges: Sequence[Any], kind: str, shard_memory: Tensor, memory: Tensor | None
) -> Tensor | None:
    """Return one kind of state of all parameters in a buffer, float32 [elements without padding]; None except
    on the first rank.

    Args:
        ranges: by bucket: the part of each parameter that is this rank's.
        shard_memory, memory: room for a shard of the largest bucket, and on the first rank for all of it.
    """
    group = optimizer.data_parallel_group_gloo
    gathered = None if memory is None else _on_host(buffer.numel_unpadded)
    start, first_rank = 0, dist.get_global_rank(group, 0)
    for bucket, bucket_ranges in zip(buffer.buckets, ranges, strict=True):
        size, end = bucket.numel_unpadded, start + bucket.numel_unpadded
        shard = shard_memory[: bucket.grad_data.numel() // group.size()].zero_()
        for parameter, places in bucket_ranges["param_map"].items():
            place = places["gbuf_local"]
            state = optimizer._get_main_param_and_optimizer_states(parameter)[kind]
            shard[place.start : place.end].copy_(state.detach())
        if gathered is None or memory is None:
            dist.gather(shard, None, first_rank, group)
        else:
            shards = memory[: len(shard) * group.size()].chunk(group.size())
            dist.gather(shard, list(shards), first_rank, group)
            gathered[start:end].copy_(memory[:size])
        start = end
    return gathered


def _on_host(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float32, device="cpu")
