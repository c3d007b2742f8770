"""Hugging Face checkpoints into Megatron models, and the export back to disk: all of it, or nothing. Each
rank reads only what it holds.

Adapters are exported as a directory that PEFT loads, and a checkpoint's are compared with a run's: same rank,
scale, targets and base.
"""

import hashlib
import json
import logging
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import ModelShape, read_hf_config
from megatron_ibpo.models.lora import EXPERTS, Lora, adapted, chosen_lora, pairs, target_of
from megatron_ibpo.models.weight_map import Entry, mtp_layers, weight_map
from megatron_ibpo.weights import CheckpointError, listed
from megatron_ibpo.weights.formats.directories import write_directory
from megatron_ibpo.weights.formats.hugging_face import (
    Checkpoint,
    SafetensorsFile,
    copy_all_but_weights,
    file_names,
    write_index,
)
from megatron_ibpo.weights.layout.export import (
    HFExport,
    Holding,
    my_holding,
    named_globally,
    weights_by_global_name,
)
from megatron_ibpo.weights.layout.regions import TensorMeta, plan_buckets

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 * 1000**3
"""Largest safetensors file."""
ADAPTER = "adapter"
"""Directory of the adapter in a checkpoint or an export."""
_ADAPTER_WEIGHTS, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_EXPERT = re.compile(rf"(.*\.{EXPERTS})\.(\w+)\.(\d+)\.(lora_[AB])\.weight$")
_WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""Wrapper suffixes: PEFT wraps a module once per tensor with an adapter, in the order of these."""
_RENAMED = ("gate_proj", "up_proj", "down_proj")
"""Names that PEFT 0.21, in a mixture of experts, takes for the experts' names from before transformers 5
fused them, even if they are a shared expert's."""
_BLOCKS, _BLOCK_BYTES = 256, 64 * 1024
"""Number and size of the evenly spaced blocks that are hashed of a weight file; a small file is read
whole."""


def load_hf(chunks: list[Any], shape: ModelShape, hf_dir: Path, *, head: bool = True) -> None:
    """Fill this rank's parameters, and buffers that are weights, from the checkpoint in `hf_dir`, cast to
    their dtype. Rows that pad the vocabulary become 0. `head=False` leaves the output layer as it is: a value
    model has one of its own.

    Raises:
        CheckpointError: a file is missing or truncated, or a tensor is missing, superfluous, of another shape
            than config.json says, in MXFP4 or not floating-point: nothing is written then. Or a tensor holds
            NaN or infinity.
    """
    checkpoint = Checkpoint(hf_dir)
    checkpoint.refuse_packed()
    holding = my_holding(shape, chunks)
    entries = weight_map(shape, vocab_rows=holding.vocab_rows)
    if ignored := checkpoint.check(shape, entries.values()):
        logger.warning("%s: not part of the policy: %s", hf_dir, listed(ignored))
    weights = weights_by_global_name(chunks, holding)
    named = ((name, weight) for name, weight in weights if head or not name.startswith("output_layer."))
    _fill(named, entries, checkpoint, holding)


def load_mtp(model: Any, policy: list[Any], shape: ModelShape, hf_dir: Path) -> None:
    """Fill this rank's part of the multi-token prediction layer `model` (`policy.mtp.build_mtp`) of `policy`
    from the checkpoint in `hf_dir`. Raises CheckpointError as `load_hf`, or if the checkpoint has no such
    layer, or several."""
    checkpoint = Checkpoint(hf_dir)
    layers = mtp_layers(checkpoint)
    if layers != 1:
        raise CheckpointError(
            f"{hf_dir} holds {layers} multi-token prediction layers (mtp.layers.*), but --mtp-num-layers "
            "1 trains exactly one; leave the flag out, or take a checkpoint with one"
        )
    holding = my_holding(shape, policy)
    entries = weight_map(shape, 1, holding.vocab_rows)
    checkpoint.check(shape, entries.values())
    _fill(named_globally(model, 0, holding), entries, checkpoint, holding)


