"""Tries each fused part of the local layers on small examples before a model is built with it."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl
from torch import Tensor

from megatron_ibpo.models import fusion, local_modules, packed_attention
from megatron_ibpo.models.shape import ModelShape

ERROR_FACTOR, ERROR_FLOOR = 2.0, 1e-3
"""A fused part may be this many times as far from float64 as plain torch, plus this share of the largest
value."""
SECONDS = 20.0
"""After this time no further shapes of a part are tried."""
TOKENS = 64
CU_SEQLENS, LONGEST = (0, 5, 6, TOKENS), TOKENS - 6

Example = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
"""A fused function, the plain function, and the inputs on which to compare them."""


def working_parts(
    parts: frozenset[str],
    shape: ModelShape,
    dtype: torch.dtype,
    device: str,
    shards: tuple[int, int] = (1, 1),
) -> frozenset[str]:
    """Return the parts that work on every rank: results and gradients are as near to float64 as those of
    plain torch. The others are left out with a warning each, in this process for good.

    Each part is tried on its first example, and on others until SECONDS have passed. Collective over all
    trainers, if there are process groups. `shards` are the sizes of tensor and expert-tensor parallelism.
    """
    fusion.compile_gradients_at_once()
    by_part = examples(shape, dtype, device, shards)
    firsts = [(part, part_examples[0]) for part, part_examples in by_part.items()]
    further_examples = [
        (part, example) for part, part_examples in by_part.items() for example in part_examples[1:]
    ]
    deadline = time.monotonic() + SECONDS
    for number, (part, example) in enumerate(firsts + further_examples):
        if number >= len(firsts) and time.monotonic() > deadline:
            break
        if part in parts - fusion.FAILURES.keys():
            _try(part, example)
    _agree(parts, device)
    return parts - fusion.FAILURES.keys()


def _try(part: str, example: Example) -> None:
    """Leave the part out if it fails or computes something else."""
    try:
        problem = difference(*example)
    except Exception as error:  # compilers raise anything
        fusion.leave_out(part, error)
    else:
        if problem and part not in fusion.FAILURES:
            fusion.leave_out(part, problem)


def _agree(parts: frozenset[str], device: str) -> None:
    """Leave out on all ranks what failed on one, so that copies of a weight get the same gradient."""
    if not dist.is_initialized():
        return
    names = sorted(parts)
    works = torch.tensor([name not in fusion.FAILURES for name in names], dtype=torch.int32, device=device)
    dist.all_reduce(works, dist.ReduceOp.MIN)
    for name, works_everywhere in zip(names, works.tolist(), strict=True):
        if not works_everywhere and name not in fusion.FAILURES:
            fusion.leave_out(name, "it failed on another rank")


def examples(
    shape: ModelShape, dtype: torch.dtype, device: str, shards: tuple[int, int] = (1, 1)
) -> dict[str, list[Example]]:
    """Return examples of each part with the widths that a rank of this model has."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    def norm(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, weight: function(x, weight, shape.rms_norm_eps, shape.zero_centered_norms)

    size = shape.head_dim
    heads, groups = (max(1, n // shards[0]) for n in (shape.num_attention_heads, shape.num_key_value_heads))
    query, key, value = (random(TOKENS, n, size) for n in (heads, groups, groups))
    angles = random(TOKENS, 1, shape.rotary_dim).float()  # in any model's precision
    cos, sin = angles.cos(), angles.sin()
    cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32, device=device)
    normed = [(shape.hidden_size,), *([(heads, size), (groups, size)] if shape.query_key_norms else [])]
    norms = norm(local_modules.compiled_rms_norm), norm(local_modules.rms_norm)
    rotations = (
        lambda x: local_modules.compiled_rotate(x, cos, sin),
        lambda x: local_modules.rotate(x, cos, sin),
    )
    widths = [n // shards[0] for n in (shape.ffn_hidden_size, shape.shared_expert_hidden_size) if n]
    activations: list[Example] = [
        (lambda x: bias_swiglu_impl(x, None), _swiglu, [random(TOKENS, 1, 2 * width)]) for width in widths
    ]
    if width := shape.expert_hidden_size // shards[1]:
        weighted = [random(TOKENS, 2 * width), random(TOKENS, 1).float()]
        activations.append((lambda x, w: weighted_bias_swiglu_impl(x, None, w), _weighted_swiglu, weighted))
    return {
        fusion.NORM: [(*norms, [random(TOKENS, 1, *sizes), random(sizes[-1])]) for sizes in normed],
        fusion.ROTARY: [(*rotations, [x]) for x in (query, key)],
        fusion.ACTIVATION: activations,
        fusion.ATTENTION: [
            (
                partial(fusion.attend, cu_seqlens, LONGEST, window),
                partial(packed_attention.attend_in_rectangles, cu_seqlens, None, window),
                [query, key, value],
            )
            for window in dict.fromkeys(shape.windows or (None,))
        ],
    }


def _swiglu(x: Tensor) -> Tensor:
    """Return the product of gate and up as Megatron's MLP computes it unfused."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted_swiglu(x: Tensor, weights: Tensor) -> Tensor:
    """Return the product with each row's weight too, as Megatron's experts compute it unfused."""
    return (_swiglu(x) * weights).to(x.dtype)


def difference(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]
) -> str | None:
    """Return how a fused function's result or gradients are too far from float64; None if they are not."""
    for name, (error, plain_error, largest) in errors(fused, plain, inputs).items():
        if not error <= ERROR_FACTOR * plain_error + ERROR_FLOOR * largest:
            return f"{name} is {error:.2g} from float64, plain torch's {plain_error:.2g}"
    return None


def errors(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor]
) -> dict[str, tuple[float, float, float]]:
    """Return the largest errors from float64 of the result and of each input's gradient, fused and plain; and
    the largest value in float64."""
    exact = _results(plain, [tensor.double() for tensor in inputs])
    names = ["the result", *(f"the gradient of input {n}" for n in range(1, len(exact)))]
    computed = zip(names, exact, _results(fused, inputs), _results(plain, inputs), strict=True)
    return {
        name: (
            float((fused_result - exact_result).abs().max()),
            float((plain_result - exact_result).abs().max()),
            float(exact_result.abs().max()),
        )
        for name, exact_result, fused_result, plain_result in computed
    }


def _results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the function's result and the gradients of its inputs, in float64."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    direction = torch.linspace(-1, 1, output.numel(), device=output.device).to(output.dtype)
    gradients = torch.autograd.grad(output, leaves, direction.view(output.shape))
    return [tensor.double() for tensor in (output.detach(), *gradients)]
