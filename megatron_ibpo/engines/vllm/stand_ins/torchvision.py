"""A stand-in for the parts of torchvision that vLLM and transformers import for vision-language models.

The package index has no torchvision for the CPU's torch, and vLLM cannot load Qwen3.5 without one: its text
model is in a module with the vision tower, whose preprocessing imports it. Only engines on CPUs have this on
their path, and only if no torchvision is installed. It computes nothing: engines get text alone.
"""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.28.0"
__path__: list[str] = []  # it has submodules, and no files for them


ImageReadMode = Enum("ImageReadMode", {"RGB": 3})


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _missing(name: str) -> Any:
    """Return a function on images, which engines import and never call."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name}: torchvision is not installed: this engine takes text only")

    return missing


def _submodule(name: str, **members: Any) -> ModuleType:
    module = module_from_spec(ModuleSpec(f"{__name__}.{name}", None, is_package=True))
    vars(module).update(members)
    sys.modules[module.__name__] = module
    return module


_functions = {"InterpolationMode": InterpolationMode, "__getattr__": _missing}
io = _submodule("io", ImageReadMode=ImageReadMode, decode_image=_missing("decode_image"))
transforms = _submodule(
    "transforms",
    InterpolationMode=InterpolationMode,
    functional=_submodule("transforms.functional", **_functions),
    v2=_submodule("transforms.v2", functional=_submodule("transforms.v2.functional", **_functions)),
)
