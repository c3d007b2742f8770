"""Loss terms as a researcher may write them, and what becomes of each on a GPU: exact Triton code, or a
refusal that names the operation."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from megatron_ibpo.loss import Parameter, Variant

BETA = 0.3


def unclipped(log_ratio):
    return torch.zeros_like(log_ratio, dtype=torch.bool)


def ppo(log_ratio, advantages, *, eps):
    ratio = log_ratio.exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return loss, (ratio - 1).abs() > eps


def focal(logprobs, advantages, *, gamma):
    p = logprobs.exp()
    return -((1 - p) ** gamma) * advantages * logprobs, unclipped(logprobs)


def parameter_to_a_parameter(log_ratio, *, p, gamma):
    return (1 - p) ** gamma * log_ratio, unclipped(log_ratio)


def colliding_names(log_ratio, advantages, *, e, x, tl, zero, row, exp, sign_of, parameters, float, ε):
    return e * log_ratio + (x + tl + zero + row * exp + sign_of * parameters * float * ε) * advantages * (
        log_ratio.exp() + torch.sign(log_ratio)
    ), log_ratio > e


def alpha(log_ratio, advantages):
    both = torch.sub(log_ratio, advantages, alpha=2) + torch.add(log_ratio, advantages, alpha=0.5)
    return both - torch.rsub(log_ratio, advantages, alpha=3), unclipped(log_ratio)


def fused_multiply(log_ratio, logprobs, advantages):
    mixed = torch.addcmul(log_ratio, logprobs, advantages, value=0.3) + torch.lerp(log_ratio, logprobs, 0.25)
    return mixed + torch.addcdiv(log_ratio, advantages, logprobs.exp() + 1, value=2), unclipped(log_ratio)


def global_number(log_ratio, advantages):
    return BETA * log_ratio * advantages, log_ratio > BETA


def bools_as_numbers(log_ratio, advantages):
    right, near = advantages > 0, log_ratio.abs() < 0.5
    weight = right * 2.0 + near.float() - (~near) * 0.25 + (right & near)
    weight += (right == near).to(log_ratio.dtype)
    return weight * log_ratio * (right * near), right + near


def bool_of_number(log_ratio, advantages):
    both = torch.logical_and(log_ratio, advantages)
    return log_ratio * advantages.bool(), torch.logical_not(advantages) | both


def where_scalars(log_ratio, advantages):
    sign = torch.where(advantages > 0, 1.0, -1.0)
    kept = torch.where(log_ratio > 1, 0.0, log_ratio)
    return sign * log_ratio + kept, torch.where(log_ratio > 0, True, False)


def extrema(log_ratio, logprobs, advantages):
    low, high = torch.minimum(log_ratio, advantages), torch.maximum(log_ratio, advantages)
    lost = torch.fmin(log_ratio, logprobs) - torch.fmax(log_ratio, logprobs * 0.1)
    return low * 2 + high + lost + torch.relu(log_ratio) + log_ratio.clamp_min(-1).clamp_max(0.5), low < high


def selected(log_ratio, advantages):
    ratio = log_ratio.exp()
    bounded = torch.where(ratio < 2.0, ratio, 2.0) * advantages
    return bounded + torch.where(log_ratio > 0, log_ratio, 0), ratio > 2


def powers(log_ratio, logprobs):
    size = log_ratio.abs() + 0.1
    low = log_ratio.clamp(-3, 3)
    grown = 2.0**low + torch.pow(0.9, low) + logprobs**0
    return size**1.5 + size**-0.5 + low**3 + size**-2 + grown + 1.0**log_ratio, low != log_ratio


def saturating(log_ratio, logprobs, advantages):
    far = torch.tanh(log_ratio) + torch.sigmoid(log_ratio) + torch.erf(log_ratio) + F.softplus(log_ratio)
    near = torch.expm1(logprobs) + torch.log1p(log_ratio.abs()) + F.logsigmoid(log_ratio) + F.silu(advantages)
    near += F.binary_cross_entropy_with_logits(log_ratio, advantages, reduction="none")
    return far * advantages + near + F.gelu(log_ratio) + F.elu(log_ratio), unclipped(log_ratio)


def overflowing(log_ratio, logprobs):
    """Its derivative overflows in torch on the way to a number that float32 holds."""
    return torch.special.xlogy(log_ratio.exp(), logprobs.exp()), unclipped(log_ratio)


def smooth(log_ratio, advantages):
    huber = F.huber_loss(log_ratio, advantages, reduction="none") + F.smooth_l1_loss(
        log_ratio, torch.zeros_like(log_ratio), reduction="none"
    )
    huber += log_ratio.abs().log1p()
    return huber + F.leaky_relu(log_ratio, 0.1) + F.hardtanh(log_ratio), unclipped(log_ratio)


def steps(log_ratio, advantages):
    return (log_ratio.floor() + advantages.ceil()) * log_ratio, log_ratio.isnan() | log_ratio.isinf()


def without_gradient(log_ratio, advantages):
    with torch.no_grad():
        weight = log_ratio.exp().clamp(max=2.0)
    return -weight * advantages * log_ratio + log_ratio.detach() ** 2, weight == 2


def in_place(log_ratio, advantages):
    loss = log_ratio * advantages
    loss += 1
    loss.mul_(0.5).clamp_(max=3.0)
    return loss, loss > 1


def constants(log_ratio):
    one = torch.ones_like(log_ratio)
    factor = torch.tensor(2.0).exp() * one.exp() + torch.full_like(log_ratio, 0.5).sqrt() + torch.tensor(2)
    return factor * log_ratio, one > 2


def huge_constants(log_ratio):
    return log_ratio.clamp(-3e38, 3e38) + log_ratio * 1e-60, log_ratio < 1e38


def by_python_value(log_ratio, advantages, *, eps):
    factor = math.log(eps) if eps < 1 else 1.0
    return -factor * log_ratio * advantages, log_ratio > eps


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, log_ratio, advantages):
        return self.scale * log_ratio * advantages, unclipped(log_ratio)

    __hash__ = None


def every_input(log_ratio, logprobs, advantages, lengths, positions, entropy, ref_logprobs, rollout_logprobs):
    late = (positions + 1) / lengths * (logprobs - ref_logprobs).clamp(-1, 1).exp()
    return late * log_ratio * advantages * (1 + entropy), rollout_logprobs < -2


def infinities(log_ratio, advantages):
    far = torch.where(log_ratio > 50, math.inf, log_ratio) * advantages
    return far + log_ratio.masked_fill(advantages < -2.5, -math.inf), log_ratio.clamp(max=math.inf) > 3


def nested(log_ratio, advantages):
    for step in range(20):
        log_ratio = torch.where(advantages > step / 10, log_ratio, 0.0) * torch.sigmoid(log_ratio)
    return log_ratio.clamp(max=0.1), log_ratio > 0


def scalar_results(log_ratio, *, n):
    for _ in range(int(n)):
        log_ratio = n * log_ratio
    return log_ratio, torch.zeros_like(log_ratio) > n


def many_operators(log_ratio):
    for _ in range(120):
        log_ratio = log_ratio * 1.01 + 0.001
    return log_ratio, log_ratio > 2


COLLIDING = ("e", "x", "tl", "zero", "row", "exp", "sign_of", "parameters", "float", "ε")
PARAMETERS: dict[str, dict[str, float]] = {
    "ppo": {"eps": 0.2},
    "focal": {"gamma": 2.0},
    "focal_fraction": {"gamma": 1.5},
    "parameter_to_a_parameter": {"p": 0.3, "gamma": 2.5},
    "colliding_names": dict.fromkeys(COLLIDING, 0.3),
    "by_python_value": {"eps": 0.5},
    "scalar_results": {"n": 2.0},
}
EXACT: dict[str, Any] = {
    "focal_fraction": focal,
    "partial": functools.partial(focal, gamma=0.5),
    "scaled": Scaled(2.0),
    "lambda": lambda log_ratio, advantages: (log_ratio.exp() * advantages, log_ratio > 0),
} | {
    term.__name__: term
    for term in (
        ppo, focal, parameter_to_a_parameter, colliding_names, by_python_value, alpha, fused_multiply,
        global_number, bools_as_numbers, bool_of_number, where_scalars, extrema, selected, powers, saturating,
        overflowing, smooth, steps, without_gradient, in_place, constants, huge_constants, infinities,
        every_input, nested, many_operators, scalar_results,
    )
}  # fmt: skip
"""Terms by name; those with parameters have theirs in PARAMETERS."""
OFTEN_IN_TRITON = {
    "focal", "saturating", "scalar_results", "many_operators", "colliding_names", "by_python_value",
}  # fmt: skip
OFTEN_BY_AUTOGRAD = {
    "focal_fraction", "partial", "nested", "extrema", "ppo", "parameter_to_a_parameter", "powers",
}  # fmt: skip
"""Terms whose code every run holds to Triton alone, or to autograd alone; that of others to both."""


def from_expression(text):
    """Return a term of one line."""
    return eval(f"lambda log_ratio, advantages: ({text}, log_ratio > 0)", globals())


REFUSED = {
    "log_ratio * advantages.long()": "int64",
    "log_ratio * advantages.int()": "int32",
    "log_ratio * advantages.to(torch.int32)": "int32",
    "log_ratio * (advantages > 0).long()": "int64",
    "log_ratio * torch.where(advantages > 0, 1, -1)": "int64",
    "log_ratio * (advantages.half() * 3)": "float16",
    "log_ratio * advantages.bfloat16()": "bfloat16",
    "log_ratio.double() * advantages": "float64",
    "log_ratio * advantages.type_as(torch.zeros(0, dtype=torch.half))": "float16",
    "log_ratio * advantages.round()": "aten.round",
    "torch.floor_divide(log_ratio, 0.5)": "floor_divide",
    "log_ratio * (advantages // 0.5)": "aten.div.Tensor_mode",
    "log_ratio * torch.div(advantages, 0.5, rounding_mode='floor')": "aten.div.Tensor_mode",
    "log_ratio * torch.div(advantages, 0.5, rounding_mode='trunc')": "aten.div.Tensor_mode",
    "log_ratio * (advantages % 0.3)": "aten.remainder",
    "log_ratio * torch.fmod(advantages, 0.3)": "aten.fmod",
    "log_ratio / log_ratio.numel()": "numel",
    "log_ratio / log_ratio.shape[0]": "shape",
    "log_ratio / len(log_ratio)": "__len__",
    "log_ratio / log_ratio.size(0)": "size",
    "log_ratio * torch.arange(len(log_ratio))": "__len__",
    "log_ratio * log_ratio.new_ones(log_ratio.shape)": "shape",
    "log_ratio * torch.linspace(0, 1, log_ratio.numel())": "numel",
    "log_ratio - log_ratio.mean()": "aten.mean",
    "log_ratio / advantages.abs().max()": "aten.max",
    "log_ratio * (advantages > 0).sum()": "aten.sum",
    "log_ratio.cumsum(0)": "aten.cumsum",
    "log_ratio.flip(0)": "aten.flip",
    "log_ratio.sort().values": "int64",
    "log_ratio.softmax(0)": "aten.*softmax|aten.amax",
    "log_ratio * torch.rand_like(log_ratio)": "aten.rand.*random numbers",
    "F.dropout(log_ratio, 0.5)": "random numbers",
    "log_ratio if log_ratio[0] > 0 else -log_ratio": "aten.select",
    "log_ratio * advantages.tolist()[0]": "tolist",
    "log_ratio ** 9": "exponent 9",
    "log_ratio.exp() ** advantages": "aten.pow",
    "(-2.0) ** log_ratio": "NaN",
    "log_ratio[log_ratio > 0]": "of shape",
    "log_ratio + 1e-40": "too small",
    "torch.outer(log_ratio, advantages).sum(0)": "another shape",
    "log_ratio * float(advantages.numpy()[0])": "numpy",
    "F.prelu(log_ratio, torch.tensor(0.25))": "another shape",
}
"""Expressions of the value, and what the refusal names."""


def __getattr__(name):
    """Return the term of that name as a loss variant: exact_ppo, or refused_3 by its place in the table."""
    kind, _, key = name.partition("_")
    if kind == "exact" and key in EXACT:
        params = {one: Parameter(value) for one, value in PARAMETERS.get(key, {}).items()}
        return Variant(token_term=EXACT[key], params=params)
    if kind == "refused":
        return Variant(token_term=from_expression([*REFUSED][int(key)]))
    raise AttributeError(name)
