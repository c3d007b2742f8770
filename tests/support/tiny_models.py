"""Tiny random checkpoints in Hugging Face format, with sizes that vLLM's CPU kernels take. No tokenizer."""

import functools
import hashlib
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from support.paths import ROOT

VOCAB_SIZE = 64
EOS_ID = 1
BUILT = ROOT / "build/tiny_models"  # checkpoints in directories named by the hash of what they depend on
SHARED = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 512, "num_hidden_layers": 2, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": 0,
}  # fmt: skip
DENSE = {"intermediate_size": 192}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MIXED = 3  # of the layers below the one that is attention, as the one inside a prediction layer is
DELTA_NETS = {
    "num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
SETTINGS = {
    "head_dim": "head_dim", "heads": "num_attention_heads", "key_heads": "linear_num_key_heads",
    "kv_heads": "num_key_value_heads",
    "layers": "num_hidden_layers", "std": "initializer_range", "tie": "tie_word_embeddings",
    "value_heads": "linear_num_value_heads", "vocabulary": "vocab_size",
}  # fmt: skip
"""Settings of every `make_…` → fields of config.json. `std` is the spread of weights, for peaked outputs."""


def built_once(make):
    """Have `make(directory, seed, …)` build each checkpoint once, and copy it afterwards: tests ask often."""
    depends_on = Path(__file__).read_text() + version("transformers") + version("torch")

    @functools.wraps(make)
    def copied(directory, seed, *args, **how):
        asked = f"{depends_on}{make.__name__} {seed} {args} {sorted(how.items())}"
        kept = BUILT / hashlib.sha256(asked.encode()).hexdigest()[:16]
        if not kept.exists():
            BUILT.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=BUILT) as place:
                made = make(Path(place) / "model", seed, *args, **how)
                assert (made / "config.json").exists(), "transformers writes on the first rank only"
                try:
                    made.rename(kept)
                except OSError:  # another process was faster
                    assert kept.exists()
        shutil.copytree(kept, directory, dirs_exist_ok=True)
        return directory

    return copied


@built_once
def make_qwen3(directory, seed, **settings):
    return _make("Qwen3", directory, seed, DENSE, settings)


@built_once
def make_qwen3_moe(directory, seed, *, normalized=True, **settings):
    """`normalized`: the weights of a token's experts sum to one, as in the published ones."""
    return _make("Qwen3Moe", directory, seed, EXPERTS | {"norm_topk_prob": normalized}, settings)


LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


@built_once
def make_llama(directory, seed, *, biased=False, rope=None, **settings):
    rope = rope or {"rope_type": "default", "rope_theta": 10000.0}
    own = DENSE | {"attention_bias": biased, "mlp_bias": biased, "rope_parameters": rope}
    return _make("Llama", directory, seed, own, settings)


@built_once
def make_qwen2(directory, seed, **settings):
    """A Qwen2 in float32, whose heads are of 128 / 4 elements: config.json does not say so."""
    return _make("Qwen2", directory, seed, DENSE | {"hidden_size": 128}, settings)


@built_once
def make_olmo2(directory, seed, *, biased=False, **settings):
    """Heads of 128 / 4 elements, as in `make_qwen2`."""
    return _make("Olmo2", directory, seed, DENSE | {"hidden_size": 128, "attention_bias": biased}, settings)


@built_once
def make_qwen3_next(directory, seed, **settings):
    own = DENSE | EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 64, "tie_word_embeddings": False}
    return _make("Qwen3Next", directory, seed, own, settings)


@built_once
def make_qwen3_5(directory, seed, *, moe=False, wrapped=False, **settings):
    """The text model alone, or `wrapped` in the one with a vision tower, as Qwen's own checkpoints are."""
    import transformers

    eighth = settings.get("head_dim", SHARED["head_dim"]) // 8
    own = DELTA_NETS | (EXPERTS | {"shared_expert_intermediate_size": 64} if moe else DENSE)
    own["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [eighth - 2 * (eighth // 3), eighth // 3, eighth // 3],
    }  # fmt: skip
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    if not wrapped:
        return _make(f"{family}Text", directory, seed, own, settings, model=f"{family}ForCausalLM")
    text = _config(f"{family}Text", own, settings)
    vision = getattr(transformers, f"{family}VisionConfig")(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=96,
        num_position_embeddings=16,
    )  # fmt: skip
    parts = {"text_config": text.to_dict(), "vision_config": vision.to_dict()}
    config = getattr(transformers, f"{family}Config")(**parts, tie_word_embeddings=settings.get("tie", False))
    return _save(f"{family}ForConditionalGeneration", config, directory, seed)


@built_once
def make_glm4_moe(directory, seed, *, dense=1, plain=False, predicting=0, **settings):
    """`dense` layers with a dense MLP, then experts with a shared one. Norms of queries and keys, and biases,
    but where it is `plain`. Of the `predicting` layers in config.json transformers makes no tensors."""
    own = DENSE | {
        "num_hidden_layers": 3, "num_nextn_predict_layers": predicting, "first_k_dense_replace": dense,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 2,
        "routed_scaling_factor": 2.5, "use_qk_norm": not plain, "attention_bias": not plain,
    }  # fmt: skip
    return _make("Glm4Moe", directory, seed, own, settings)


@built_once
def make_gpt_oss(directory, seed, *, loud=1.0, **settings):
    """`loud`: how far the biases of experts spread; beyond 5 or so what they compute is clamped."""
    own = {
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0,
            "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    }  # fmt: skip
    spreads = {"sinks": 1.0, "gate_up_proj_bias": loud, "down_proj_bias": settings.get("std", 0.2)}

    def spread(model):
        for name, parameter in model.named_parameters():
            for ending, size in spreads.items():
                if name.endswith(ending):
                    parameter.copy_(torch.randn_like(parameter) * size)

    return _make("GptOss", directory, seed, own, settings, change=spread)


def stored_dtype(name, dtype):
    """Return a tensor's dtype in a checkpoint of `dtype`: a router's correction stays in float32."""
    return torch.float32 if name.endswith("e_score_correction_bias") else dtype


def _make(family, directory, seed, own, settings, *, model="", change=lambda _: None):
    return _save(model or f"{family}ForCausalLM", _config(family, own, settings), directory, seed, change)


def _config(family, own, settings):
    import transformers

    known = SHARED | own | {SETTINGS[name]: value for name, value in settings.items()}
    if family in ("Qwen2", "Olmo2"):  # whose configurations have no such field
        del known["head_dim"]
    return getattr(transformers, f"{family}Config")(**known)


def _save(model_class, config, directory, seed, change=lambda _: None):
    import transformers

    # the seed's own stream: the caller's draws stay what they were
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).float()
        with torch.no_grad():  # norms and biases start as constants, which would hide a mix-up
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):  # as large as the scores differ
                    buffer.copy_(torch.randn_like(buffer) * 0.2)
            change(model)
    model.generation_config.eos_token_id = EOS_ID
    # as in directories of Qwen, and far stronger: no engine may take its defaults from there
    model.generation_config.update(
        do_sample=True, temperature=0.1, top_k=2, top_p=0.3, repetition_penalty=3.0
    )
    model.save_pretrained(directory)
    return directory
