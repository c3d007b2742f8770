"""Libraries that compute the layers of a model: Transformer Engine and flash-linear-attention on GPUs, plain
torch on CPUs. Neither library is imported until it is needed."""

import re
import socket
import sys
from dataclasses import dataclass
from importlib import import_module

import torch

from megatron_ibpo.models import fusion
from megatron_ibpo.models.shape import ModelShape

ALLOW = "--allow-local-modules"
CUDNN_OF_LARGE_HEADS = 92500
"""First cuDNN with packed attention of larger heads on Blackwell, as `torch.backends.cudnn.version()`."""


class BackendError(ValueError):
    """A library that a GPU needs is missing or cannot be used."""


@dataclass(frozen=True)
class Backends:
    """The libraries that a model is built on; plain torch computes the rest."""

    transformer_engine: bool
    flash_linear_attention: bool
    fused: frozenset[str] = frozenset()
    """Parts of local modules to fuse, of `fusion.FUSIONS`, where they work."""


LOCAL = Backends(transformer_engine=False, flash_linear_attention=False)
"""Back ends on CPUs."""
FAST = Backends(transformer_engine=True, flash_linear_attention=True)
"""Back ends on GPUs."""


def find_backends(
    shape: ModelShape, *, on_gpu: bool, allow_local: bool, bf16: bool | None = True
) -> Backends:
    """Return the back ends that compute the layers in this process. Raises BackendError, which says where and
    why, for a library that is missing or fails when it is imported.

    Args:
        allow_local: let plain torch stand in on a GPU for a library that is not installed.
        bf16: the trainer's precision. (In fp32 there is no fused attention to miss.)
    """
    if not on_gpu:
        return LOCAL
    failures = {
        "Transformer Engine": _import_failure("transformer_engine.pytorch"),
        # only a delta net needs it
        "flash-linear-attention": _import_failure(
            "fla.modules.convolution", "fla.modules.l2norm", "fla.ops.gated_delta_rule"
        )
        or _wrong_gradients()
        if shape.is_recurrent
        else None,
    }
    missing = [f"{library} ({reason})" for library, reason in failures.items() if reason]
    if missing and not allow_local:
        raise BackendError(
            f"{sys.executable} on {socket.gethostname()} cannot use {' and '.join(missing)}: on a GPU "
            "the layers would run in plain torch, which waits for the GPU many times in every layer and is "
            "tens of times slower. Install what is missing with `bash tools/bootstrap.sh` (docs/gpus.md says "
            f"what its build needs), or accept that with {ALLOW}"
        )
    if bf16 and not allow_local and (reason := _no_fused_attention(shape)):
        raise BackendError(
            f"Transformer Engine on {socket.gethostname()} has no fused attention over packed sequences: "
            f"{reason}. It would compute it unfused, with memory quadratic in the longest sequence. Install "
            f"flash-attn, or accept that with {ALLOW}"
        )
    # flash attention has neither float32 nor sinks
    fused = fusion.FUSIONS if bf16 and not shape.attention_sinks else fusion.FUSIONS - {fusion.ATTENTION}
    return Backends(
        transformer_engine=failures["Transformer Engine"] is None,
        flash_linear_attention=failures["flash-linear-attention"] is None,
        fused=fused if failures["Transformer Engine"] else frozenset(),
    )


def served_by(shape: ModelShape, backends: Backends, *, bf16: bool) -> dict[str, tuple[str, str]]:
    """Return part of a layer → (the library that computes it, how), for the table at the start of a run."""
    fast = backends.transformer_engine
    library = "Transformer Engine" if fast else "torch"
    fused = backends.fused - fusion.FAILURES.keys()
    if fast:
        unfused = "unfused and quadratic in memory: fp32 has no other"
        attention = "cuDNN or flash attention" if bf16 else unfused
        norms = "fused with the linear layer after them"
    else:
        attention = "scaled_dot_product_attention over padded rectangles"
        if fusion.ATTENTION in fused:
            attention = "torch's flash attention; padded rectangles where ranks share sequences"
        norms = "compiled" if fusion.NORM in fused else "in fp32, not fused"
    parts = {"attention": (library, attention), "norms": (library, norms)}
    if shape.is_moe:
        parts["experts"] = (library, "grouped products" if fast else "one product after the other")
    if shape.is_recurrent:
        flash = "flash-linear-attention", "its kernels over chunks"
        plain = "torch", "chunks one after the other"
        parts["delta net"] = flash if backends.flash_linear_attention else plain
    return parts


def _import_failure(*modules: str) -> str | None:
    """Return why one of the modules cannot be imported; None if all can."""
    try:
        for name in modules:
            import_module(name)
    except Exception as error:  # a library built for another torch or CUDA raises anything
        return f"{type(error).__name__}: {error}"
    return None


def _no_fused_attention(shape: ModelShape) -> str | None:
    """Return why cuDNN does not compute attention on this GPU, if flash-attn is not there to do so (as in
    Transformer Engine's `fused_attn.cpp`, 2.18 to 2.20; not run on GPUs)."""
    if not torch.cuda.is_available() or _import_failure("flash_attn") is None:
        return None
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return f"cuDNN has it from compute capability 9.0 on, and this GPU has {major}.{minor}"
    version = torch.backends.cudnn.version() or 0
    if major > 9 and shape.head_dim > 128 and version < CUDNN_OF_LARGE_HEADS:
        return (
            f"for heads of {shape.head_dim} on compute capability {major}.{minor} cuDNN has it from 9.25 on, "
            f"and this one is {version // 10000}.{version // 100 % 100}"
        )
    return None


def _wrong_gradients() -> str | None:
    """Return why flash-linear-attention, though installed, cannot train here: on Hopper some versions of
    Triton compile its backward pass wrongly, which shows after the first rollout (its issue 640)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    triton = import_module("triton")
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    if (3, 4) <= version < (3, 7, 1):
        return (
            f"Triton {triton.__version__} compiles its gradients wrongly for this GPU; install Triton 3.7.1"
        )
    return None
