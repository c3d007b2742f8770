"""Parts of the local layers that a GPU computes in fewer passes over memory, by torch's compiler (which
`TORCH_COMPILE_DISABLE=1` switches off), Megatron's compiled SwiGLU, and torch's flash attention.

`fusion_check` tries each part before a model is built: one that fails is left out on all ranks, with a
warning. If a norm or the rotation fails to compile later, that rank alone leaves it out; other errors end the
run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

NORM, ROTARY, ACTIVATION, ATTENTION = "norm", "rotary", "activation", "attention"
FUSIONS = frozenset({NORM, ROTARY, ACTIVATION, ATTENTION})
GRAPHS = 64
"""Graphs that torch may keep per function. Each size of rows, dtype and gradient mode has its own."""
FAILURES: dict[str, str] = {}
"""Parts that failed in this process, and why. They are not tried again."""


class Compiled:
    """A function that torch compiles once for any number of rows. If that fails, the function itself serves
    from then on, and a warning says so."""

    def __init__(self, part: str, function: Callable[..., Tensor], rows: tuple[int, ...]):
        """`rows` are the places of the arguments whose first dimension varies."""
        self.part, self.function, self.rows = part, function, rows

    @cached_property
    def compiled(self) -> Callable[..., Tensor]:
        import torch._dynamo

        torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
        # a result is rounded where the plain function rounds it
        options: dict[str, Any] = {"emulate_precision_casts": True}
        compiled: Callable[..., Tensor] = torch.compile(
            self.function, dynamic=False, fullgraph=True, options=options
        )
        return compiled

    def __call__(self, *arguments: Any) -> Tensor:
        rows = [arguments[place] for place in self.rows]
        if self.part in FAILURES or len(rows[0]) < 2:  # torch compiles 0 and 1 apart
            return self.function(*arguments)
        try:
            compiled = self.compiled
            for tensor in rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return compiled(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler raises anything
            leave_out(self.part, error)
            return self.function(*arguments)


def compile_gradients_at_once() -> None:
    """Have torch compile gradients with the forward pass, where `Compiled` catches a failure."""
    import torch._functorch.config

    torch._functorch.config.force_non_lazy_backward_lowering = True


def leave_out(part: str, cause: object) -> None:
    """Use the plain function for this part from now on, and warn."""
    cause = getattr(cause, "inner_exception", cause)  # what torch's compiler wraps
    FAILURES[part] = f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(cause)
    reason = FAILURES[part].partition("\n")[0][:300]
    warnings.warn(
        f"{part} is computed in plain torch, not fused, which is right but slower: {reason}", stacklevel=2
    )


def attend(
    cu_seqlens: Tensor,
    longest: int,
    window: int | None,
    query_NHD: Tensor,
    key_NGD: Tensor,
    value_NGD: Tensor,
) -> Tensor:
    """Compute causal attention within each sequence by torch's flash attention; H query heads share G
    key/value heads. [N, H, D] in 16-bit floats. (torch's operator takes the same arguments in 2.11 and 2.13,
    unlike `torch.nn.attention.varlen`. Not run on a GPU yet.)

    Args:
        cu_seqlens: int32, boundaries of the sequences, the longest of `longest` tokens.
        window: number of tokens that each attends to, itself the last; None: all before it.
    """
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query_NHD, key_NGD, value_NGD, cu_seqlens, cu_seqlens, longest, longest,
        0.0, True, False, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return output
