"""Check that transformers, the trainer's model and vLLM continue prompts alike: greedily, by tokens, in
float32 (vLLM in bfloat16 if the model has delta nets).

    "$(bash tools/bootstrap.sh)" tools/check_greedy.py --hf-checkpoint runs/smollm2

transformers writes the continuations, and vLLM has to write the same tokens. The trainer's model writes none;
instead each of these tokens has to be the likeliest after those before it, which is equivalent.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ibpo.basics.entry_point import run_tool
from megatron_ibpo.policy.process_start import hush_megatron

QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about rain.",
    "What is 7 + 2?",
)
"""Questions for the checkpoint's chat template."""
START_TIMEOUT = 600.0
"""Seconds for vLLM to start, and again to write."""


@dataclass
class Arguments:
    hf_checkpoint: Path
    """A model with a chat template."""
    tokens: int = 32
    """Most tokens of a continuation."""
    save: Path | None = None
    """JSON file for the results."""


def by_transformers(hf_dir: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    written = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        everything = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
        written.append(everything[0, len(prompt) :].tolist())
    return written


def by_vllm(hf_dir: Path, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    from megatron_ibpo.basics.records import SampleRequest
    from megatron_ibpo.config import Config, RolloutConfig
    from megatron_ibpo.engines.registry import on_device, start_instrument
    from megatron_ibpo.models import read_hf_config

    parameters = {"vllm_kv_cache_bytes": 256 * 1024**2}
    config = Config(rollout=RolloutConfig(rollout_max_context_len=512, parameters=parameters))
    shape = read_hf_config(hf_dir)
    rollout = on_device(config, shape, on_gpu=False).rollout
    requests = [
        SampleRequest(np.array(prompt, dtype=np.int32), seed=0, max_tokens=tokens, temperature=0.0)
        for prompt in prompts
    ]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "engine.log"
        engine = start_instrument(rollout, hf_dir, shape, on_gpu=False, num_threads=1, log=log)
        try:
            engine.wait_ready(START_TIMEOUT)
            return [s.token_ids.tolist() for s in engine.generate(requests, version=0, timeout=START_TIMEOUT)]
        finally:
            engine.close()


@torch.no_grad()
def likeliest(hf_dir: Path, prompts: list[list[int]], written: list[list[int]]) -> list[list[int]]:
    """Return the token that the trainer's model finds likeliest at every place of the continuations."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.basics.distributed import start_world
    from megatron_ibpo.config import Config, ParallelConfig
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.hf_models import load_hf

    world = start_world()
    parallel.initialize(ParallelConfig(), world, seed=0)
    try:
        shape = read_hf_config(hf_dir)
        chunks = build_model(shape, Config())
        load_hf(chunks, shape, hf_dir)
        likeliest_ids = []
        for prompt, continuation in zip(prompts, written, strict=True):
            ids = torch.tensor([prompt + continuation])
            ends = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=ids.shape[1],
                max_seqlen_kv=ids.shape[1],
            )
            logits = chunks[0](ids, torch.arange(ids.shape[1])[None], None, packed_seq_params=packed)[0]
            likeliest_ids.append(logits[len(prompt) - 1 : -1, : shape.vocab_size].argmax(-1).tolist())
        return likeliest_ids
    finally:
        parallel.destroy()
        world.close()


def main(arguments: Arguments) -> int:
    from transformers import AutoTokenizer

    hush_megatron()
    hf_dir = arguments.hf_checkpoint
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts: list[Any] = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    written = by_transformers(hf_dir, prompts, arguments.tokens)
    sampled = by_vllm(hf_dir, prompts, arguments.tokens)
    results = {
        "prompts": len(prompts),
        "tokens": sum(map(len, written)),
        "vllm_equal": sampled == written,
        "trainer_equal": likeliest(hf_dir, prompts, written) == written,
        "first": tokenizer.decode(written[0], skip_special_tokens=True),
    }
    print(json.dumps(results, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if results["vllm_equal"] and results["trainer_equal"] else 1


if __name__ == "__main__":
    run_tool(main, Arguments, __doc__)
