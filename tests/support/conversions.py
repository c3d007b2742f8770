"""Converts checkpoints in this process, and expects refusals that leave nothing behind."""

import json
import pickle
from functools import partial

import pytest
import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import Config, ModelConfig, ParallelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights.formats.convert import hf_to_megatron, megatron_to_hf
from megatron_ibpo.weights.formats.torch_dist import read_metadata

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


def loaded(world, hf_dir, parallel_config=None, *, bf16=False, pieces=1):
    """Start Megatron's groups; return this rank's part of a model, in so many pieces, and its shape."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf

    interleaved = (f"virtual_pipeline_model_parallel_size={pieces}",) if pieces > 1 else ()
    model = ModelConfig(bf16=bf16, model_override=interleaved)
    config = Config(model=model, parallel=parallel_config or ParallelConfig())
    parallel.initialize(config.parallel, world, seed=0)
    shape = read_hf_config(hf_dir)
    chunks = build_model(shape, config)
    load_hf(chunks, shape, hf_dir)
    return chunks, shape


def round_trip(world, origin, saved, parallel_config, bf16):
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.formats.save import save_hf
    from megatron_ibpo.weights.layout.export import HFExport

    export = HFExport(*loaded(world, origin, parallel_config, bf16=bf16), bucket_bytes=100_000)  # several
    tensors = [(name, None if tensor is None else tensor.clone()) for name, tensor in export]
    save_hf(export, world, saved, origin)
    parallel.destroy()
    return export.metadata(), tensors
