"""The stand-ins for CUDA on a machine without it are where megatron-core asks for CUDA."""

import hashlib
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_ibpo.policy import cpu

DEVICE_LITERAL = re.compile(r"""device ?= ?["']cuda["']|init_data\(["']cuda["']\)""")
TYPE_LITERAL = re.compile(r"""["']torch\.cuda\.\w+Tensor["']""")
ROOMS = (
    "dist_checkpointing", "distributed/param_and_grad_buffer.py", "distributed/distributed_data_parallel.py",
    "distributed/finalize_model_grads.py", "models/common", "models/gpt", "optimizer",
    "pipeline_parallel/p2p_communication.py", "pipeline_parallel/schedules.py", "ssm/gated_delta_net",
    "tensor_parallel", "transformer/attention.py", "transformer/mlp.py", "transformer/moe",
    "transformer/transformer_block.py", "transformer/transformer_layer.py", "transformer/utils.py",
    "utils.py",
)  # fmt: skip
"""Parts of megatron.core that a trainer executes."""


def sources():
    root = Path(importlib.util.find_spec("megatron.core").origin).parent
    for room in ROOMS:
        path = root / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix(), file.read_text()


def test_the_cuda_sites_of_megatron_are_those_that_are_known():
    """Fails when megatron-core is upgraded: read the new lines, see that cpu.py answers those that a
    trainer executes, then pin them here: how many name a CUDA device, type or function, and their hash."""
    lines = [
        f"{file}: {code}"
        for file, text in sources()
        for code in map(str.strip, text.splitlines())
        if re.search(r"torch\.cuda\.|[\"']cuda[\"']", code) and not code.startswith("#")
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    assert (version("megatron-core"), len(lines), digest) == ("0.19.2", 277, "fc2e76ea")


def test_modules_that_name_the_device_as_text_are_listed():
    def modules_with(literal):
        files = [file for file, text in sources() if literal.search(text)]
        return {"megatron.core." + file.removesuffix(".py").replace("/", ".") for file in files}

    not_executed = {
        "megatron.core.distributed.param_and_grad_buffer",  # nccl_ub only
        "megatron.core.optimizer.grad_scaler",  # float16 only
        "megatron.core.optimizer.layer_wise_optimizer",
        "megatron.core.transformer.moe.moe_layer",  # overlapped dispatch only
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.token_dispatcher",  # paged stash only
    }
    assert modules_with(DEVICE_LITERAL) - not_executed == set(cpu.CUDA_LITERALS)
    assert modules_with(TYPE_LITERAL) == set(cpu.CUDA_TYPE_NAMES)


@pytest.mark.world(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_without_cuda_the_cpu_answers_once_it_is_asked_to(world):
    """Importing the package changes nothing; and Megatron may have been imported before."""
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    cpu.activate()
    cpu.activate()  # a second time changes nothing
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.optimizer import clip_grads

    assert not torch.cuda.is_available()
    here = torch.device("cpu")
    assert torch.cuda.current_device() == clip_grads.torch.zeros(1, device="cuda").device == here
    assert torch.ones(2).cuda().device == here
    assert torch.zeros(1).type() == "torch.FloatTensor"
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.cuda.manual_seed(3)
    assert torch.rand(1) == drawn
    assert torch.cuda.current_stream() is torch.cuda.Stream()
    assert swiglu(torch.ones(2, 4)).shape == (2, 2)

    def plain(x):
        return x

    assert torch.compile(plain) is torch.compile(dynamic=False)(plain) is plain
