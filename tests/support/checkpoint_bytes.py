import json
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import MIXED, stored_dtype


def with_mtp(hf_dir, seed, dtype=torch.float32):
    """Put a layer that predicts more tokens into a checkpoint."""
    tensors, inner = tensors_of(hf_dir), re.compile(rf".*\.layers\.{MIXED}\.")
    own = {name: tensor.shape for name, tensor in tensors.items() if inner.match(name)}
    shapes = {inner.sub("mtp.layers.0.", name): shape for name, shape in own.items()}
    (hidden,) = shapes["mtp.layers.0.input_layernorm.weight"]
    norms = ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    shapes |= {f"{name}.weight": (hidden,) for name in norms} | {"mtp.fc.weight": (hidden, 2 * hidden)}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    drawn = {name: tensor.to(dtype) for name, tensor in drawn.items()}
    save_file(tensors | drawn, hf_dir / "model.safetensors", metadata={"format": "pt"})
    return hf_dir


def drawn_weights(source, dtype, seed=0):
    generator, drawn = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors_of(source).items():
        drawn[name] = (torch.rand(tensor.shape, generator=generator) * 8 - 4).to(stored_dtype(name, dtype))
    return drawn


def with_weights(source, target, tensors):
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def tensors_of(directory):
    return load_file(directory / "model.safetensors")


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_same_bytes(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def with_fused_experts(tensors):
    """Return transformers' in-memory form: gate_up_proj [E, 2I, H] and down_proj [E, H, I] of a layer."""
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    return fused


def shard_by_hand(origin, target, tensors):
    target.mkdir(parents=True)
    shutil.copy(origin / "config.json", target)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, target / file)
    index = {name: file for file, members in files.items() for name in members}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return target


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
