"""Tiny random checkpoints in Hugging Face format, with sizes that vLLM's CPU kernels take.

    make_qwen3_next(directory, seed)    make_qwen3(directory, seed, tie=False)    make_llama(directory, seed)
    make_qwen3_5(directory, seed, moe=False, wrapped=False)    make_qwen3_moe(directory, seed)
    make_glm4_moe(directory, seed)    make_gpt_oss(directory, seed)

No tokenizer, token ids 0..63 unless another vocabulary is asked for, end
of sequence is id 1. Each is built once and copied where it is asked for again.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch

from support.paths import ROOT

__all__ = [
    "EOS_ID",
    "VOCAB_SIZE",
    "make_glm4_moe",
    "make_gpt_oss",
    "make_llama",
    "make_qwen2",
    "make_qwen3",
    "make_qwen3_5",
    "make_qwen3_moe",
    "make_qwen3_next",
    "stored_dtype",
]

VOCAB_SIZE = 64
EOS_ID = 1
BUILT = ROOT / "build/tiny_models"
"""Checkpoints that were built before, each in a directory named by the hash of what it depends on."""
P = ParamSpec("P")
Maker = Callable[Concatenate[Path, int, P], Path]

SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}


def built_once(make: Maker[P]) -> Maker[P]:
    """Have `make(directory, seed, …)` build each checkpoint once, and copy it afterwards: building imports
    the model's code and draws its weights, and tests ask for it some hundred times."""
    depends_on = Path(__file__).read_text() + version("transformers") + version("torch")

    @functools.wraps(make)
    def copied(directory: Path, seed: int, *args: P.args, **how: P.kwargs) -> Path:
        asked = f"{depends_on}{make.__name__} {seed} {args} {sorted(how.items())}"
        kept = BUILT / hashlib.sha256(asked.encode()).hexdigest()[:16]
        if not kept.exists():
            BUILT.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=BUILT) as place:
                made = make(Path(place) / "model", seed, *args, **how)
                try:
                    made.rename(kept)
                except OSError:  # another process was faster
                    assert kept.exists()
        shutil.copytree(kept, directory, dirs_exist_ok=True)
        return directory

    return copied


@built_once
def make_qwen3(
    directory: Path,
    seed: int,
    *,
    tie: bool = False,
    layers: int = 2,
    std: float = 0.2,
    kv_heads: int = 2,
    vocabulary: int = VOCAB_SIZE,
) -> Path:
    """A dense Qwen3 in float32; `std` is the spread of its weights: large, so that outputs are peaked."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{**SHARED, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
        num_hidden_layers=layers,
        intermediate_size=192,
        tie_word_embeddings=tie,
        initializer_range=std,
    )
    return _save(Qwen3ForCausalLM, config, directory, seed)


@built_once
def make_qwen3_moe(
    directory: Path,
    seed: int,
    *,
    layers: int = 2,
    std: float = 0.2,
    kv_heads: int = 2,
    normalized: bool = True,
) -> Path:
    """A Qwen3 with experts in every layer, in float32; `normalized`: the weights of a token's experts sum to
    one, as in the published ones."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**SHARED, "num_key_value_heads": kv_heads},
        num_hidden_layers=layers,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=normalized,
        initializer_range=std,
    )
    return _save(Qwen3MoeForCausalLM, config, directory, seed)


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary positions of Llama 3.1."""


@built_once
def make_llama(
    directory: Path,
    seed: int,
    *,
    tie: bool = False,
    layers: int = 2,
    std: float = 0.2,
    kv_heads: int = 2,
    biased: bool = False,
    rope: dict[str, Any] | None = None,
) -> Path:
    """A Llama in float32, with biases in every linear layer where `biased`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{**SHARED, "num_key_value_heads": kv_heads},
        num_hidden_layers=layers,
        intermediate_size=192,
        tie_word_embeddings=tie,
        initializer_range=std,
        attention_bias=biased,
        mlp_bias=biased,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
    )
    return _save(LlamaForCausalLM, config, directory, seed)


