"""The stand-ins for CUDA on a machine without it are where megatron-core asks for CUDA."""

import hashlib
import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_ibpo.policy import cpu
from support.ranks import run_ranks

PINNED = "0.19.2"
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

SITES = "277 lines, fc2e76ea"
"""How many lines of those mention CUDA, and the hash of the lines."""


def sources():
    root = Path(importlib.util.find_spec("megatron.core").origin).parent
    for room in ROOMS:
        path = root / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield file.relative_to(root).as_posix(), file.read_text()


def cuda_lines():
    """Every line of code in ROOMS that names a CUDA device, type or function."""
    for file, text in sources():
        for line in text.splitlines():
            code = line.strip()
            if re.search(r"torch\.cuda\.|[\"']cuda[\"']", code) and not code.startswith("#"):
                yield f"{file}: {code}"


def test_the_cuda_sites_of_megatron_are_those_that_are_known():
    """Fails when megatron-core is upgraded: read the new lines, see that cpu.py answers those that a
    trainer executes, then pin them here."""
    lines = list(cuda_lines())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    assert version("megatron-core") == PINNED
    assert f"{len(lines)} lines, {digest}" == SITES


def test_modules_that_name_the_device_as_text_are_listed():
    def modules_with(literal):
        return {
            "megatron.core." + file.removesuffix(".py").replace("/", ".")
            for file, text in sources()
            if literal.search(text)
        }

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


def stand_ins_at_work(world):
    """Facts about torch and Megatron in a process that has imported both and this package, before the
    stand-ins are active and afterwards."""
    before = torch.cuda.Stream.__module__
    cpu.activate()
    cpu.activate()  # a second time changes nothing
    from megatron.core.fusions.fused_bias_swiglu import swiglu
    from megatron.core.optimizer import clip_grads

    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.cuda.manual_seed(3)

    def plain(x):
        return x

    return {
        "before": before,
        "available": torch.cuda.is_available(),
        "device": torch.cuda.current_device(),
        "literal": clip_grads.torch.zeros(1, device="cuda").device,
        "elsewhere": torch.zeros(1).type(),
        "seeds the CPU": torch.equal(torch.rand(1), drawn),
        "streams": torch.cuda.current_stream() is torch.cuda.Stream(),
        "moved": torch.ones(2).cuda().device.type,
        "fused": swiglu(torch.ones(2, 4)).shape,
        "compiles nothing": torch.compile(plain) is torch.compile(dynamic=False)(plain) is plain,
    }


@pytest.mark.world
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_without_cuda_the_cpu_answers_once_it_is_asked_to():
    """Importing the package changes nothing; and Megatron may have been imported before."""
    (facts,) = run_ranks(stand_ins_at_work, 1)
    assert facts == {
        "before": "torch.cuda.streams", "available": False, "device": torch.device("cpu"),
        "literal": torch.device("cpu"), "elsewhere": "torch.FloatTensor", "seeds the CPU": True,
        "streams": True, "moved": "cpu", "fused": torch.Size([2, 2]),
        "compiles nothing": True,
    }  # fmt: skip
