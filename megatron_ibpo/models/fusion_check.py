"""Tries each fused part of the local layers on a small example before a model is built with it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from megatron_ibpo.models import fusion, local_modules
from megatron_ibpo.models.shape import ModelShape

ERROR_FACTOR, ERROR_FLOOR = 2.0, 1e-3
"""A fused part may be this many times as far from float64 as plain torch, plus this share of the largest
value."""
TOKENS = 64
CU_SEQLENS, LONGEST = (0, 5, 6, TOKENS), TOKENS - 6

Example = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
"""A fused function, the plain function, and the inputs on which to compare them."""


def working_parts(
    parts: frozenset[str], shape: ModelShape, dtype: torch.dtype, device: str
) -> frozenset[str]:
    """Return the parts whose results and gradients are as near to float64 as those of plain torch. The others
    are left out with a warning each, in this process for good."""
    for part, example in examples(shape, dtype, device).items():
        if part not in parts - fusion.FAILURES.keys():
            continue
        try:
            problem = difference(*example)
        except Exception as error:  # compilers raise anything
            fusion.leave_out(part, error)
        else:
            if problem:
                fusion.leave_out(part, problem)
    return parts - fusion.FAILURES.keys()


def examples(shape: ModelShape, dtype: torch.dtype, device: str) -> dict[str, Example]:
    """Return an example of each part with the widths of this model."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    def norm(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x, weight, shape.rms_norm_eps, shape.zero_centered_norms)

    hidden, size = shape.hidden_size, shape.head_dim
    query, key, value = (
        random(TOKENS, heads, size)
        for heads in (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    )
    angles = random(TOKENS, 1, shape.rotary_dim)
    cos, sin = angles.cos(), angles.sin()
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
    window = next(filter(None, shape.windows), None)
    gate_and_up = random(TOKENS, 1, 2 * (shape.ffn_hidden_size or shape.expert_hidden_size))
    return {
        fusion.NORM: (
            norm(local_modules.compiled_rms_norm),
            norm(local_modules.rms_norm),
            [random(TOKENS, 1, hidden), random(hidden)],
        ),
        fusion.ROTARY: (
            lambda x: local_modules.compiled_rotate(x, cos, sin),
            lambda x: local_modules.rotate(x, cos, sin),
            [query],
        ),
        fusion.ACTIVATION: (lambda x: bias_swiglu_impl(x, None), _swiglu, [gate_and_up]),
        fusion.ATTENTION: (
            partial(fusion.attend, cu_seqlens, LONGEST, window),
            partial(local_modules.attend_in_rectangles, cu_seqlens, None, window),
            [query, key, value],
        ),
    }


def _swiglu(x: Tensor) -> Tensor:
    """Return the product of gate and up as Megatron's MLP computes it unfused."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def difference(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]
) -> str | None:
    """Return how a fused function's result or gradients are too far from float64; None if they are not."""
    for what, (error, plain_error, largest) in errors(fused, plain, inputs).items():
        if not error <= ERROR_FACTOR * plain_error + ERROR_FLOOR * largest:
            return f"{what} is {error:.2g} from float64, plain torch's {plain_error:.2g}"
    return None


def errors(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]
) -> dict[str, tuple[float, float, float]]:
    """Return the largest errors of the result and of each input's gradient from float64: fused, plain; and
    the largest value in float64."""
    exact = _results(plain, [tensor.double() for tensor in inputs])
    names = ["the result", *(f"the gradient of input {n}" for n in range(1, len(exact)))]
    computed = zip(names, exact, _results(fused, inputs), _results(plain, inputs), strict=True)
    return {
        name: (
            float((fused_result - wanted).abs().max()),
            float((plain_result - wanted).abs().max()),
            float(wanted.abs().max()),
        )
        for name, wanted, fused_result, plain_result in computed
    }


def _results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the function's result and the gradients of its inputs, in float64."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    direction = torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype)
    gradients = torch.autograd.grad(output, leaves, direction.view(output.shape))
    return [tensor.double() for tensor in (output.detach(), *gradients)]
