import torch
from safetensors.torch import load_file, save_file

from megatron_ibpo.models import read_hf_config

MIXED = 3  # the layer of the tiny models that is attention, as the one inside a prediction layer is


def with_mtp(hf_dir, seed):
    tensors = load_file(hf_dir / "model.safetensors")
    hidden = read_hf_config(hf_dir).hidden_size
    inner = f"model.layers.{MIXED}."
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(inner)}
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(inner, "mtp.layers.0."): shape for name, shape in own.items()
    }
    shapes |= dict.fromkeys(("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight"), (hidden,))
    shapes |= {"mtp.pre_fc_norm_hidden.weight": (hidden,), "mtp.fc.weight": (hidden, 2 * hidden)}
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    save_file(tensors | drawn, hf_dir / "model.safetensors", metadata={"format": "pt"})
    return hf_dir


def mtp_tensors(dtype):
    hidden, experts, size = 96, 4, 64
    layer = "mtp.layers.0"
    shapes = {
        "mtp.fc.weight": (hidden, 2 * hidden), "mtp.norm.weight": (hidden,),
        "mtp.pre_fc_norm_embedding.weight": (hidden,), "mtp.pre_fc_norm_hidden.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (2 * 4 * 32, hidden),
        f"{layer}.self_attn.k_proj.weight": (4 * 32, hidden),
        f"{layer}.self_attn.v_proj.weight": (4 * 32, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, 4 * 32), f"{layer}.self_attn.q_norm.weight": (32,),
        f"{layer}.self_attn.k_norm.weight": (32,), f"{layer}.mlp.gate.weight": (experts, hidden),
        f"{layer}.mlp.shared_expert_gate.weight": (1, hidden),
    }  # fmt: skip
    inner = {f"{layer}.mlp.experts.{expert}": size for expert in range(experts)}
    for mlp in (*inner, f"{layer}.mlp.shared_expert"):
        shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (size, hidden)
        shapes[f"{mlp}.down_proj.weight"] = (hidden, size)
    generator = torch.Generator().manual_seed(9)
    drawn = {name: torch.rand(shape, generator=generator) * 8 - 4 for name, shape in shapes.items()}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}
