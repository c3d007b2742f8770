"""Counts the bytes that parts of the local layers move on a GPU, plain and fused, and compiles the fused
kernels ahead of time. No GPU is needed: tensors are faked, and Triton compiles for a target.

    PYTHONPATH=tests:. python -m support.fused_kernels             # a JSON object per part
    PYTHONPATH=tests:. python -m support.fused_kernels --save      # all of them, into tools/results

Bytes are those of every operator's or kernel's inputs and outputs, each read or written once. Sequences have
lengths as in the part trainer-qwen3 of `tests/gpu.sh`.
"""

import copy
import itertools
import json
import logging
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import async_compile, compile_fx, config, metrics
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from megatron_ibpo.models import fusion, local_modules, packed, packed_attention
from megatron_ibpo.models.fusion_check import _swiglu
from support.aot_kernels import CUOBJDUMP, describe
from support.fused_record import RECORD, expected, sources_hash

TARGET = GPUTarget("cuda", 90, 32)
LIMITS = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32}
LIMITS |= {"max_threads_per_block": 1024, "multi_processor_count": 132, "major": 9}
H200 = DeviceProperties(type="cuda", index=0, cc=90, **LIMITS)
PROPERTIES = SimpleNamespace(name="NVIDIA H200", minor=0, total_memory=150 * 10**9, **LIMITS)
HIDDEN, HEADS, GROUPS, SIZE, FFN = 1024, 16, 8, 128, 3072  # Qwen3-0.6B
LENGTHS = [3300, 2600, 1500, 800]  # packed into one micro-batch of 8,192 tokens, less 8
TOKENS = sum(LENGTHS)
ENDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)


class BytesMoved(TorchDispatchMode):
    """Bytes of inputs and outputs of all operators that are no views."""

    def __init__(self):
        super().__init__()
        self.bytes, self.kernels = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten" and not function.is_view and "empty" not in function.__name__:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if torch.is_tensor(x)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            self.kernels += 1
        return result


@contextmanager
def faked_gpu(sources):
    """An H200 for Inductor. It keeps its kernels' sources in `sources` instead of compiling them."""

    def keep(self, name, source, *_, **__):
        sources[name] = source
        return mock.MagicMock()

    cuda = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0), "set_rng_state": None, "get_rng_state": torch.get_rng_state(),
        "synchronize": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
    }  # fmt: skip
    active = SimpleNamespace(get_current_target=lambda: TARGET)
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
        for patch in (
            mock.patch.object(DeviceProperties, "create", return_value=H200),
            mock.patch.object(async_compile.AsyncCompile, "triton", keep),
            mock.patch("torch.utils._triton.triton_hash_with_backend", return_value=""),
            mock.patch.object(driver, "_active", active),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", 0, create=True),
            mock.patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
            mock.patch("torch._inductor.scheduler.has_triton", return_value=True),
        ):
            stack.enter_context(patch)
        yield


def run(function, inputs):
    """A function and the gradients of its inputs in bf16."""
    leaves = [x.detach().requires_grad_(x.dtype == torch.bfloat16) for x in inputs]
    output = function(*leaves)
    torch.autograd.grad(output, [x for x in leaves if x.requires_grad], torch.empty_like(output))


def moved_by_operators(function, inputs):
    with BytesMoved() as moved:
        run(function, inputs)
    return {"bytes_per_token": moved.bytes / TOKENS, "operators": moved.kernels}


