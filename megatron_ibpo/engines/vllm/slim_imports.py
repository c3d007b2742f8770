"""Packages that an engine on CPUs starts without: they take half of the processor time of its start.

vLLM imports torch's compiler, and packages for audio, traces, clusters, training and chat servers. An engine
of this project on CPUs runs eagerly in one process and reads token ids, so nothing of them would run. Some
are imported all the same, for a few names that do nothing without the rest: stand-ins have these. Once
anything else of such a module is wanted, the real one is imported.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_ibpo.basics.large_imports import import_transformers
from megatron_ibpo.engines.protocol import EngineSettings
from megatron_ibpo.engines.vllm.settings import uses_second_runner


def unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Return the function, or a decorator that returns it."""
    return unchanged if function is None else function


def _do_nothing(*_: Any, **__: Any) -> None: ...


class _Absent(Exception):
    """A class without objects."""


StandIns = dict[str, dict[str, Any]]
"""Module that is not imported → names that torch, transformers or vLLM use of it all the same. What is below
such a module is not imported either."""
COMPILER: StandIns = {
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
"""The compiler, of which torch 2.13 and vLLM 0.32 import this much though they compile nothing."""
SYMBOLIC_SHAPES: StandIns = {"torch.fx.experimental.symbolic_shapes": {"expect_true": bool}}
"""Shapes that are formulas, with all of sympy. torch's checks of sizes ask here whether a number is true."""
CHAT_SERVER: StandIns = {
    "aiohttp": {"ClientSession": _Absent, "ClientResponse": _Absent},
    "vllm.parser": {},
    "vllm.parser.engine": {},
    "vllm.parser.engine.adapters": {"ParserEngineReasoningAdapter": _Absent},
    "vllm.reasoning": {"ReasoningParser": _Absent, "ReasoningParserManager": _Absent},
    "vllm.renderers.chat_utils": {
        "PROMPT_EMBEDS_PLACEHOLDER_TOKEN": "",
        "ChatTemplateResolutionError": _Absent,
        "load_chat_template": None,
        "parse_chat_messages": None,
        "parse_chat_messages_async": None,
    },
}
"""Parsers and renderers of conversations, and downloads of media."""


def stand_in(modules: StandIns) -> None:
    """Import these stand-ins from now on, unless one of the modules has been imported already."""
    if modules.keys().isdisjoint(sys.modules):
        sys.meta_path.insert(0, _Finder(modules))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, modules: StandIns) -> None:
        self.modules = modules
        self._tops = [name for name in modules if name.rpartition(".")[0] not in modules]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self.modules:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith(tuple(f"{name}." for name in self._tops)):
            self.bring()
            importlib.import_module(fullname)
            return ModuleSpec(fullname, self)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, _StandIn):
            vars(module).update(self.modules[module.__name__])

    def bring(self) -> None:
        """Replace all stand-ins by the real modules."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            for name in self.modules:
                sys.modules.pop(name, None)
            for name in self._tops:
                package, _, module = name.rpartition(".")
                if package:
                    vars(sys.modules[package]).pop(module, None)
        for name in self._tops:
            importlib.import_module(name)


class _StandIn(ModuleType):
    def __init__(self, name: str, finder: _Finder) -> None:
        super().__init__(name)
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (submodule := f"{self.__name__}.{name}") in self._finder.modules:
            return importlib.import_module(submodule)
        self._finder.bring()
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
    for modules in (COMPILER, SYMBOLIC_SHAPES, CHAT_SERVER):
        stand_in(modules)
    import torch

    compiler: Any = torch
    compiler.compile = unchanged  # as TORCH_COMPILE_DISABLE has it
    import_transformers()
    from transformers import utils

    # vLLM splits layers itself
    utils.is_torch_distributed_available = utils.import_utils.is_torch_distributed_available = lambda: False
