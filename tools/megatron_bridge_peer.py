"""Megatron-Bridge's conversion of a Qwen3 from Hugging Face to Megatron on CPUs, for comparison with this
project's.

    pip install --no-deps --target PEER megatron-bridge==0.6.2 omegaconf==2.4.0
    python tools/bench_conversion.py \\
        --peer "PYTHONPATH=PEER:tests:. python tools/megatron_bridge_peer.py {source} {target}"

It requires GPUs, NCCL and Transformer Engine. Here it has gloo, and stand-ins in plain torch for Transformer
Engine's layers, which only hold the weights. Random initialization is unnecessary, and off.
"""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path

import torch

from megatron_ibpo.policy import cpu
from support import te_stand_in


def without_gpus() -> None:
    """Let the package import and start on a machine without GPUs."""
    if not hasattr(typing, "override"):  # Python 3.12's
        typing.override = lambda function: function  # type: ignore[attr-defined]
    te_stand_in.install()
    cpu.activate()
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend="gloo", *positional, **named: start(
        "gloo", *positional, **named
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ["LOCAL_RANK"] = "0"


def convert(source: Path, target: Path) -> None:
    from megatron.bridge import AutoBridge
    from megatron.core import dist_checkpointing, parallel_state

    provider = AutoBridge.from_hf_pretrained(str(source), torch_dtype=torch.bfloat16).to_megatron_provider()
    for needs_gpu in (
        "gradient_accumulation_fusion",
        "persist_layer_norm",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "moe_permute_fusion",
        "perform_initialization",
    ):
        setattr(provider, needs_gpu, False)
    provider.use_cpu_initialization = True
    provider.params_dtype, provider.bf16 = torch.bfloat16, True
    provider.finalize()
    (model,) = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    target.mkdir(parents=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist_checkpointing.save(model.sharded_state_dict(metadata={"dp_cp_group": group}), str(target))


if __name__ == "__main__":
    without_gpus()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
