"""Reinforcement learning of reasoning models with IBPO on Megatron-core and vLLM."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

_MOVED = {f"{__name__}.{name}": f"{__name__}.basics.{name}" for name in ("records", "seeds")}
"""Modules that docs named for users' own operators, by where they were → where they are."""


class _MovedModules(MetaPathFinder, Loader):
    """Imports a moved module under its old name, as the same module object."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(_MOVED[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """The module has been executed under its new name."""


sys.meta_path.append(_MovedModules())
