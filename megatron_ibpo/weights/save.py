"""The export as a Hugging Face checkpoint on disk: all of it, or nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_ibpo.weights.export import HFExport, TensorMeta
from megatron_ibpo.weights.load import INDEX
from megatron_ibpo.world import World

__all__ = ["DiskSpaceError", "check_disk_space", "save_hf"]

SHARD_BYTES = 5 * 1000**3
"""Largest safetensors file."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Files of an origin checkpoint that are not copied."""


class DiskSpaceError(OSError):
    """Not enough room for a checkpoint."""


def save_hf(export: HFExport, world: World, out_dir: Path, origin_hf_dir: Path) -> None:
    """Write the weights to `out_dir` with the configuration and tokenizer of `origin_hf_dir`. Collective.

    Written beside `out_dir` and moved there when complete; an `out_dir` that exists is replaced then.
    Weights keep the trainer's dtype, which config.json then names.

    Raises:
        DiskSpaceError: before anything is written, if the disk cannot hold it.
    """
    metadata = export.metadata()
    files = _shards(metadata)
    partial = out_dir.with_name(f".{out_dir.name}.partial")

    def prepare() -> None:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        check_disk_space(out_dir.parent, sum(meta.num_bytes for meta in metadata))
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _copy_origin(origin_hf_dir, partial, export.dtype)
        if len(files) > 1:
            (partial / INDEX).write_text(json.dumps(_index(metadata, files), indent=2))

    world.on_driver(prepare)
    error = _write(export, files, partial, world)
    try:
        world.agree(error)
    except BaseException:
        if world.is_driver:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    world.on_driver(lambda: _replace(partial, out_dir))


def check_disk_space(directory: Path, needed: int) -> None:
    """Raises DiskSpaceError if the disk of `directory` has not `needed` bytes (and 1 % more) free."""
    free = shutil.disk_usage(directory).free
    if free < needed * 1.01:
        raise DiskSpaceError(
            f"{directory}: a checkpoint of {needed / 1e9:.2f} GB does not fit, {free / 1e9:.2f} GB are free; "
            "free some space or write elsewhere"
        )


def _shards(metadata: list[TensorMeta]) -> dict[str, list[str]]:
    """File names and the tensors of each, in export order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for meta in metadata:
        if filled and filled + meta.num_bytes > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(meta.name)
        filled += meta.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _index(metadata: list[TensorMeta], files: dict[str, list[str]]) -> dict[str, object]:
    return {
        "metadata": {"total_size": sum(meta.num_bytes for meta in metadata)},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }


def _copy_origin(origin: Path, target: Path, dtype: torch.dtype) -> None:
    """Configuration, tokenizer and whatever else lies beside the weights."""
    for path in sorted(origin.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)  # its name before transformers 5
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write(export: HFExport, files: dict[str, list[str]], partial: Path, world: World) -> Exception | None:
    """Gather and write file by file. An error does not end the gathering, in which all ranks take part."""
    error: Exception | None = None
    remaining = iter(files.items())
    file, names = next(remaining)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in export:
        if not world.is_driver or error is not None:
            continue
        assert tensor is not None
        held[name] = tensor.detach().cpu().contiguous()
        if len(held) < len(names):
            continue
        try:
            save_file(held, partial / file, metadata={"format": "pt"})
        except Exception as caught:
            error = caught
        held = {}
        file, names = next(remaining, ("", []))
    return error


def _replace(partial: Path, out_dir: Path) -> None:
    """Move the finished directory to its place."""
    for path in partial.iterdir():
        with path.open("rb") as written:
            os.fsync(written.fileno())
    old = out_dir.with_name(f".{out_dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(old)
    partial.rename(out_dir)
    shutil.rmtree(old, ignore_errors=True)