@torch.no_grad()
def _fill(
    weights: Iterable[tuple[str, Tensor]],
    entries: Mapping[str, Entry],
    checkpoint: Checkpoint,
    holding: Holding,
) -> None:
    """Fill the weights, which come with their names in the whole model."""
    for name, weight in weights:
        entry = entries[name]
        cuts = checkpoint.read_shard(entry, *holding.shard(entry))
        for piece, cut in zip(entry.pieces, cuts, strict=True):
            check_finite(cut, checkpoint.directory, piece.name)
        shard = entry.assemble(cuts, *holding.shard(entry))
        rows = len(weight) - entry.padding(*holding.shard(entry))
        assert shard.shape == weight[:rows].shape, f"{name}: {shard.shape} read for {weight.shape}"
        weight[:rows].copy_(shard)
        weight[rows:].zero_()


def check_finite(tensor: Tensor, source: Path, name: str) -> None:
    """Refuse a tensor with NaN or infinity: one NaN makes every log-prob NaN, and every step is skipped.
    Raises CheckpointError; `tensor` is called `name` in the file or directory `source`."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    extremes = torch.stack(torch.aminmax(tensor))  # which propagate NaN: one pass, without memory of its own
    if not torch.isfinite(extremes).all():
        raise CheckpointError(
            f"{source}: {name} holds NaN or infinity; take another copy of the checkpoint, or an earlier one"
        )


# ----------------------------------------------------------------------------------------------------- export


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model under training."""

    export: HFExport
    """Export with `lora_entries`."""
    shape: ModelShape
    lora: Lora
    base: Path
    """Directory of the base model."""


def save_hf(
    export: HFExport, world: World, out_dir: Path, origin_hf_dir: Path, adapters: Adapters | None = None
) -> None:
    """Write the weights to `out_dir` with the configuration, the tokenizer and the carried, untrained tensors
    of `origin_hf_dir`, by `write_directory`. Collective. Weights keep the trainer's dtype, which config.json
    then names; carried tensors keep their own. `adapters`, which `export` has merged, are written for PEFT in
    a folder."""
    origin = Checkpoint(origin_hf_dir)
    exported = {meta.name for meta in export.metadata()}
    carried = [p for p in origin.carried(read_hf_config(origin_hf_dir)) if p.name not in exported]
    metadata = export.metadata() + [
        TensorMeta(piece.name, origin.dtype(piece), piece.shape) for piece in carried
    ]
    groups = plan_buckets(metadata, SHARD_BYTES)
    names = file_names(len(groups))
    files = {name: metadata[group.start : group.stop] for name, group in zip(names, groups, strict=True)}

    def finish(directory: Path, digests: list[dict[str, str]]) -> dict[str, str]:
        copy_all_but_weights(origin_hf_dir, directory, export.dtype)
        write_index(directory, files)
        return digests[0]

    def write(directory: Path) -> dict[str, str]:
        untrained = ((piece.name, origin.read(piece)) for piece in carried)
        digests = _write(chain(export, untrained), files, directory, world)
        if adapters is not None:
            save_peft(adapters, directory / ADAPTER)
        return digests

    write_directory(out_dir, world, sum(meta.num_bytes for meta in metadata), write, finish)


def _write(
    tensors: Iterable[tuple[str, Tensor | None]],
    files: dict[str, list[TensorMeta]],
    directory: Path,
    world: World,
) -> dict[str, str]:
    """Gather and write tensor by tensor, on rank 0. Return digests by file. An error does not end the
    gathering, in which all ranks take part; it is raised afterwards."""
    error: Exception | None = None
    digests: dict[str, str] = {}
    remaining = [(file, meta.name) for file, metas in files.items() for meta in metas]
    writer: SafetensorsFile | None = None
    for (file, name), (gathered, tensor) in zip(remaining, tensors, strict=True):
        if not world.is_rank_0 or error is not None:
            continue
        assert gathered == name
        assert tensor is not None
        try:
            writer = writer or SafetensorsFile(directory / file, files[file])
            writer.write(name, tensor)
            if name == files[file][-1].name:
                digests[file] = writer.close()
                writer = None
        except Exception as caught:
            error = caught
    if error is not None:
        raise error
    return digests


# --------------------------------------------------------------------------------------------------- adapters