@built_once
def make_qwen2(directory: Path, seed: int, *, layers: int = 2, std: float = 0.2, kv_heads: int = 2) -> Path:
    """A Qwen2 in float32, whose heads are of 128 / 4 elements: config.json does not say so."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {name: value for name, value in SHARED.items() if name != "head_dim"}
    config = Qwen2Config(
        **{**sizes, "hidden_size": 128, "num_key_value_heads": kv_heads},
        num_hidden_layers=layers,
        intermediate_size=192,
        initializer_range=std,
    )
    return _save(Qwen2ForCausalLM, config, directory, seed)


@built_once
def make_qwen3_next(
    directory: Path,
    seed: int,
    *,
    layers: int = 4,
    std: float = 0.2,
    kv_heads: int = 2,
    key_heads: int = 2,
    value_heads: int = 2,
    vocabulary: int = VOCAB_SIZE,
) -> Path:
    """A hybrid Qwen3-Next in float32: every fourth layer is attention, the others Gated DeltaNet with
    `key_heads` and `value_heads`, all MoE."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **{**SHARED, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "full_attention_interval": 4},
        num_hidden_layers=layers,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        intermediate_size=192,
        tie_word_embeddings=False,
        initializer_range=std,
    )
    return _save(Qwen3NextForCausalLM, config, directory, seed)


@built_once
def make_qwen3_5(
    directory: Path,
    seed: int,
    *,
    moe: bool = False,
    wrapped: bool = False,
    tie: bool = False,
    layers: int = 4,
    std: float = 0.2,
    kv_heads: int = 2,
    key_heads: int = 2,
    value_heads: int = 2,
    head_dim: int = 32,
    vocabulary: int = VOCAB_SIZE,
) -> Path:
    """A Qwen3.5 in float32, dense or with experts: the text model alone, or `wrapped` in the model that has
    a vision tower too, as Qwen's own checkpoints are."""
    import transformers

    kind = "Moe" if moe else ""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [head_dim // 8 - 2 * (head_dim // 24), head_dim // 24, head_dim // 24],
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    text = getattr(transformers, f"Qwen3_5{kind}TextConfig")(
        **{**SHARED, "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "head_dim": head_dim},
        num_hidden_layers=layers,
        full_attention_interval=4,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        rope_parameters=rope,
        tie_word_embeddings=tie,
        initializer_range=std,
        **(experts if moe else {"intermediate_size": 192}),
    )
    if not wrapped:
        return _save(getattr(transformers, f"Qwen3_5{kind}ForCausalLM"), text, directory, seed)
    vision = getattr(transformers, f"Qwen3_5{kind}VisionConfig")(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        patch_size=4,
        out_hidden_size=96,
        num_position_embeddings=16,
    )
    config = getattr(transformers, f"Qwen3_5{kind}Config")(
        text_config=text.to_dict(), vision_config=vision.to_dict(), tie_word_embeddings=tie
    )
    return _save(getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration"), config, directory, seed)


@built_once
def make_glm4_moe(
    directory: Path,
    seed: int,
    *,
    layers: int = 3,
    dense: int = 1,
    std: float = 0.2,
    kv_heads: int = 2,
    plain: bool = False,
    predicting: int = 0,
) -> Path:
    """A GLM-4.5 in float32: `dense` layers with a dense MLP, then experts with a shared one. Norms of queries
    and keys, and biases, but where it is `plain`. `predicting`: multi-token prediction layers that
    config.json names; transformers makes no tensors of them."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        **{**SHARED, "num_key_value_heads": kv_heads, "num_nextn_predict_layers": predicting},
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        intermediate_size=192,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        use_qk_norm=not plain,
        attention_bias=not plain,
        initializer_range=std,
    )
    return _save(Glm4MoeForCausalLM, config, directory, seed)


@built_once
def make_gpt_oss(
    directory: Path,
    seed: int,
    *,
    layers: int = 2,
    std: float = 0.2,
    kv_heads: int = 2,
    loud: float = 1.0,
) -> Path:
    """A gpt-oss in float32, with a window of 24 tokens in its first layer and every other one from there on.
    `loud`: how far the biases of experts spread; beyond 5 or so what they compute is clamped."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **{**SHARED, "num_key_value_heads": kv_heads},
        num_hidden_layers=layers,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        initializer_range=std,
    )

    def spread(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))  # as large as logits
            elif name.endswith("gate_up_proj_bias"):  # zeros, as the others
                parameter.copy_(torch.randn_like(parameter) * loud)
            elif name.endswith("down_proj_bias"):
                parameter.copy_(torch.randn_like(parameter) * std)

    return _save(GptOssForCausalLM, config, directory, seed, spread)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What a tensor has in a checkpoint of `dtype`: a router's correction stays in float32."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _save(
    model_class: Any, config: Any, directory: Path, seed: int, change: Callable[[Any], None] = lambda _: None
) -> Path:
    # the seed's own stream: the caller's draws stay what they were
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).float()
        with torch.no_grad():  # norms and biases start as constants, which would hide a mix-up
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # as large as the scores differ
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
            change(model)
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    return directory
