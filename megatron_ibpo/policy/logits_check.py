"""Logits of the trainer's model beside those of transformers', each from its own files: a tensor that a
conversion misplaced shows here. And transformers' log-probs, for other comparisons."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.records import Floats, TrainSequence
from megatron_ibpo.config import Config, ParallelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.policy import parallel
from megatron_ibpo.policy.checkpoint import load_weights
from megatron_ibpo.policy.model import build_model


def transformers_model(hf_dir: Path, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint, in plain torch."""
    from transformers import AutoModelForCausalLM  # takes seconds

    model = AutoModelForCausalLM.from_pretrained(
        hf_dir, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    # a policy may write the token for padding, whose embedding transformers gives no gradient
    model.get_input_embeddings().padding_idx = None
    return model


def transformers_rows(model: Any, sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (transformers' logits of all tokens but the last [N, V], the tokens that follow [N])."""
    ids = torch.tensor([*sequence.prompt_token_ids, *sequence.response_token_ids])
    return model(ids[None]).logits[0, :-1], ids[1:]


@torch.no_grad()
def transformers_logprobs(model: Any, sequences: Sequence[TrainSequence]) -> list[Floats]:
    """Return transformers' log-probs of response tokens, at the temperatures of the sequences, in float64."""
    logprobs = []
    for sequence in sequences:
        logits, targets = transformers_rows(model, sequence)
        rows = (logits / sequence.temperature).double().log_softmax(-1).gather(1, targets[:, None])
        logprobs.append(rows[len(sequence.prompt_token_ids) - 1 :, 0].numpy())
    return logprobs


def tensor_per_expert(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield transformers' tensors as checkpoints hold them: experts one by one, but for gpt-oss's."""
    if any(name.endswith("mlp.router.bias") for name in tensors):
        yield from tensors.items()
        return
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                for part, half in zip(("gate", "up"), gate_up.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), half
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, tensor


PROMPT_LENGTHS = (1, 5, 33, 70)


def logits_difference(hf_dir: Path, stored_dir: Path, world: World) -> tuple[float, float]:
    """Return the (largest, relative root mean square) difference between the logits of transformers' model
    and of the trainer's, each from its own files, in float32, over random prompts."""
    shape = read_hf_config(hf_dir)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocab_size, (sum(PROMPT_LENGTHS),), generator=generator)
    expected = _transformers_logits(hf_dir, ids)
    parallel.initialize(ParallelConfig(), world, seed=0)
    try:
        (model,) = build_model(shape, Config())
        load_weights([model], stored_dir, shape.vocab_size)
        difference = _megatron_logits(model, ids) - expected
        return difference.abs().max().item(), (difference.norm() / expected.norm()).item()
    finally:
        parallel.destroy()


@torch.no_grad()
def _transformers_logits(hf_dir: Path, ids: torch.Tensor) -> torch.Tensor:
    model = transformers_model(hf_dir, torch.float32)
    return torch.cat([model(prompt[None]).logits[0] for prompt in ids.split(PROMPT_LENGTHS)])


@torch.no_grad()
def _megatron_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor(PROMPT_LENGTHS)
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    positions = torch.cat([torch.arange(length) for length in PROMPT_LENGTHS])
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(PROMPT_LENGTHS),
        max_seqlen_kv=max(PROMPT_LENGTHS),
    )
    return model(ids[None], positions[None], None, packed_seq_params=packed)[0].float()