def moved_by_kernels(function, inputs):
    """What Inductor makes of a function and its gradients. The graphs are made of tensors on the CPU, since a
    torch without CUDA has no gradients on GPUs, and then moved."""
    sources = {}

    def compile_graph(graph, examples):
        unchanged = copy.deepcopy(graph)
        with torch.no_grad(), faked_gpu(sources):
            examples = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in examples
            ]
            FakeTensorProp(graph, examples[0].fake_mode).propagate(*examples)
            compile_fx.compile_fx_inner(graph, examples)
        return make_boxed_func(unchanged)

    metrics.reset()
    compiled = aot_function(
        function, compile_graph, compile_graph, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    run(compiled, inputs)
    return {"bytes_per_token": metrics.num_bytes_accessed / TOKENS, "sources": sources}


def compile_for_target(name, source):
    """Registers, spills and instructions of one of Inductor's kernels, in the first of its configurations."""
    with tempfile.TemporaryDirectory() as place, faked_gpu({}):
        file = Path(place, "kernel.py")  # Triton reads a kernel's source from its file
        file.write_text(source)
        scope: dict[str, Any] = {"__file__": str(file), "__name__": "kernel"}
        exec(compile(source, str(file), "exec"), scope)
        tuned = scope[name]
        first, meta = tuned.configs[0], tuned.triton_meta
        constants = {key: value for key, value in first.kwargs.items() if key in tuned.fn.arg_names}
        places = {(tuned.fn.arg_names.index(key),): value for key, value in constants.items()}
        (attributes,) = meta["configs"]
        kernel = ASTSource(tuned.fn, meta["signature"], places, attributes)
        options = {"num_warps": first.num_warps, "num_stages": first.num_stages}
        binary = Path(place, "kernel.cubin")
        binary.write_bytes(triton.compile(kernel, target=TARGET, options=options).asm["cubin"])
        shown = subprocess.check_output([CUOBJDUMP, "-sass", "--dump-resource-usage", binary], text=True)
        return describe(shown, shown)


def parts():
    """(part, times per layer, plain function, fused function, inputs) with the widths of Qwen3-0.6B. `None`:
    torch's compiler fuses the plain function."""

    def made(*size):
        return torch.empty(TOKENS, *size, dtype=torch.bfloat16)

    def norm(x, weight):
        return local_modules.rms_norm(x, weight, 1e-6, False)

    angles = [torch.empty(TOKENS, 1, SIZE), torch.empty(TOKENS, 1, SIZE)]
    heads = [made(count, SIZE) for count in (HEADS, GROUPS, GROUPS)]
    yield "norm of hidden states", 2, norm, None, [made(1, HIDDEN), torch.empty(HIDDEN, dtype=torch.bfloat16)]
    yield "norm of queries", 1, norm, None, [made(1, HEADS, SIZE), torch.empty(SIZE, dtype=torch.bfloat16)]
    yield "norm of keys", 1, norm, None, [made(1, GROUPS, SIZE), torch.empty(SIZE, dtype=torch.bfloat16)]
    yield "rotation of queries", 1, local_modules.rotate, None, [heads[0], *angles]
    yield "rotation of keys", 1, local_modules.rotate, None, [heads[1], *angles]
    yield "activation", 1, _swiglu, None, [made(1, 2 * FFN)]
    plain = partial(packed_attention.attend_in_rectangles, ENDS, None, None)
    yield "attention", 1, plain, partial(fusion.attend, ENDS, max(LENGTHS), None), heads


def report():
    packed.by_length(ENDS)  # kept with the boundaries; faked tensors have no values
    settings = {"emulate_precision_casts": True, "force_disable_caches": True}
    with FakeTensorMode(allow_non_fake_inputs=True), config.patch(settings):
        for name, times, plain, fused, inputs in parts():
            before = moved_by_operators(plain, inputs)
            after = moved_by_operators(fused, inputs) if fused else moved_by_kernels(plain, inputs)
            yield {"part": name, "per_layer": times, "plain": before, "fused": after}


if __name__ == "__main__":
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # or it counts no bytes
    rows = []
    for row in report():
        sources = row["fused"].pop("sources", {})
        row["fused"]["kernels"] = [compile_for_target(*source) for source in sources.items()]
        rows.append(row)
        print(json.dumps(row), flush=True)
    if "--save" in sys.argv:
        about = {
            "hash": sources_hash(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "capability": TARGET.arch,
        }
        RECORD.write_text(
            json.dumps(about | {"tokens": TOKENS, "expected": expected(rows), "parts": rows}, indent=1) + "\n"
        )
