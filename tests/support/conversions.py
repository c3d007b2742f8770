"""What tests of conversions share."""

import json

import torch

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.config import ModelConfig
from support.model_passes import loaded

ALONE = World(0, 1, torch.device("cpu"), None)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def round_trip(world, origin, saved, parallel_config, bf16):
    """Load a checkpoint and save it; return what is exported, and its metadata."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.formats.save import save_hf
    from megatron_ibpo.weights.layout.export import HFExport

    model = loaded(world, origin, parallel_config, ModelConfig(bf16=bf16))
    export = HFExport(*model, bucket_bytes=100_000)  # several
    tensors = [(name, None if tensor is None else tensor.clone()) for name, tensor in export]
    save_hf(export, world, saved, origin)
    parallel.destroy()
    return export.metadata(), tensors
