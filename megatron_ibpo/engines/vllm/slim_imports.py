"""Packages that an engine on CPUs starts without: they take two fifths of the processor time of its start.

vLLM imports torch's compiler, and packages for audio, traces, clusters and training. An engine of this
project on CPUs runs eagerly in one process and reads token ids, so nothing of them would run. torch and vLLM
import the compiler all the same, for a few names that do nothing without it: stand-ins have these. Once
anything else of it is wanted, the real one is imported.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_ibpo.engines.protocol import EngineSettings
from megatron_ibpo.engines.vllm.settings import uses_second_runner


def unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function, or a decorator that returns it."""
    return unchanged if function is None else function


def _do_nothing(*_: Any, **__: Any) -> None: ...


STAND_INS: dict[str, dict[str, Any]] = {
    "torch._inductor": {},
    "torch._inductor.custom_graph_pass": {"CustomGraphPass": object},
    "torch._inductor.runtime": {},
    "torch._inductor.runtime.triton_helpers": {"libdevice": None},
    "torch._dynamo": {"disable": unchanged, "assume_constant_result": unchanged, "allow_in_graph": unchanged},
    "torch._dynamo.decorators": {"mark_unbacked": _do_nothing},
    "torch._dynamo.trace_rules": {"clear_lru_cache": _do_nothing},
    "torch._dynamo._trace_wrapped_higher_order_op": {"TransformGetItemToIndex": nullcontext},
    "torch._dynamo.symbolic_convert": {"InliningInstructionTranslator": object},
}
"""Modules of the compiler that torch 2.13 and vLLM 0.32 import though they compile nothing → names that they
use."""
_COMPILER = ("torch._dynamo", "torch._inductor")


def stand_in_for_compiler() -> None:
    """Import `STAND_INS` instead of the compiler from now on, unless it has been imported already."""
    if not any(name in sys.modules for name in _COMPILER):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in STAND_INS:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(tuple(f"{name}." for name in _COMPILER)):
            self.bring_compiler()
            importlib.import_module(fullname)
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _StandIn):
            vars(module).update(STAND_INS[module.__name__])

    def bring_compiler(self) -> None:
        """Replace all stand-ins by the real compiler."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in STAND_INS:
                sys.modules.pop(name, None)
            for name in _COMPILER:
                vars(sys.modules["torch"]).pop(name.removeprefix("torch."), None)
        for name in _COMPILER:
            importlib.import_module(name)


class _StandIn(ModuleType):
    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (submodule := f"{self.__name__}.{name}") in STAND_INS:
            return importlib.import_module(submodule)
        self._finder.bring_compiler()
        return getattr(importlib.import_module(self.__name__), name)


OPTIONAL = ("scipy", "opentelemetry", "ray", "accelerate", "networkx", "triton")
"""Packages whose absence torch, transformers and vLLM handle."""
OF_COMPILER = "vllm.env_override"
"""Module of vLLM that changes torch's compiler."""


def slim_imports(settings: EngineSettings) -> None:
    """Have this process import vLLM without the packages that an engine with these settings does not use.
    Call it before torch is imported. For other engines it does nothing."""
    has_one_process = settings.device == "cpu" and settings.tensor_parallel_size == 1
    if not has_one_process or not settings.enforce_eager or uses_second_runner("cpu"):
        return
    if settings.drafts and not settings.drafts_corrections:
        return  # vLLM imports the compiler for a model that drafts, and n-grams need none
    for package in OPTIONAL:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    sys.modules.setdefault(OF_COMPILER, ModuleType(OF_COMPILER))
    stand_in_for_compiler()
    import torch

    compiler: Any = torch
    compiler.compile = unchanged  # as TORCH_COMPILE_DISABLE has it
