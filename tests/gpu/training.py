"""One trainer of a random model as the driver uses it, in this process: no Ray, no engine."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file

from megatron_ibpo.basics.records import TrainSequence, token_ids
from megatron_ibpo.config import Config, ModelConfig, OptimizerConfig, RolloutConfig
from megatron_ibpo.models import forward_flops, read_hf_config
from megatron_ibpo.weights.layout.export import checkpoint_entries, metadata_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QWEN3 = json.loads((EXAMPLES / "models/qwen3_0_6b/config.json").read_text())
QWEN3_NEXT = json.loads((EXAMPLES / "models/qwen3_next_80b_a3b/config.json").read_text()) | {
    "hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 8,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_experts": 32, "num_experts_per_tok": 4,
}  # fmt: skip
"""About 1B parameters: half of the width of Qwen3-Next-80B-A3B, 1/4 of its layers, 1/16 of its experts."""
SHAPES = {"qwen3": QWEN3, "qwen3_next": QWEN3_NEXT}


def make_random_model(directory, config, device, dtype):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    shape, tensors = read_hf_config(directory), {}
    generator = torch.Generator(device).manual_seed(0)
    for meta in metadata_of(checkpoint_entries(shape, 0), dtype):
        is_centred = shape.zero_centered_norms and "linear_attn" not in meta.name
        tensor = torch.full(meta.shape, 0.0 if is_centred else 1.0, device=device)
        if meta.name.endswith("A_log"):
            tensor.uniform_(1, 16, generator=generator).log_()
        elif len(meta.shape) > 1:
            tensor.normal_(0, shape.initializer_range, generator=generator)
        tensors[meta.name] = tensor.to(dtype).cpu()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def load_of(job, slow):
    """`slow`: for a delta net in plain torch, which goes through a sequence in chunks one after the other."""
    if not job.on_gpu:
        return SimpleNamespace(sequences=8, prompt=4, response=28, max_tokens=128)
    if slow or not job.is_large:
        return SimpleNamespace(sequences=8, prompt=256, response=1024, max_tokens=2048)
    return SimpleNamespace(sequences=24 if job.quick else 48, prompt=256, response=3840, max_tokens=8192)


def make_sequences(load, vocabulary):
    """Random tokens, responses of an eighth of the load's to all of it, half with a positive advantage."""
    generator = np.random.default_rng(0)
    lengths = np.linspace(load.response // 8, load.response, load.sequences).astype(int)
    for number, length in enumerate(lengths):
        prompt, response = (token_ids(generator.integers(vocabulary, size=n)) for n in (load.prompt, length))
        yield TrainSequence(
            prompt, response, np.ones(length, bool), advantage=1.0 if number % 2 else -0.5,
            weight=1.0 / load.sequences, prompt_index=number // 2, group=number // 2, index=number % 2,
        )  # fmt: skip


def set_up(job, family, *, slow=False, **sections):
    """The load, settings and sequences of a part; with a learning rate at which five steps show."""
    load, dtype = load_of(job, slow), torch.bfloat16 if job.on_gpu else torch.float32
    tiny = json.loads((EXAMPLES / f"tiny_{family}/config.json").read_text())
    shape = SHAPES[family] if job.on_gpu else tiny
    path = make_random_model(job.scratch / "model", shape, job.device, dtype)
    model = ModelConfig(hf_checkpoint=path, bf16=job.on_gpu, max_tokens_per_gpu=load.max_tokens)
    model.allow_local_modules, model.share_prompts = True, False
    optimizer = OptimizerConfig(lr=1e-4, lr_decay_style="constant", lr_warmup_fraction=0)
    rollout = RolloutConfig(rollout_max_response_len=load.response)
    rollout.rollout_max_context_len = load.prompt + load.response
    config = Config(model=model, optimizer=optimizer, rollout=rollout, **sections)
    return load, config, list(make_sequences(load, read_hf_config(path).vocab_size))


def start_policy(config, checkpoint=None):
    """The driver's view of the trainers, and the only one of them."""
    from megatron_ibpo.policy.group import Policy
    from megatron_ibpo.policy.process_start import trainer_rank
    from megatron_ibpo.run.in_one_process import OwnRank

    cost = partial(forward_flops, read_hf_config(config.model.hf_checkpoint))
    rank = trainer_rank(config, checkpoint)
    return Policy(OwnRank(rank), config, 1, cost), rank
