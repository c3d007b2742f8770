import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.models import read_hf_config

MIXED = 3  # the layer of the tiny models that is attention, as the one inside a prediction layer is


def with_mtp(hf_dir, seed, dtype=torch.float32):
    tensors, shape = load_file(hf_dir / "model.safetensors"), read_hf_config(hf_dir)
    hidden, inner = shape.hidden_size, f"{shape.hf_prefix}layers.{MIXED}."
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(inner, "mtp.layers.0."): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith(inner)
    }
    shapes |= dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), (hidden,))
    shapes |= {"mtp.pre_fc_norm_hidden.weight": (hidden,), "mtp.fc.weight": (hidden, 2 * hidden)}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(size, generator=generator) * 0.1 for name, size in shapes.items()}
    drawn = {name: tensor.to(dtype) for name, tensor in drawn.items()}
    save_file(tensors | drawn, hf_dir / "model.safetensors", metadata={"format": "pt"})
    return hf_dir
