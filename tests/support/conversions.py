"""Converts checkpoints in this process, and expects refusals that leave nothing behind."""

import json
import pickle
from functools import partial

import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ModelConfig, ParallelConfig
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.torch_dist import read_metadata
from support.model_passes import loaded

ALONE = World(0, 1, torch.device("cpu"), None)
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def contents(directory):
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def refuse(source, target, error, *words, **options):
    """The conversion fails with all the words; nothing is left and the source is as it was."""
    _refuse(partial(hf_to_megatron, source, target, ParallelConfig()), source, target, error, words, options)


def refuse_back(source, target, error, *words, **options):
    _refuse(partial(megatron_to_hf, source, target), source, target, error, words, options)


def _refuse(convert, source, target, error, words, options):
    before = contents(source)
    with pytest.raises(error) as caught:
        convert(ALONE, **options)
    for word in words:
        assert word in str(caught.value)
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
    assert contents(source) == before


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_metadata(stored, edit):
    metadata = read_metadata(stored)
    edit(metadata)
    (stored / ".metadata").write_bytes(pickle.dumps(metadata))


def round_trip(world, origin, saved, parallel_config, bf16):
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.formats.save import save_hf
    from megatron_ibpo.weights.layout.export import HFExport

    model = loaded(world, origin, parallel_config, ModelConfig(bf16=bf16))
    export = HFExport(*model, bucket_bytes=100_000)  # several
    tensors = [(name, None if tensor is None else tensor.clone()) for name, tensor in export]
    save_hf(export, world, saved, origin)
    parallel.destroy()
    return export.metadata(), tensors
