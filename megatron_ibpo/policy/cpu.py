"""Megatron-core on machines without CUDA, whose absence no other module deals with.

megatron-core 0.19.2 takes CUDA for granted in about sixty places, but needs no GPU: gloo serves all its
collectives. `activate()` puts CPU stand-ins there, in trainer processes only: the vLLM process must not see
them. `tests/policy/test_process_start.py` pins the sites to the Megatron version, so that an upgrade is
noticed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")

CUDA_LITERALS = (
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.utils",
)
"""Megatron modules that name the device "cuda" as text; `torch` is a view of torch there (`_TorchOnCpu`)."""

PINNED_MEMORY = ("megatron.core.models.common.embeddings.rope_utils",)
"""Megatron modules that ask for pinned memory: YaRN's positions where ranks share sequences."""

CUDA_TYPE_NAMES = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
)
"""Megatron modules that compare `Tensor.type()` with a CUDA type's name."""


class NullStream:
    """A stream on which all work is already done, as everything is in order on a CPU. There is only one."""

    cuda_stream = 0
    _instance: NullStream | None = None

    def __new__(cls, *_: Any, **__: Any) -> NullStream:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def wait_stream(self, _stream: Any) -> None: ...
    def wait_event(self, _event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: NullEvent | None = None) -> NullEvent:
        return event or NullEvent()


class NullEvent:
    """An event that has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _stream: Any = None) -> None: ...
    def wait(self, _stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _no_bytes(*_: Any, **__: Any) -> int:
    return 0


CUDA_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: CPU,
    "current_stream": NullStream,
    "default_stream": NullStream,
    "empty_cache": _nothing,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "is_current_stream_capturing": lambda: False,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    "manual_seed_all": _nothing,  # torch.manual_seed calls it after seeding the CPU
    "max_memory_allocated": _no_bytes,
    "memory_allocated": _no_bytes,
    "memory_reserved": _no_bytes,
    "set_device": _nothing,
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "set_stream": _nothing,
    "stream": lambda *_, **__: contextlib.nullcontext(),
    "synchronize": _nothing,
}


class _TorchOnCpu(ModuleType):
    """torch, with tensor factories that take the CPU for "cuda" and pin no memory."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


_tensor_type = torch.Tensor.type


def _type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = _tensor_type(self, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__")
    if not args and not kwargs and caller in CUDA_TYPE_NAMES:
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


def _as_numpy_if_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for the dispatcher's `maybe_move_tensor_to_cpu`, which leaves CPU tensors as they are."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """Stand in for torch.compile, as a call or a decorator: it takes 27 s for a step of 0.1 s."""
    return _as_it_is if function is None else function


def activate() -> None:
    """Put the CPU stand-ins in place, once. Does nothing where CUDA is available."""
    if torch.cuda.is_available() or torch.cuda.Stream is NullStream:
        return
    if "megatron.core" in sys.modules:
        torch.compiler.set_stance("force_eager")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    compiler: Any = torch
    compiler.compile = _as_it_is
    literal_modules: list[Any] = [importlib.import_module(name) for name in (*CUDA_LITERALS, *PINNED_MEMORY)]
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")

    cuda: Any = torch.cuda
    for name, function in CUDA_FUNCTIONS.items():
        # a separate object for each: torch.compile's tables, if imported, refuse one object under two names
        setattr(cuda, name, partial(function))
    cuda.random.get_rng_state = CUDA_FUNCTIONS["get_rng_state"]
    cuda.random.set_rng_state = CUDA_FUNCTIONS["set_rng_state"]
    cuda.Stream = NullStream
    cuda.Event = NullEvent
    tensor: Any = torch.Tensor
    tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    tensor.type = _type_as_on_cuda

    torch_on_cpu = _TorchOnCpu()
    for module in literal_modules:
        module.torch = torch_on_cpu
    dispatcher.maybe_move_tensor_to_cpu = _as_numpy_if_asked
    random._get_cuda_rng_state = CUDA_FUNCTIONS["get_rng_state"]
    random._set_cuda_rng_state = CUDA_FUNCTIONS["set_rng_state"]
