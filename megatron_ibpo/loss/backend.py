"""The choice of the loss implementation: the Triton kernels or plain torch."""

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

LossBackend = Literal["auto", "triton", "torch"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ChosenBackend:
    """The back end in use and the reason, in a few words."""

    name: Literal["triton", "torch"]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_backend(requested: LossBackend, device: torch.device, dtype: torch.dtype) -> ChosenBackend:
    """Return the implementation for logits of this device and dtype.

    "auto" takes the kernels on CUDA devices if they can be used, otherwise torch. "triton" on a CPU needs
    Triton's interpreter (TRITON_INTERPRET=1), which is for tests.

    Raises:
        ValueError: an unknown name, or "triton" where the kernels cannot be used.
    """
    if requested not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown loss backend {requested!r}; there are 'auto', 'triton' and 'torch'")
    if requested == "torch":
        return ChosenBackend("torch", "as asked")
    if requested == "auto" and device.type != "cuda":
        return ChosenBackend("torch", "no CUDA device")
    obstacle = _obstacle(device, dtype)
    if obstacle is None:
        return ChosenBackend("triton", "as asked" if requested == "triton" else "CUDA device")
    if requested == "triton":
        raise ValueError(f"--loss-backend triton: {obstacle}; use auto or torch")
    return ChosenBackend("torch", obstacle)


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot be used, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels run on CUDA devices, not on {device.type}, except under TRITON_INTERPRET=1"
    if dtype not in _DTYPES:
        return f"the kernels take bfloat16, float16 and float32 logits, not {dtype}"
    return None