def save_peft(adapters: Adapters, directory: Path) -> None:
    """Write the adapters to `directory`, which must not exist, from rank 0. Collective. Raises OSError on
    rank 0, after all ranks have done their part."""
    factors = {name: tensor.cpu() for name, tensor in adapters.export if tensor is not None}
    if factors:
        directory.mkdir()
        tensors = {f"base_model.model.{name}": tensor for name, tensor in _stacked(factors).items()}
        save_file(tensors, directory / _ADAPTER_WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(peft_config(adapters.shape, adapters.lora, adapters.base), indent=2)
        (directory / _ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def peft_config(shape: ModelShape, lora: Lora, base: Path) -> dict[str, Any]:
    """Return PEFT's `LoraConfig` of the adapters."""
    as_tensors = {*(_RENAMED if shape.is_moe else ()), EXPERTS}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [name for name in lora.targets if name not in as_tensors],
        "target_parameters": _tensors(shape, lora, as_tensors) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _tensors(shape: ModelShape, lora: Lora, targets: Container[str]) -> list[str]:
    """Return the name endings, after the layer's name, of targets that PEFT must find as a module's tensors,
    not as modules."""
    endings = set()
    for entry in weight_map(shape).values():
        for pair in pairs(entry, lora):
            piece = adapted(entry)[pair.number]
            if target_of(piece) in targets:
                tensor = piece.name.removesuffix(f".{entry.expert}.weight")
                endings.add(re.sub(r".*\.layers\.\d+\.", "", tensor))
    return sorted(endings)


def _stacked(factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors by PEFT's names. PEFT keeps the factors of a layer's experts in one tensor: A with
    the experts' rows one after another, B with all experts' first columns before their second ones."""
    stacked: dict[str, Tensor] = {}
    experts: dict[tuple[str, str], list[Tensor]] = {}
    for name, factor in factors.items():
        if match := _EXPERT.match(name):
            module, tensor, _, kind = match.groups()
            experts.setdefault((f"{module}{_WRAPPED[tensor]}.{kind}.weight", kind), []).append(factor)
        else:
            stacked[name] = factor.contiguous()
    for (name, kind), expert_factors in experts.items():
        stacked[name] = (
            torch.cat(expert_factors) if kind == "lora_A" else torch.stack(expert_factors, dim=-1).flatten(1)
        )
    return stacked


def describe_adapters(model: ModelConfig) -> dict[str, Any] | None:
    """Return the description of a run's adapters for `layout.json`; None if it has none. Raises ConfigError
    for a target that the model lacks."""
    if model.lora_rank is None or model.hf_checkpoint is None:
        return None
    lora = chosen_lora(model, read_hf_config(model.hf_checkpoint))
    assert lora is not None
    return {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "targets": list(lora.targets),
        "base": str(model.hf_checkpoint),
        "base_digest": weights_digest(model.hf_checkpoint),
    }


def check_same_adapters(saved: Any, model: ModelConfig, checkpoint: Path) -> None:
    """Raise CheckpointError, which says what differs, unless training can resume with the adapters of a
    checkpoint, the entry "lora" of its `layout.json`."""
    present = describe_adapters(model)
    if saved is None and present is None:
        return
    if present is None:
        raise CheckpointError(
            f"--load {checkpoint}: holds adapters only; resume with its --lora-rank, or start from a "
            "merged export"
        )
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"--load {checkpoint}: holds weights and no adapters; convert it to Hugging Face format and give "
            "that as --hf-checkpoint, or drop --lora-rank"
        )
    for name in ("rank", "alpha", "targets"):
        if saved.get(name) != present[name]:
            old, new = (
                " ".join(map(str, value)) if isinstance(value, list) else value
                for value in (saved.get(name), present[name])
            )
            raise CheckpointError(
                f"--load {checkpoint}: its adapters have --lora-{name} {old}, this run {new}; resume with "
                "the same"
            )
    if saved.get("base_digest") != present["base_digest"]:
        raise CheckpointError(
            f"--load {checkpoint}: its adapters belong to the weights that were in {saved.get('base')}, "
            f"but --hf-checkpoint {model.hf_checkpoint} has others"
        )


@lru_cache(maxsize=1)  # called for every checkpoint of a run
def weights_digest(hf_dir: Path) -> str:
    """Return a hash that identifies a model's weights, from their files' sizes and evenly spaced blocks.
    Names and places of files do not count, and a change between those blocks goes unseen."""
    digests = sorted(
        _file_digest(path) for path in hf_dir.iterdir() if path.suffix in (".safetensors", ".bin")
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(str(size).encode())
    step = max(_BLOCK_BYTES, size // _BLOCKS)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
