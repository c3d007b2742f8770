"""Functions on images, which engines import and never call."""

from typing import Any, NoReturn

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{name}: torchvision is not installed: this engine takes text only")

    return missing
